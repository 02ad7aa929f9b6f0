"""Keeping the chunks that come. While none can be kept, as on a full disk, none are fetched.

A chunk that could not be stored stays in memory and is tried again and again. Once it can be, others can too.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from gossamer.node.seldom import Trouble
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.wholefile import writable_once

DISK_RETRY_S = 5.0

PATIENCE_S = 2.0
"""Less than FETCH_OVERDUE_S: a peer that was not even asked must not pass for a slow one."""

log = logging.getLogger("gossamer.transfers")


class Keeping:
    """Stores chunks, and knows whether that is possible."""

    def __init__(
        self, chunks: ChunkStore, is_wanted: Callable[[bytes], object], arrived: Callable[[bytes], object]
    ) -> None:
        """`is_wanted` tells whether a chunk is still of use. `arrived` is called with the hash of a chunk
        that could not be stored at first, once it is stored or of no use any more."""
        self._chunks = chunks
        self._is_wanted = is_wanted
        self._arrived = arrived
        self._unkept: tuple[bytes, bytes] | None = None
        """Hash and bytes of a chunk that could not be stored yet."""
        self._works = asyncio.Event()
        self._works.set()
        self.trouble = Trouble(log, "payloads can be stored again")

    @property
    def works(self) -> bool:
        """Whether chunks can be kept, as far as is known."""
        return self._works.is_set()

    async def works_soon(self) -> bool:
        """Whether chunks can be kept now or within `PATIENCE_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._works.wait()
        return self.works

    async def keep(self, blob: bytes, data: bytes) -> bool:
        """Store a chunk whose hash is right, or drop it if no longer wanted. Returns whether that is done."""
        if not self._is_wanted(blob):
            return True
        try:
            await asyncio.to_thread(self._chunks.put, blob, data)
        except OSError as error:
            until = writable_once(error)
            text = f"cannot store a payload: {error.strerror}; fetching pauses until {until}"
            self.trouble.met(text)
            if self._unkept is None:
                self._unkept = (blob, data)
                self._works.clear()
            return False
        self.trouble.not_met()
        return True

    async def run(self) -> None:
        """Try again to store what could not be stored, until cancelled."""
        while True:
            await asyncio.sleep(DISK_RETRY_S)
            if self._unkept is not None and await self.keep(*self._unkept):
                (blob, _), self._unkept = self._unkept, None
                self._works.set()
                self._arrived(blob)
