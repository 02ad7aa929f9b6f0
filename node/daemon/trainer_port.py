"""The daemon's side of the connection to its trainer, and what becomes of the deltas handed in over it.

There is one trainer at a time. A new one replaces the old, which is told to stop. Fragments of Phi are
offered through shared memory as they change; a fragment is not offered again until the trainer has taken it.
A delta handed in is kept even if its trainer dies: its record is signed, its payload is stored and then the
record, and only then is it acknowledged ("write before you speak").
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.files import cannot_write
from gossamer.node.ipc import messages as control
from gossamer.node.ipc.messages import SharedMemory
from gossamer.node.logs import RateLimit
from gossamer.protocol import events as ev
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Fragment, split_payload
from gossamer.protocol.records import NO_RECORD, Delta, DeltaBody

STRIDES = 3
"""How many strides a step may take: steps differ, and one after which a loop evaluates may take long."""

BUFFER_BYTES_MAX = 1 << 20
BACKLOG_BYTES_MAX = 1 << 17
"""Bytes that may wait for a trainer that does not read. asyncio copies all that waits at every write."""
AT_ONCE_NUMEL_MAX = 1 << 20
"""Phi of larger fragments is copied in a thread."""
AT_ONCE_BYTES_MAX = 1 << 18
"""Larger payloads are hashed in a thread."""
ACCEPT_RETRY_S = 1.0
WELCOME_S = 30.0
SILENT_S = 30.0
"""A trainer reports twice a second. After this long without a report, plus what some of its steps take, its
speed counts as 0: it hangs, or evaluates."""

log = logging.getLogger("gossamer.trainer")


class Pulse:
    """Whether a trainer still does steps: the time since its last one, against the longest so far.

    A stride is the time between two reports with different numbers of steps. Times are seconds of the local
    monotonic clock.
    """

    def __init__(self, now: float) -> None:
        """A trainer has come, and has not reported any steps yet."""
        self._steps: int | None = None
        self._stepped_at = now
        self._longest_s = 0.0

    def note(self, steps: int, now: float) -> None:
        """The trainer reports that it has done `steps` steps so far."""
        if steps != self._steps:
            if self._steps is not None:
                self._longest_s = max(self._longest_s, now - self._stepped_at)
            self._steps, self._stepped_at = steps, now

    @property
    def usual_s(self) -> float:
        """The time within which the trainer does another step."""
        return STRIDES * self._longest_s

    def overdue_s(self, now: float) -> float:
        """How much later its next step is than any so far; negative while it is not late."""
        return now - self._stepped_at - self.usual_s


class Attendant(Protocol):
    """Answers the trainer."""

    def welcome(self) -> control.Welcome: ...  # the first message to a trainer that has come

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        """The trainer hands in a delta. Nobody changes `payload` before the delta is acknowledged."""

    def trainer_changed(self) -> None: ...  # it reported, took a fragment, came or went


class TrainerPort:
    """Accepts the trainer, and keeps what was last said on either side."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = Path(path)
        self._manifest = manifest
        self._limit = RateLimit()
        self._shared: SharedMemory | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._offered: set[int] = set()
        """Fragments whose last offer the trainer has not taken yet."""
        self.attachments = 0
        """Number of trainers that have come so far."""
        self.report: control.Report | None = None
        """The last report of a trainer; once that trainer is gone or silent, with a speed of 0."""
        self.pulse = Pulse(time.monotonic())
        """The pulse of the trainer that is attached, or was last."""
        self.done = asyncio.Event()
        """Set while no trainer is attached."""
        self.done.set()

    @property
    def attached(self) -> bool:
        return self._writer is not None

    def is_free(self, fragment: int) -> bool:
        """Whether there is a trainer, which has taken what it was last offered of this fragment."""
        return self.attached and fragment not in self._offered

    async def serve(self, attendant: Attendant) -> None:
        """Accept trainers until cancelled. Raises StorageError if no socket can be made."""
        listener = self._listener()
        loop = asyncio.get_running_loop()
        attending: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:  # too many files are open just now
                        self._warn(f"a trainer could not attach: {error.strerror or error}")
                        await asyncio.sleep(ACCEPT_RETRY_S)
                        continue
                    if attending is not None and not attending.done():
                        self.send(control.Stop())
                        attending.cancel()
                        await asyncio.wait([attending])
                    attending = tasks.create_task(self._attend(connection, attendant))
                    await asyncio.sleep(0)  # it begins, or it would not close its connection when cancelled
        finally:
            listener.close()
            with suppress(OSError):  # the folder may have become read-only
                self._path.unlink()

    def _listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                self._path.unlink()
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            listener.listen(1)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            otherwise = f"cannot listen on {self._path}: {error.strerror or error}"
            raise cannot_write(self._path, error, otherwise) from None
        return listener

    async def _attend(self, connection: socket.socket, attendant: Attendant) -> None:
        """Serve one trainer until it goes, or another comes."""
        shared = writer = None
        try:
            self._shared = shared = SharedMemory.create(self._manifest)
            welcome = control.encode(attendant.welcome())
            socket.send_fds(connection, [welcome[: control.LENGTH_BYTES]], [shared.fd])
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=BUFFER_BYTES_MAX)
            writer.write(welcome[control.LENGTH_BYTES :])
            async with asyncio.timeout(WELCOME_S):
                await writer.drain()
            self._writer = writer
            self.attachments += 1
            self._offered.clear()
            self.done.clear()
            self.pulse = Pulse(time.monotonic())
            attendant.trainer_changed()
            while True:
                length = control.frame_length(await self._prefix(reader, attendant))
                self._handle(control.decode(await reader.readexactly(length)), attendant)
        except MalformedError as error:
            self._warn(f"cannot understand a trainer that runs another release of Gossamer ({error})")
        except asyncio.IncompleteReadError:
            pass  # it is gone
        except OSError as error:  # it reads nothing, or there are no files or no memory left just now
            if self._writer is None:
                self._warn(f"a trainer could not attach: {error.strerror or error}")
        finally:
            self._writer = None
            self.done.set()
            connection.close()
            if writer is not None:
                writer.close()
            if shared is not None:
                shared.close()
            self._comes_to_rest(attendant)

    def _warn(self, problem: str) -> None:
        """Log why a trainer cannot attach, once in a while: a waiting trainer tries again every moment."""
        if self._limit.allows(problem):
            log.warning("%s", problem)

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
            case control.Applied():
                self._offered.discard(message.fragment)
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

    async def offer(self, fragment: Fragment, phi: Ints, message: control.Phi) -> None:
        """Offer a fragment of Phi that is free, and then send `message` about it."""
        shared = self._shared
        if shared is None or not self.is_free(fragment.index):
            return
        self._offered.add(fragment.index)
        area = shared.phi(fragment)
        if fragment.numel > AT_ONCE_NUMEL_MAX:
            await asyncio.to_thread(area.__setitem__, slice(None), phi)
        else:
            area[:] = phi
        if shared is self._shared:
            self.send(message)


