"""Getting a snapshot from others: what is asked for, how far it is, and what becomes of those given up.

Its chunks come through the core, as payloads do, and lie among all others; it is read here as they come.
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
    """The snapshot to adopt, and the one that may have to be soon."""

    def __init__(
        self,
        core: Replica,
        chunks: ChunkStore,
        dispatch: Callable[[ev.Event], object],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` hears that others are wanted than before: what had to wait may be done now."""
        self._core = core
        self._chunks = chunks
        self._dispatch = dispatch
        self._on_change = on_change
        self.adopting: Claim | None = None
        self.prefetching: Claim | None = None
        """What may have to be adopted soon."""
        self._given_up: set[bytes] = set()
        """Roots of those that were fetched and are not any more, until what came of them is removed."""
        self.has_leftovers = False
        """Whether an earlier run may have left chunks that nobody needs, of snapshots above all."""
        self._reader: snapshots.SnapshotReader | None = None
        """Of the one of those that is being fetched."""
        self._told_at = 0.0
        self._told: tuple[bytes, int] | None = None
        """Of which snapshot that was, and how many of its chunks were lacking."""

    @property
    def sought(self) -> set[bytes]:
        """Roots of the snapshots that are wanted."""
        return {claim.root for claim in (self.adopting, self.prefetching) if claim is not None}

    def seek(self, adopting: Claim | None, prefetching: Claim | None) -> None:
        """From now on these are wanted; any other is given up."""
        before = self.sought
        self.adopting, self.prefetching = adopting, prefetching
        self._given_up = (self._given_up | before) - self.sought
        self._on_change()

    def adopted(self, claim: Claim) -> None:
        """Nothing is wanted any more, and of this one all is kept."""
        self.seek(None, None)
        self._given_up.discard(claim.root)

    def check(self) -> None:
        """Give up what is to be adopted if the core has thought better of it: nobody has it any more, and
        our own history goes on."""
        if self.adopting is not None and self.adopting != self._core.sealing.adopting:
            self._reader = None
            self.seek(None, self.prefetching)

    def take_given_up(self) -> set[bytes]:
        """Roots of the snapshots that were given up: the caller removes what came of them."""
        roots, self._given_up = self._given_up, set()
        return roots

    def put_back(self, roots: set[bytes]) -> None:
        """What came of these could not be removed; some may be wanted again by now."""
        self._given_up |= roots - self.sought

    @property
    def may_clear_up(self) -> bool:
        """Whether there are snapshots that were given up, and what came of them is of no use any more.

        The one that is wanted now may share chunks with them: its index tells. Where none is, and we have no
        model yet, one of them may be wanted again: that goes on where it was.
        """
        return bool(self._given_up) and self._knows_what_is_of_use

    @property
    def may_clear_leftovers(self) -> bool:
        """That, of what an earlier run has left: it may have ended while it fetched what we go on with.

        Who comes back with a model finds out within a moment whether it has to begin anew.
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
        """Chunks here and chunks in all of the snapshot that is being fetched."""
        claim = self.adopting or self.prefetching
        if claim is None:
            return None
        total = self._total
        return total - len(self._core.fetcher.wants.missing(claim.key)), total

    @property
    def _total(self) -> int:
        return len(chunk_sizes(self._core.layout.snapshot_bytes))

    async def go_on(self, claim: Claim) -> bool:
        """Ask for what is missing of a snapshot, read what is here; returns whether that is all of it, and it
        is wanted still.

        One that cannot be used is given up.
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
        if lacking and self._is_wanted(claim):  # else the core has thought better of it
            self._dispatch(ev.Need(claim.key, lacking))
            self._tell_progress(claim, len(lacking))
        if self._reader is None or self._reader.root != claim.root:
            self._reader = None  # before there is memory for another
            self._reader = snapshots.SnapshotReader(claim.root, size, self._chunks)
        is_read = await asyncio.to_thread(self._reader.read_on)
        return is_read and not lacking and self._is_wanted(claim)

    def take(self) -> Ints:
        """Phi, int32[numel], of the snapshot of which all has been read. It is the caller's from now on."""
        assert self._reader is not None
        phi, self._reader = self._reader.phi, None
        return phi

    def _is_wanted(self, claim: Claim) -> bool:
        return claim == self.prefetching or claim == self.adopting == self._core.sealing.adopting

    def _refuse(self, claim: Claim, error: PayloadError) -> None:
        """A snapshot cannot be used: the core chooses another one, or our own history goes on."""
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
