"""The daemon's side of the connection to its trainer.

There is one trainer at a time. A new one replaces the old, which is told to stop. Fragments of Phi are
offered through shared memory as they change; a fragment is not offered again until the trainer has taken it.
"""

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gossamer.node.ipc import control
from gossamer.node.ipc.pulse import Pulse
from gossamer.node.ipc.shared import SharedMemory
from gossamer.node.seldom import Seldom, Trouble
from gossamer.node.storage.wholefile import cannot_write
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads.layout import Fragment

BUFFER_BYTES_MAX = 1 << 20
BACKLOG_BYTES_MAX = 1 << 17
"""Bytes that may wait for a trainer that does not read. asyncio copies all that waits at every write."""
AT_ONCE_NUMEL_MAX = 1 << 20
"""Phi of larger fragments is copied in a thread."""
ACCEPT_RETRY_S = 1.0
WELCOME_S = 30.0
SILENT_S = 30.0
"""A trainer reports twice a second. After this long without a report, plus what some of its steps take, its
speed counts as 0: it hangs, or evaluates."""

log = logging.getLogger("gossamer.trainer")


class Attendant(Protocol):
    """Answers the trainer."""

    def welcome(self) -> control.Welcome:
        """A trainer has come: the first message to it."""
        ...

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        """The trainer hands in a delta. Nobody changes `payload` before the delta is acknowledged."""
        ...

    def trainer_changed(self) -> None:
        """The trainer reported, took a fragment, came or went."""
        ...


class TrainerPort:
    """Accepts the trainer, and keeps what was last said on either side."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = Path(path)
        self._manifest = manifest
        self._trouble = Trouble(log, "trainers can be understood again")
        self._refusals = Seldom()
        self._shared: SharedMemory | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._taken: set[int] = set()
        self.attachments = 0
        """Number of trainers that have come so far: tells a new one from the one before."""
        self.report: control.Report | None = None
        """The last report of a trainer; once that trainer is gone or silent, with a speed of 0."""
        self.pulse = Pulse()
        """The pulse of the trainer that is attached."""
        self.done = asyncio.Event()
        """Set while no trainer is attached."""
        self.done.set()

    @property
    def attached(self) -> bool:
        return self._writer is not None

    def is_free(self, fragment: int) -> bool:
        """Whether the trainer has taken what it was last offered of this fragment."""
        return fragment not in self._taken

    async def serve(self, attendant: Attendant) -> None:
        """Accept trainers until cancelled. Raises StorageError if no socket can be made."""
        listener = self._listen()
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as tasks:
                attending: asyncio.Task[None] | None = None
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:  # too many files are open just now
                        self._could_not_attach(error)
                        await asyncio.sleep(ACCEPT_RETRY_S)
                        continue
                    if attending is not None and not attending.done():
                        self.send(control.Stop())
                        attending.cancel()
                        await asyncio.wait([attending])
                    attending = tasks.create_task(self._attend(connection, attendant))
        finally:
            listener.close()
            with suppress(OSError):  # the folder may have become read-only
                self._path.unlink()

    def _listen(self) -> socket.socket:
        listener = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with suppress(FileNotFoundError):
                self._path.unlink()
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            listener.listen(1)
            listener.setblocking(False)
        except OSError as error:
            if listener:
                listener.close()
            raise cannot_write(
                self._path, error, f"cannot listen on {self._path}: {error.strerror or error}"
            ) from None
        return listener

    async def _attend(self, connection: socket.socket, attendant: Attendant) -> None:
        """Serve one trainer until it goes."""
        try:
            self._shared = SharedMemory.create(self._manifest)
        except OSError as error:  # too many files are open, or there is no memory, just now
            self._could_not_attach(error)
            connection.close()
            await asyncio.sleep(ACCEPT_RETRY_S)
            return
        try:
            welcome = control.encode(attendant.welcome())
            socket.send_fds(connection, [welcome[: control.LENGTH_BYTES]], [self._shared.fd])
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=BUFFER_BYTES_MAX)
        except BaseException as error:
            connection.close()
            self._shared.close()
            if not isinstance(error, OSError):  # another trainer has come already
                raise
            self._could_not_attach(error)
            return
        try:
            writer.write(welcome[control.LENGTH_BYTES :])
            async with asyncio.timeout(WELCOME_S):
                await writer.drain()
            self._writer = writer
            self.attachments += 1
            self._taken.clear()
            self.done.clear()
            self.pulse.begin(time.monotonic())
            attendant.trainer_changed()
            while True:
                length = control.frame_length(await self._prefix(reader, attendant))
                self._handle(control.decode(await reader.readexactly(length)), attendant)
        except MalformedError as error:
            self._trouble.met(f"cannot understand a trainer that runs another release of Gossamer ({error})")
        except (asyncio.IncompleteReadError, OSError):
            pass  # it is gone or reads nothing, or the system has no memory for what it is sent
        finally:
            self._writer = None
            self.done.set()
            writer.close()
            self._shared.close()
            self._comes_to_rest(attendant)

    def _could_not_attach(self, error: OSError) -> None:
        """Log that a trainer could not attach, but seldom: a waiting trainer tries again every moment."""
        problem = error.strerror or str(error)
        if self._refusals.is_due(problem, time.monotonic()):
            log.warning("a trainer could not attach: %s", problem)

    async def _prefix(self, reader: asyncio.StreamReader, attendant: Attendant) -> bytes:
        """The length prefix of the trainer's next message. Raises IncompleteReadError once it is gone."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S + self.pulse.usual_s):
                    return await reader.readexactly(control.LENGTH_BYTES)
            self._comes_to_rest(attendant)

    def _comes_to_rest(self, attendant: Attendant) -> None:
        if self.report is not None:
            self.report = replace(self.report, tokens_per_s=0.0)
        attendant.trainer_changed()

    def _handle(self, message: control.ControlMessage, attendant: Attendant) -> None:
        assert self._shared is not None
        match message:
            case control.Publish():
                attendant.publish(message, self._shared.payload[: message.payload_bytes])
            case control.Took():
                self._taken.discard(message.fragment)
                attendant.trainer_changed()
            case control.Report():
                self.report = message
                if message.state != control.JOINING:
                    self.pulse.note(message.inner_steps, time.monotonic())
                attendant.trainer_changed()
            case _:
                raise MalformedError("a message that only a daemon sends")

    def send(self, message: control.ControlMessage) -> None:
        """Send to the trainer, if there is one. A trainer that reads nothing is cut off."""
        writer = self._writer
        if writer is None:
            return
        writer.write(control.encode(message))
        if writer.transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            writer.transport.abort()

    async def offer(self, fragment: Fragment, phi: Ints, told: control.Phi) -> None:
        """Offer a fragment of Phi, and then send `told` about it, if there is a trainer and it has taken the
        last offer of that fragment."""
        shared = self._shared
        if not self.attached or shared is None or fragment.index in self._taken:
            return
        self._taken.add(fragment.index)
        area = shared.phi(fragment)
        if fragment.numel > AT_ONCE_NUMEL_MAX:
            await asyncio.to_thread(area.__setitem__, slice(None), phi)
        else:
            area[:] = phi
        if shared is self._shared:
            self.send(told)
