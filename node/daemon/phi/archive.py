"""The node's past: carries out what the core decides about it (Seal, Close, Adopt, Prefetch).

One worker does all of it, one thing after another, and only while the disk takes what it writes. It writes
snapshots while merging goes on, from copies of Phi's fragments, one at a time, with the later rounds taken
back. When a record arrives late for a sealed round, it writes the snapshot again after a moment. It fetches
the snapshot that the core wants to start from: its chunks come through the core, as payloads do, and are
stored among all others; the sums of the averaged model come last, when we train already. And it sweeps:
chunks that nothing needs any more, whatever they were for, are removed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.node.daemon.phi.restore import is_held, restore_state
from gossamer.node.daemon.phi.state import PhiState, Snapshot
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import Base, RecordStore, Rounds
from gossamer.node.logs import RateLimit
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import folds
from gossamer.protocol.identity import short
from gossamer.protocol.payloads import chunk_sizes, payload_chunk_sizes
from gossamer.protocol.records import Claim, Delta
from gossamer.protocol.replica import Replica

POLL_S = 0.5
PROGRESS_S = 2.0

LATE_S = 3.0
"""A snapshot is written again this long after the first late record: they come in bunches. Until then our
claim differs from the others', and would soon pass for another history."""

RETRY_S = 5.0

log = logging.getLogger("gossamer.archive")


