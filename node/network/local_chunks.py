"""The chunks on our disk, as exchanged over links: read when asked for, stored as they arrive."""

import asyncio
import logging
import time
from collections.abc import Callable

from gossamer.node.network.keeping import Keeping
from gossamer.node.network.link import PeerLink
from gossamer.node.phi.snapshots import SnapshotShelf
from gossamer.node.seldom import Seldom
from gossamer.node.storage.chunkstore import ChunkStore, MissingChunkError
from gossamer.protocol import events as ev
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.errors import StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.payloads.chunks import payload_chunk_sizes
from gossamer.protocol.payloads.packing import Chunk

LOOK_AGAIN_S = 10.0
"""How often to look for chunks that could not be read."""

log = logging.getLogger("gossamer.transfers")


class LocalChunks:
    """The transport's `Chunks`, for one daemon."""

    def __init__(
        self,
        chunks: ChunkStore,
        shelf: SnapshotShelf,
        core: Replica,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._chunks = chunks
        self._shelf = shelf
        self._core = core
        self._dispatch = dispatch
        self._seldom = Seldom()
        self.keeping = Keeping(chunks, core.fetcher.wants.keys_of, self._arrived)
        self.on_snapshot_lost: Callable[[bytes], None] = lambda blob: None
        """Called with the hash of a chunk of a kept snapshot that turned out to be damaged on disk."""

    async def run(self) -> None:
        """Look for chunks that could not be read, until cancelled: a disk may have been away."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            if self._chunks.has_mislaid:
                found = await asyncio.to_thread(self._chunks.find_again)
                if found and self._seldom.is_due("found", time.monotonic()):
                    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
                    log.info("chunk %s%s can be read again", short(found[0]), others)
                for blob in found:
                    self._dispatch(ev.ChunkArrived(blob))

    def holds(self, blob: bytes) -> bool:
        """Whether a chunk is here. A snapshot that it is part of counts as used."""
        self._shelf.touch(blob)
        return blob in self._chunks

    async def read_chunk(self, blob: bytes) -> Chunk | None:
        """A chunk from disk, None if it is not here."""
        if not self.holds(blob):
            return None
        try:
            return await asyncio.to_thread(self._chunks.read, blob)
        except MissingChunkError:
            self.refetch(blob)
            return None
        except StorageError as error:
            log.debug("%s", error)
            return None

    def expected_size(self, blob: bytes) -> int | None:
        return self._core.fetcher.expected_size(blob)

    async def can_keep(self) -> bool:
        return await self.keeping.works_soon()

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        """Keep a chunk that we wanted and whose hash is right. Returns whether that is done; if not, it is
        later.

        A chunk that is no longer of use, since what it belongs to was given up meanwhile, is dropped.
        """
        is_kept = await self.keeping.keep(blob, data)
        if is_kept:
            self._arrived(blob)
        return is_kept

    def _arrived(self, blob: bytes) -> None:
        self._dispatch(ev.ChunkArrived(blob))

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        self._dispatch(ev.ChunkFailed(link.number, blob))

    def refetch(self, blob: bytes) -> None:
        """A chunk on disk turned out to be damaged: fetch it again if it is part of a delta. The archive
        repairs our snapshots."""
        deltas = [d for d in (*self._core.ledger, *self._core.holdings.revoked) if blob in d.body.chunks]
        if deltas:
            # Every line helps to find the damage, but a failing disk damages hundreds of chunks in a minute.
            is_due = self._seldom.is_due("damaged", time.monotonic())
            level = logging.WARNING if is_due else logging.DEBUG
            log.log(level, "chunk %s was damaged on disk; fetching it again", short(blob))
        for delta in deltas:
            sizes = payload_chunk_sizes(delta.body.payload_bytes)
            self._dispatch(ev.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))
        if self._shelf.claim_with(blob) is not None:
            self.on_snapshot_lost(blob)
