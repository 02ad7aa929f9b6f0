"""Writes records to disk in batches, durably if any of them is our own."""

import asyncio
import logging
from collections.abc import Callable

from gossamer.node.seldom import Trouble
from gossamer.node.storage.recordstore import RecordStore
from gossamer.protocol.errors import StorageError
from gossamer.protocol.records import Delta

BACKLOG_MAX = 4096
"""Records that may wait to be written. Beyond that, links have to wait with the records that they bring."""

RETRY_S = 5.0

log = logging.getLogger("gossamer.records")


class RecordWriter:
    """Stores the records that come in. The archive notes in the same store what became of them."""

    def __init__(
        self, store: RecordStore, on_own_stored: Callable[[Delta], None], on_failed: Callable[[], object]
    ) -> None:
        """`on_failed` is called each time that writing fails, before it is tried again."""
        self._store = store
        self._on_own_stored = on_own_stored
        self._on_failed = on_failed
        self.trouble = Trouble(log, "records can be written again")
        self._waiting: list[tuple[Delta, bool]] = []
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, delta: Delta, *, own: bool) -> None:
        """Queue a record. For our own, `on_own_stored` is called once it is safe on disk."""
        self._waiting.append((delta, own))
        self._news.set()
        self._idle.clear()
        if len(self._waiting) > BACKLOG_MAX:
            self._has_room.clear()

    @property
    def has_room(self) -> bool:
        return self._has_room.is_set()

    async def room(self) -> None:
        """Wait while the backlog is too long."""
        await self._has_room.wait()

    async def drained(self) -> None:
        """Wait until everything queued is on disk."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._waiting = self._waiting, []
            own = [delta for delta, is_own in batch if is_own]
            await self._write([delta for delta, _ in batch], durable=bool(own))
            for delta in own:
                self._on_own_stored(delta)
            self._has_room.set()
            if not self._waiting:
                self._idle.set()

    async def _write(self, deltas: list[Delta], *, durable: bool) -> None:
        while True:
            try:
                await asyncio.to_thread(self._store.add, deltas, durable=durable)
                return self.trouble.not_met()
            except StorageError as error:
                self._on_failed()
                self.trouble.met(f"{error}; trying again every {RETRY_S:.0f} s")
                await asyncio.sleep(RETRY_S)