class Archive:
    """The worker, and what it has to do."""

    def __init__(
        self,
        core: Replica,
        merging: MergeLoop,
        chunks: ChunkStore,
        records: RecordStore,
        disk: Disk,
        shelf: snapshots.SnapshotShelf,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._core = core
        self._loop = merging
        self._chunks = chunks
        self._records = records
        self._disk = disk
        self._shelf = shelf
        self._dispatch = dispatch
        self._news = asyncio.Event()
        self._wanted: Claim | None = None
        """The snapshot to fetch."""
        self._reader: snapshots.SnapshotReader | None = None
        """Reads it; as large as the model."""
        self._seal_round = 0
        self._sealing = 0
        """The round whose snapshot is being written; 0 if none is."""
        self._closing: fx.Close | None = None
        self._late_since: float | None = None
        """When the first late record was merged that the newest snapshot lacks."""
        self._is_sweep_due = True
        """Whether there may be chunks that nobody needs, such as what an earlier run has left."""
        self._reach = self._reach_noted = 0
        self._limit = RateLimit()
        self._logged = (0.0, 0)
        """When progress was last logged, and how many chunks were missing then."""

    # -- what the daemon tells us

    async def restore(self, credentials: Iterable[bytes] = ()) -> list[fx.Effect]:
        """Read back what an earlier run left on disk; returns the core's effects. Raises StorageError.

        `credentials` are grants that we were given in other ways.
        """
        core, records = self._core, self._records
        stored = await asyncio.to_thread(records.load, core.layout)
        history = await asyncio.to_thread(records.load_history)
        state, claims = await asyncio.to_thread(
            restore_state, core.manifest, self._chunks, history, stored, core.identity.node_id
        )
        if state is not None:
            self._shelf.restore(claims)
            if await asyncio.to_thread(self._missing, claims[0]):
                self._wanted = claims[0]
            await self._loop.begin(state)
        elif history.claims and not core.info.bootstrap:
            raise StorageError("our copy of the model is damaged; fetch it again with --join HOST:PORT")
        return core.restore(
            stored,
            [delta.record_id for delta in stored if is_held(delta, self._chunks)],
            time.monotonic(),
            claims=self._shelf.claims,
            floor=history.base.round,
            own_last=history.own_last,
            reach=history.reach,
            is_whole=self._wanted is None,
            credentials=[*await asyncio.to_thread(records.load_credentials), *credentials],
        )

    def carry_out(self, effect: fx.Fetched | fx.Seal | fx.Close | fx.Adopt | fx.Prefetch) -> None:
        """Have the worker do what the core asks for; a snapshot is fetched in place of any other."""
        match effect:
            case fx.Seal():
                self._seal_round = effect.round
            case fx.Close():
                earlier = self._closing.deltas if self._closing else ()
                self._closing = fx.Close(effect.round, earlier + effect.deltas)
            case fx.Adopt() | fx.Prefetch():
                self._want(effect.claim)
        self._news.set()

    def damaged(self, blob: bytes) -> None:
        """A chunk on disk turned out damaged: if it is part of a delta, fetch it again; if it is part of the
        newest snapshot, write that again. Of an older one, joiners get it from others."""
        for delta in self._open_records():
            if blob in delta.body.chunks:
                if self._limit.allows("damaged"):  # a failing disk damages hundreds of chunks in a minute
                    log.warning("chunk %s was damaged on disk; fetching it again", short(blob))
                sizes = payload_chunk_sizes(delta.body.payload_bytes)
                self._dispatch(ev.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))
        if self._shelf.is_of_newest(blob):
            log.warning("our newest snapshot was damaged on disk: writing it again")
            newest = self._shelf.claims[0]
            with suppress(PayloadError, StorageError):
                # Its Phi can be written again, but its sums are made of what is closed by now.
                self._dispatch(ev.Need(newest.key, self._missing(newest)))
            self._late_since = 0.0
            self._news.set()

    def note_merged(self, round_: int) -> None:
        """A round has been merged. If it came late, the newest snapshot must be written again to hold it."""
        reach = self._core.merges.reach
        if reach > max(self._reach, self._core.ledger.horizon):
            # Others are gone, or were away: the records alone do not tell this to a later start, or a reader.
            self._reach = reach
            self._news.set()
        if round_ <= max([self._sealing, *(claim.round for claim in self._shelf.claims[:1])]):
            if self._late_since is None:
                self._late_since = time.monotonic()
            self._news.set()

    def progress(self) -> tuple[int, int] | None:
        """Chunks here, and chunks in all, of the Phi that is being fetched; None if none is."""
        if self._wanted is None or self._has_begun(self._wanted):
            return None
        total = len(chunk_sizes(self._core.layout.snapshot_bytes))
        return total - len(self._core.fetcher.wants.missing(self._wanted.key)), total

    # -- the worker

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._disk.writable()
            try:
                is_idle = not await self._one_thing()
            except (OSError, StorageError) as error:
                self._disk.failed(error)
                continue
            if is_idle:
                is_busy = self._wanted is not None or self._is_sweep_due or self._late_since is not None
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S if is_busy else None):
                        await self._news.wait()
                self._news.clear()

    async def _one_thing(self) -> bool:
        """Do the first thing that is due, besides sweeping; False if none is."""
        if (reach := self._reach) > self._reach_noted:
            await asyncio.to_thread(self._records.note_reach, reach)
            self._reach_noted = reach  # it may be more by now
        if self._is_sweep_due and self._may_sweep():
            await self._sweep()
        if (claim := self._wanted) is not None:
            if self._is_wanted(claim):
                return await self._fetch(claim)
            self._want(self._core.sealing.sought)
        if self._closing is not None:
            await self._close(self._closing)
        elif self._shelf.claims and self._seal_round > self._shelf.claims[0].round:
            await self._seal(self._seal_round)
        elif self._late_since is not None and time.monotonic() - self._late_since > LATE_S:
            await self._reseal()
        else:
            return False
        return True

    # -- fetching and adopting

    def _want(self, claim: Claim | None) -> None:
        self._wanted = claim
        if self._reader is not None and claim != self._reader.claim:
            self._reader = None  # frees its memory before another is allocated
        self._is_sweep_due = True  # of another one that was wanted so far

    def _is_wanted(self, claim: Claim) -> bool:
        """Whether we, and the core, still want a snapshot: if nobody has it any more, our own history goes
        on."""
        return claim == self._wanted == self._core.sealing.sought

    async def _fetch(self, claim: Claim) -> bool:
        """Read what is here of a snapshot, and ask for the rest. If all is read, start from it once the core
        adopts it.

        Returns whether it was adopted. One that cannot be used is given up: the core chooses another, or our
        own history goes on.
        """
        core, layout, reader = self._core, self._core.layout, self._reader
        has_begun = self._has_begun(claim)
        if reader is None and not has_begun:
            length = folds.folds_bytes(core.manifest)
            reader = self._reader = snapshots.SnapshotReader(claim, layout.numel, self._chunks, length)
        try:
            lacking = await asyncio.to_thread(reader.read if reader else partial(self._missing, claim))
            if claim.root in self._chunks:
                folds.unpack(self._index(claim).folds, core.manifest)
        except MissingChunkError:  # one that turned out damaged: asked for next
            return False
        except PayloadError as error:
            if self._limit.allows(claim.root):
                log.error("the snapshot of round %d cannot be used: %s", claim.round, error)
            self._dispatch(ev.Unusable(claim))
            if self._wanted == claim:
                self._want(self._core.sealing.sought if has_begun else None)
            return False
        if not self._is_wanted(claim):
            return False
        if lacking:
            self._dispatch(ev.Need(claim.key, lacking))
            at, before = self._logged
            is_known = reader is not None and claim.root in self._chunks
            if is_known and time.monotonic() - at > PROGRESS_S and len(lacking) != before:
                self._logged = (time.monotonic(), len(lacking))
                total = len(chunk_sizes(layout.snapshot_bytes))
                here = total - len(lacking)
                log.info("fetching the model of round %d: %d of %d MiB", claim.round, here, total)
        if has_begun and not lacking:
            self._want(None)
            self._dispatch(ev.Sealed(self._shelf.claims))
            return True
        if reader is None or not reader.is_complete or claim != core.sealing.adopting:
            return False
        await self._adopt(claim, reader.phi)
        return True

    def _has_begun(self, claim: Claim) -> bool:
        """Whether our history has begun at this snapshot, so that only its sums may be missing."""
        return self._shelf.claims[:1] == (claim,)

    def _missing(self, claim: Claim) -> tuple[tuple[bytes, int], ...]:
        length = folds.folds_bytes(self._core.manifest)
        return snapshots.missing(claim, self._core.layout.snapshot_bytes, self._chunks, length)

    def _index(self, claim: Claim) -> snapshots.Index:
        return snapshots.read_index(claim.root, self._core.layout.snapshot_bytes, self._chunks)

    async def _adopt(self, claim: Claim, phi: Ints) -> None:
        """Start from a snapshot whose chunks are all here. Raises StorageError."""
        core, decided = self._core, self._index(claim).folds
        base = Base(claim.round, claim.digest, claim.tokens, decided)
        await asyncio.to_thread(self._records.begin_at, claim, core.own_last, decided)
        await asyncio.to_thread(self._shelf.keep, (claim,))
        own_id, sealed = core.identity.node_id, Snapshot(claim.round, {}, self._shelf.sums)
        state = await asyncio.to_thread(
            PhiState, core.manifest, phi, self._chunks, own_id, base=base, sealed=sealed
        )
        await self._loop.begin(state, partial(self._adopted, claim))

    def _adopted(self, claim: Claim) -> None:
        """Our history begins at a snapshot."""
        self._reach = self._reach_noted = 0  # of the history before; `begin_at` deleted it
        self._reader = None  # Phi is the state's now; the sums are still wanted
        self._seal_round = claim.round
        self._late_since = None
        if claim.round:
            tokens = self._core.layout.trained_tokens(claim.tokens)
            log.info("starting from the swarm's model of round %d (%d tokens)", claim.round, tokens)
        self._dispatch(ev.Adopted(claim))

    # -- sealing

    async def _seal(self, round_: int) -> bool:
        """Write the snapshot of everything merged up to a round, and claim it; returns whether that is done.

        It is not if a payload turned out damaged, or the swarm turns out not to have reached that round: then
        other work comes first. Raises StorageError or OSError, and leaves nothing behind then.
        """
        if not await self._loop.settled(round_):
            await asyncio.sleep(RETRY_S)
            return False
        self._sealing = round_
        try:
            claim, rounds = await self._write(round_)
            if claim == self._shelf.claims[0]:
                return True
            kept = self._shelf.kept_beside(claim)
            covered = [delta for deltas in rounds.values() for delta in deltas]
            await asyncio.to_thread(self._records.add_snapshot, claim, covered, [k.root for k in kept])
        except MissingChunkError as error:
            self.damaged(error.blob)
            await asyncio.sleep(RETRY_S)
            return False
        except (OSError, StorageError):
            await self._sweep()  # a disk that is too full for a snapshot needs the space
            raise
        finally:
            self._sealing = 0
        await asyncio.to_thread(self._shelf.keep, (claim, *kept))
        self._loop.note_sealed(Snapshot(round_, rounds, self._shelf.sums))
        self._is_sweep_due = True
        self._dispatch(ev.Sealed(self._shelf.claims))
        return True

    async def _write(self, round_: int) -> tuple[Claim, Rounds]:
        """Write a snapshot fragment by fragment; returns the claim, and the records in it above the base.

        Raises MissingChunkError, StorageError or OSError.
        """
        writer = snapshots.SnapshotWriter(self._shelf.sums, self._core.layout, self._chunks)
        rounds: dict[int, tuple[Delta, ...]] = {}
        for fragment in self._core.layout.fragments:
            phi, of_fragment, sums = await self._loop.prefix(fragment, round_)
            rounds |= of_fragment
            await asyncio.to_thread(writer.add, fragment, phi, sums)
            del phi, sums  # so that only those of one are in memory
        base = self._loop.base
        decided = await asyncio.to_thread(base.folds_with, round_, rounds, self._core.manifest)
        root = await asyncio.to_thread(writer.finish, round_, decided)
        tokens = await asyncio.to_thread(base.tokens_with, rounds, self._core.manifest)
        return Claim(round_, tokens, await asyncio.to_thread(base.chain_with, rounds), root), rounds

    async def _reseal(self) -> None:
        """Write the newest snapshot again, with the records that came late. If that fails, it stays due."""
        since, self._late_since = self._late_since, None
        is_done = False
        try:
            is_done = await self._seal(self._shelf.claims[0].round)
        finally:
            if not is_done:
                self._late_since = since

    # -- closing and sweeping

    async def _close(self, closing: fx.Close) -> None:
        """Drop the closed rounds, once the newest snapshot holds everything merged in them.

        An older snapshot would not match the base, and the records that the next start would need to make it
        match would be gone.
        """
        if not await self._loop.close_up_to(closing.round, lambda: self._late_since is None):
            await self._reseal()
            return
        base, ledger = self._loop.base, self._core.ledger
        gone = [delta.record_id for delta in closing.deltas if delta.record_id not in ledger]
        await asyncio.to_thread(self._records.close_up_to, base, self._core.own_last, gone)
        self._is_sweep_due = True
        if self._closing is closing:
            self._closing = None

    def _may_sweep(self) -> bool:
        """Whether it is known what is of use.

        The snapshot that is wanted may share chunks with one that was wanted before, which its index tells.
        If none is wanted and we have no model, the one before may be wanted again. A node that comes back
        with a model soon finds out whether it has to start from another one.
        """
        if self._wanted is not None:
            return self._wanted.root in self._chunks
        return not self._core.sealing.is_in_a_hurry

    async def _sweep(self) -> None:
        """Remove the chunks that nobody needs. Raises StorageError or OSError."""
        wanted = [] if self._wanted is None else [self._wanted.root]
        self._is_sweep_due = False
        try:
            blobs = await asyncio.to_thread(lambda: self._chunks.blobs)
            await asyncio.to_thread(self._shelf.sweep, blobs, wanted, self._open_records())
        except (OSError, StorageError) as error:
            self._is_sweep_due = True
            if not isinstance(error, MissingChunkError):
                raise
            self.damaged(error.blob)  # an index; to be tried again once that is mended

    def _open_records(self) -> list[Delta]:
        """Records whose payloads may still be needed for Phi."""
        return [*self._core.ledger, *self._core.holdings.revoked]