class Publisher:
    """Stores and signs the deltas of our trainers, one after another, even if the trainer has died meanwhile.

    A delta is acknowledged once its record is durable, or once it is clear that there will be no record.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        records: RecordStore,
        disk: Disk,
        dispatch: Callable[[ev.Event], object],
        send: Callable[[control.ControlMessage], None],
    ) -> None:
        """`send` sends to the trainer, if there is one."""
        self._chunks = chunks
        self._records = records
        self._disk = disk
        self._dispatch = dispatch
        self._send = send
        # No more than one of each trainer that has come: each waits until its last one is acknowledged.
        self._waiting: asyncio.Queue[tuple[control.Publish, memoryview]] = asyncio.Queue()
        self._signed: Delta | None = None
        self.handed_in = 0
        """The last round for which we were handed a delta: none is wanted for this or an earlier round."""
        self.acknowledged = 0
        """The last round whose delta needs nothing more from a trainer."""

    def hand_in(self, message: control.Publish, payload: memoryview) -> None:
        """Have a delta stored and signed; `payload` is released then."""
        self._waiting.put_nowait((message, payload))
        self.handed_in = message.round

    def signed(self, delta: Delta) -> None:
        """The core has signed the delta that we asked it to sign."""
        self._signed = delta

    async def run(self) -> None:
        """Publish the deltas handed in, until cancelled. A full disk delays this, and nothing else."""
        while True:
            await self._publish(*await self._waiting.get())
            self._waiting.task_done()

    async def drained(self) -> None:
        """Wait until all deltas handed in are announced."""
        await self._waiting.join()

    async def _publish(self, message: control.Publish, payload: memoryview) -> None:
        """Have the core sign for a payload, store both, and only then have the delta announced."""
        if len(payload) > AT_ONCE_BYTES_MAX:
            chunks = await asyncio.to_thread(_hashes, payload)
        else:
            chunks = _hashes(payload)
        await self._disk.writable()  # what is signed later is signed with what is known then
        body = DeltaBody(
            round=message.round,
            base=message.base,
            tokens=message.tokens,
            steps=message.steps,
            loss=message.loss,
            codec=message.codec,
            payload_bytes=len(payload),
            chunks=chunks,
            previous=NO_RECORD,
            epoch=message.epoch,
            blocks=message.blocks,
            turn=message.turn,
        )
        self._signed = None
        self._dispatch(ev.Publish(body))
        if self._signed is not None:
            chunk = await self._disk.write(self._store, payload, self._signed)
            self._dispatch(ev.Stored(self._signed, chunk))
        payload.release()
        self.acknowledged = max(self.acknowledged, message.round)
        self._send(control.Published(message.round))

    def _store(self, payload: memoryview, delta: Delta) -> bytes:
        """Put the payload's chunks, which stay reserved until a sweep finds them in an open record, and then
        the record. Returns the chunk, as it travels, if there is only one."""
        chunk = b""
        for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
            # The same chunk in a delta whose round has closed may be about to be dropped.
            self._chunks.reserve(blob)
            chunk = self._chunks.put(blob, piece, durable=True, is_read_next=True)
        self._records.add([delta], own=True)
        return chunk if len(delta.body.chunks) == 1 else b""


def _hashes(payload: memoryview) -> tuple[bytes, ...]:
    """Of the payload's chunks."""
    return tuple(sha256(piece).digest() for piece in split_payload(payload))
