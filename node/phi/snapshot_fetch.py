"""Fetches a snapshot from others: what is asked for, how far it is, and what becomes of those given up.

Its chunks come through the core, as payloads do, and are stored among all others. They are read as they come.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from gossamer.node.phi import snapshots
from gossamer.node.storage.chunkstore import ChunkStore, MissingChunkError
from gossamer.protocol import events as ev
from gossamer.protocol.claims import Claim
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.payloads.chunks import chunk_sizes

PROGRESS_S = 2.0

log = logging.getLogger("gossamer.archive")


class SnapshotFetch:
    """The snapshot to adopt, and the one that may have to be adopted soon."""

    def __init__(
        self,
        core: Replica,
        chunks: ChunkStore,
        dispatch: Callable[[ev.Event], object],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when other snapshots are wanted than before: waiting work may be possible
        now."""
        self._core = core
        self._chunks = chunks
        self._dispatch = dispatch
        self._on_change = on_change
        self.adopting: Claim | None = None
        self.prefetching: Claim | None = None
        """The snapshot that may have to be adopted soon."""
        self._given_up: set[bytes] = set()
        """Roots of snapshots whose fetch was given up, until what came of them is removed."""
        self.has_leftovers = False
        """Whether an earlier run may have left chunks that nobody needs, mostly of snapshots."""
        self._reader: snapshots.SnapshotReader | None = None
        """Reads the snapshot that is being fetched."""
        self._told_at = 0.0
        self._told: tuple[bytes, int] | None = None
        """The progress last logged: the snapshot's root, and how many of its chunks were missing."""

    @property
    def sought(self) -> set[bytes]:
        """Roots of the snapshots that are wanted."""
        return {claim.root for claim in (self.adopting, self.prefetching) if claim is not None}

    def seek(self, adopting: Claim | None, prefetching: Claim | None) -> None:
        """Want these from now on, and give up any other."""
        before = self.sought
        self.adopting, self.prefetching = adopting, prefetching
        self._given_up = (self._given_up | before) - self.sought
        self._on_change()

    def adopted(self, claim: Claim) -> None:
        """Note that a snapshot was adopted: nothing is wanted any more, and all of this one is kept."""
        self.seek(None, None)
        self._given_up.discard(claim.root)

    def check(self) -> None:
        """Give up the snapshot to adopt if the core no longer wants it: nobody has it any more, and our own
        history goes on."""
        if self.adopting is not None and self.adopting != self._core.sealing.adopting:
            self._reader = None
            self.seek(None, self.prefetching)

    def take_given_up(self) -> set[bytes]:
        """Return and forget the roots of snapshots that were given up: the caller removes what came of
        them."""
        roots, self._given_up = self._given_up, set()
        return roots

    def put_back(self, roots: set[bytes]) -> None:
        """Note that what came of these could not be removed. Some may be wanted again by now."""
        self._given_up |= roots - self.sought

    @property
    def may_clear_up(self) -> bool:
        """Whether any snapshots were given up, and what came of them is of no more use.

        The snapshot that is wanted now may share chunks with them, which its index tells. If none is wanted
        and we have no model yet, one of them may be wanted again, and its fetch would go on where it stopped.
        """
        return bool(self._given_up) and self._knows_what_is_of_use

    @property
    def may_clear_leftovers(self) -> bool:
        """The same for what an earlier run left: it may have ended while it fetched the snapshot that we
        want.

        A node that comes back with a model soon finds out whether it has to start from another snapshot;
        until then nothing is cleared.
        """
        if not self.has_leftovers or (self.adopting is None and self._core.sealing.is_in_a_hurry):
            return False
        return self._knows_what_is_of_use

    @property
    def _knows_what_is_of_use(self) -> bool:
        if self.sought:
            return all(root in self._chunks for root in self.sought)
        return self._core.sealing.joined

    def progress(self) -> tuple[int, int] | None:
        """For the snapshot that is being fetched: how many of its chunks are here, and how many it has."""
        claim = self.adopting or self.prefetching
        if claim is None:
            return None
        total = self._total
        return total - len(self._core.fetcher.wants.missing(claim.key)), total

    @property
    def _total(self) -> int:
        return len(chunk_sizes(self._core.layout.snapshot_bytes))

    async def go_on(self, claim: Claim) -> bool:
        """Ask for what is missing of a snapshot, and read what is here. Returns whether all of it is read and
        it is still wanted.

        A snapshot that cannot be used is given up.
        """
        try:
            return await self._go_on(claim)
        except MissingChunkError:
            return False
        except PayloadError as error:
            self._refuse(claim, error)
            return False

    async def _go_on(self, claim: Claim) -> bool:
        size = self._core.layout.snapshot_bytes
        lacking = await asyncio.to_thread(snapshots.missing, claim.root, size, self._chunks)
        if lacking and self._is_wanted(claim):  # else the core has changed its mind
            self._dispatch(ev.Need(claim.key, lacking))
            self._tell_progress(claim, len(lacking))
        if self._reader is None or self._reader.root != claim.root:
            self._reader = None  # frees its memory before another is allocated
            self._reader = snapshots.SnapshotReader(claim.root, size, self._chunks)
        is_read = await asyncio.to_thread(self._reader.read_on)
        return is_read and not lacking and self._is_wanted(claim)

    def take(self) -> Ints:
        """Phi, int32[numel], of the snapshot that has been read whole. The caller owns it from now on."""
        assert self._reader is not None
        phi, self._reader = self._reader.phi, None
        return phi

    def _is_wanted(self, claim: Claim) -> bool:
        return claim == self.prefetching or claim == self.adopting == self._core.sealing.adopting

    def _refuse(self, claim: Claim, error: PayloadError) -> None:
        """Give up a snapshot that cannot be used: the core chooses another, or our own history goes on."""
        log.error("the snapshot of round %d cannot be used: %s", claim.round, error)
        self._reader = None
        wanted = (self.adopting, self.prefetching)
        self.seek(*(None if other is None or other.root == claim.root else other for other in wanted))
        self._dispatch(ev.Unusable(claim))

    def _tell_progress(self, claim: Claim, lacking: int) -> None:
        now, total, state = time.monotonic(), self._total, (claim.root, lacking)
        if now - self._told_at > PROGRESS_S and claim.root in self._chunks and state != self._told:
            self._told_at, self._told = now, state
            log.info("fetching the model of round %d: %d of %d MiB", claim.round, total - lacking, total)
