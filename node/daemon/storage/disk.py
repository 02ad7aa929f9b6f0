"""The one gate for what a node writes: while its disk takes nothing, writers wait here.

A disk fills up, is made read-only, or a backup program holds the database. All of that passes, and a node
that ended each time would leave the swarm. So whoever writes does it through `Disk`. The first write that
fails closes the gate: the core is told that nothing can be stored, nothing more is fetched, and whatever has
to be kept waits. Every few seconds the gate tries whether there is room for one more chunk, and opens if
there is.

A folder that is gone (moved, removed, unmounted) is another matter. Another node's may come in its place, so
nothing is written any more: the daemon ends, and says so in one line.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from gossamer.node.files import write_atomically
from gossamer.node.logs import Fault
from gossamer.protocol.errors import FolderGoneError, StorageError
from gossamer.protocol.limits import CHUNK_BYTES_MAX

PROBE_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("gossamer.disk")


class Disk:
    """Whether a node's folders can be written to, and the way to write to them."""

    def __init__(self, *folders: Path, on_closed: Callable[[], object]) -> None:
        """`folders` may be on different disks. `on_closed` is called when a write has failed.

        Raises StorageError if one of them is not there.
        """
        try:
            self._folders = [(folder, folder.stat()) for folder in folders]
        except OSError as error:
            raise StorageError(f"cannot use {error.filename}: {error.strerror}") from None
        self._on_closed = on_closed
        self._open = asyncio.Event()
        self._open.set()
        self._fault = Fault(log, "the disk can be written to again")

    @property
    def is_writable(self) -> bool:
        """Whether writes succeed, as far as is known."""
        return self._open.is_set()

    @property
    def problem(self) -> str:
        """Why nothing can be written, now or a moment ago; empty if it can."""
        return self._fault.text

    async def writable(self, within_s: float | None = None) -> bool:
        """Wait until writes may succeed, but no longer than `within_s`; returns whether they may."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._open.wait()
        return self.is_writable

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which writes, in a thread, again and again until it succeeds; returns its result.

        For what must be kept. Raises FolderGoneError.
        """
        while True:
            await self._open.wait()
            try:
                return await asyncio.to_thread(self._checked, partial(work, *args, **kwargs))
            except (OSError, StorageError) as error:
                self.failed(error)

    async def try_write(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run `work` once, if writes may succeed; returns whether it did. For what others hold, too.

        Raises FolderGoneError.
        """
        if not self.is_writable:
            return False
        try:
            await asyncio.to_thread(self._checked, partial(work, *args, **kwargs))
        except (OSError, StorageError) as error:
            self.failed(error)
            return False
        return True

    def failed(self, error: OSError | StorageError) -> None:
        """A write has failed: close the gate. Raises FolderGoneError if there is nothing to wait for."""
        if isinstance(error, FolderGoneError):
            raise error
        if isinstance(error, OSError):
            what = error.filename or self._folders[0][0]
            error = StorageError(f"cannot write {what}: {error.strerror or error}")
        self._fault.failed(f"{error}; nothing is stored, fetched or published until that works")
        self._open.clear()
        self._on_closed()

    async def run(self) -> None:
        """Look after the disk until cancelled. Raises FolderGoneError if a folder is gone."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await asyncio.to_thread(self._checked, (lambda: None) if self.is_writable else self._probe)
            except OSError as error:
                self.failed(error)
            else:
                self._fault.worked()
                self._open.set()

    def _checked(self, work: Callable[[], T]) -> T:
        """Do the work if the folders are still the same."""
        for folder, found in self._folders:
            with suppress(OSError):
                if os.path.samestat(found, folder.stat()):
                    continue
            raise FolderGoneError(
                f"{folder} is gone: was it moved or removed, or its disk unmounted? Put it back, or stop this"
                " node"
            )
        return work()

    def _probe(self) -> None:
        """Write as much as a chunk takes to each folder, and remove it. Raises OSError."""
        for folder, _ in self._folders:
            write_atomically(folder / "probe", bytes(CHUNK_BYTES_MAX), durable=True)
            (folder / "probe").unlink()
