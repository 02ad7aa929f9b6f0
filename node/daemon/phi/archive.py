"""The node's past: carries out what the core decides about it (seal, close, adopt).

One worker does all of it, one thing after another, and only while the disk takes what it writes. It writes
snapshots while merging goes on, from copies of Phi's fragments, one at a time, with the later rounds taken
back. When a record arrives late for a sealed round, it writes the snapshot again after a moment. It fetches
the snapshot that the core wants to start from: its chunks come through the core, as payloads do, and are
stored among all others. And it sweeps: chunks that nothing needs any more, whatever they were for, are
removed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.loop import Merging
from gossamer.node.daemon.phi.restore import is_held, restore_merger
from gossamer.node.daemon.phi.state import Merger
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import Base, Digests, RecordStore, Rounds
from gossamer.node.logs import RateLimit
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.claims import Claim
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.identity import short
from gossamer.protocol.payloads.chunks import chunk_sizes, payload_chunk_sizes
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

PROGRESS_S = 2.0

LATE_S = 3.0
"""A snapshot is written again this long after the first late record: they come in bunches. Until then our
claim differs from the others', and would soon pass for another history."""

RETRY_S = 5.0

log = logging.getLogger("gossamer.archive")


class SnapshotFetch:
    """The snapshot that is wanted, if any: what is asked for, and how far it is."""

    def __init__(self, core: Replica, chunks: ChunkStore, dispatch: Callable[[ev.Event], object]) -> None:
        self._core = core
        self._chunks = chunks
        self._dispatch = dispatch
        self.claim: Claim | None = None
        self._adopts = False
        """Whether the snapshot is to be adopted; else it may have to be soon."""
        self._reader: snapshots.SnapshotReader | None = None
        self._logged_at = 0.0
        self._logged: tuple[bytes, int] | None = None
        """The progress last logged: the snapshot's root, and how many of its chunks were missing."""

    def want(self, claim: Claim | None, *, adopts: bool = False) -> None:
        """Want this snapshot from now on, and no other."""
        self.claim, self._adopts = claim, adopts

    def is_wanted(self, claim: Claim, *, adopts: bool = False) -> bool:
        """Whether the core still wants this snapshot; with `adopts`, to adopt it now."""
        if self._adopts and self.claim != self._core.sealing.adopting:
            return False  # nobody has it any more, and our own history goes on
        return claim == self.claim and self._adopts >= adopts

    def progress(self) -> tuple[int, int] | None:
        """For the snapshot that is wanted: how many of its chunks are here, and how many it has."""
        if self.claim is None:
            return None
        total = self._total
        return total - len(self._core.fetcher.wants.missing(self.claim.key)), total

    @property
    def _total(self) -> int:
        return len(chunk_sizes(self._core.layout.snapshot_bytes))

    async def advance(self) -> bool:
        """Ask for what is missing of the snapshot, and read what is here; returns whether all of it is read.

        A snapshot that cannot be used is given up: the core chooses another, or our own history goes on.
        """
        claim = self.claim
        if claim is None or not self.is_wanted(claim):
            self.claim = self._reader = None
            return False
        if self._reader is None or self._reader.root != claim.root:
            self._reader = None  # frees its memory before another is allocated
            size = self._core.layout.snapshot_bytes
            self._reader = snapshots.SnapshotReader(claim.root, size, self._chunks)
        try:
            lacking = await asyncio.to_thread(self._reader.read)
        except MissingChunkError:  # its index: asked for next
            return False
        except PayloadError as error:
            log.error("the snapshot of round %d cannot be used: %s", claim.round, error)
            self._reader = None
            if self.claim == claim:
                self.claim = None
            self._dispatch(ev.Unusable(claim))
            return False
        if lacking and self.is_wanted(claim):
            self._dispatch(ev.Need(claim.key, lacking))
            self._log_progress(claim, len(lacking))
        return not lacking

    def take(self) -> Ints:
        """Phi, int32[numel], of the snapshot that has been read whole. The caller owns it from now on."""
        assert self._reader is not None
        phi, self._reader = self._reader.phi, None
        return phi

    def _log_progress(self, claim: Claim, lacking: int) -> None:
        now, total, state = time.monotonic(), self._total, (claim.root, lacking)
        if now - self._logged_at > PROGRESS_S and claim.root in self._chunks and state != self._logged:
            self._logged_at, self._logged = now, state
            log.info("fetching the model of round %d: %d of %d MiB", claim.round, total - lacking, total)


class Archive:
    """Carries out Seal, Close, Adopt and Prefetch."""

    def __init__(
        self,
        core: Replica,
        merging: Merging,
        chunks: ChunkStore,
        records: RecordStore,
        disk: Disk,
        shelf: snapshots.SnapshotShelf,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._core = core
        self._merging = merging
        self._chunks = chunks
        self._records = records
        self._disk = disk
        self._shelf = shelf
        self._dispatch = dispatch
        self._fetch = SnapshotFetch(core, chunks, dispatch)
        self._news = asyncio.Event()
        self._seal_round = 0
        self._sealing = 0
        """The round whose snapshot is being written; 0 if none is."""
        self._closing: fx.Close | None = None
        self._late_since: float | None = None
        """When the first late record was merged that the newest snapshot lacks."""
        self._late_at = 0.0
        """When the last such record was merged."""
        self._is_sweep_due = True
        """Whether there may be chunks that nobody needs, such as what an earlier run has left."""
        self._limit = RateLimit()
        self._reach = self._reach_noted = 0

    # -- the start

    async def restore(self, credentials: Iterable[bytes] = ()) -> list[fx.Effect]:
        """Read back what an earlier run left on disk; returns the core's effects. Raises StorageError.

        `credentials` are grants that we were given in other ways.
        """
        stored = await asyncio.to_thread(self._records.load, self._core.layout)
        history = await asyncio.to_thread(self._records.load_history)
        kept = await asyncio.to_thread(self._records.load_credentials)
        own_id = self._core.identity.node_id
        merger, claims = await asyncio.to_thread(
            restore_merger, self._core.manifest, self._chunks, history, stored, own_id
        )
        if merger is not None:
            self._shelf.restore(claims)
            await self._merging.begin(merger)
        elif history.claims and not self._core.info.bootstrap:
            raise StorageError("our copy of the model is damaged; fetch it again with --join HOST:PORT")
        return self._core.restore(
            stored,
            [delta.record_id for delta in stored if is_held(delta, self._chunks)],
            time.monotonic(),
            claims=self._shelf.claims,
            floor=history.base.round,
            own_last=history.own_last,
            reach=history.reach,
            credentials=[*kept, *credentials],
        )

    # -- what the daemon tells us

    def adopt(self, claim: Claim) -> None:
        """Fetch a snapshot and start from it; a newer request replaces an older one."""
        self._want(claim, adopts=True)

    def prefetch(self, claim: Claim) -> None:
        """Begin to fetch a snapshot that is not to be adopted yet."""
        self._want(claim)

    def _want(self, claim: Claim, *, adopts: bool = False) -> None:
        self._fetch.want(claim, adopts=adopts)
        self._is_sweep_due = True  # of another one that was wanted so far
        self._news.set()

    def seal(self, round_: int) -> None:
        """Snapshot everything up to a round."""
        self._seal_round = round_
        self._news.set()

    def close(self, effect: fx.Close) -> None:
        """Drop the rounds that are closed."""
        earlier = self._closing.deltas if self._closing else ()
        self._closing = fx.Close(effect.round, earlier + effect.deltas)
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
            self._late_since, self._late_at = 0.0, time.monotonic()
            self._news.set()

    def chunk_here(self) -> None:
        """Chunks that were asked for have arrived."""
        self._news.set()

    def note_merged(self, round_: int) -> None:
        """A round has been merged. If it came late, the newest snapshot must be written again to hold it."""
        if self._core.merges.reach > max(self._reach, self._core.ledger.horizon):
            # Others are gone, or were away: the records alone do not tell this to a later start, or a reader.
            self._reach = self._core.merges.reach
            self._news.set()
        sealed = max(self._sealing, self._shelf.claims[0].round if self._shelf.claims else 0)
        if round_ <= sealed:
            self._late_at = time.monotonic()
            if self._late_since is None:
                self._late_since = self._late_at
            self._news.set()

    def progress(self) -> tuple[int, int] | None:
        """Chunks here, and chunks in all, of the snapshot that is being fetched; None if none is."""
        return self._fetch.progress()

    # -- the worker

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._disk.writable()
            try:
                await self._one_thing()
            except (OSError, StorageError) as error:
                self._disk.failed(error)

    async def _one_thing(self) -> None:
        """Do what comes next or, if nothing is to be done, wait for news."""
        if (reach := self._reach) > self._reach_noted:
            await asyncio.to_thread(self._records.note_reach, reach)
            self._reach_noted = reach  # it may be more by now
        if self._is_sweep_due and self._may_sweep():
            await self._sweep()
        if not await self._did_something():
            await self._wait()

    async def _did_something(self) -> bool:
        """Do the first thing that is due; False if none is."""
        wanted = self._fetch.claim
        is_read = await self._fetch.advance()
        self._is_sweep_due |= self._fetch.claim != wanted  # that one was given up
        if (claim := self._fetch.claim) is not None:
            if not is_read or not self._fetch.is_wanted(claim, adopts=True):
                return False
            await self._adopt(claim, self._fetch.take())
        elif self._closing is not None:
            await self._close(self._closing)
        elif self._shelf.claims and self._seal_round > self._shelf.claims[0].round:
            await self._seal(self._seal_round)
        elif self._late_since is not None and time.monotonic() - self._late_since > LATE_S:
            await self._reseal()
        else:
            return False
        return True

    async def _wait(self) -> None:
        is_busy = self._fetch.claim is not None or self._is_sweep_due or self._late_since is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5 if is_busy else None):
                await self._news.wait()
        self._news.clear()

    # -- adopting

    async def _adopt(self, claim: Claim, phi: Ints) -> None:
        """Start from a snapshot whose chunks are all here. Raises StorageError."""
        base = Base(claim.round, claim.digest, claim.tokens)
        await asyncio.to_thread(self._records.begin_at, claim, self._core.own_last)
        await asyncio.to_thread(self._shelf.keep, (claim,))
        own_id = self._core.identity.node_id
        merger = await asyncio.to_thread(Merger, self._core.manifest, phi, self._chunks, own_id, base=base)
        await self._merging.begin(merger, partial(self._adopted, claim))

    def _adopted(self, claim: Claim) -> None:
        """Our history begins at a snapshot."""
        self._reach = self._reach_noted = 0  # of the history before; `begin_at` deleted it
        self._fetch.want(None)
        self._is_sweep_due = True
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
        if not await self._merging.settled(round_):
            await asyncio.sleep(RETRY_S)
            return False
        writer = snapshots.SnapshotWriter(self._chunks)
        self._sealing = round_
        try:
            claim, covered = await self._write(writer, round_)
            if claim == self._shelf.claims[0]:
                return True
            keep = self._shelf.kept_beside(claim)
            await asyncio.to_thread(self._records.add_snapshot, claim, covered, [k.root for k in keep])
        except (OSError, StorageError) as error:
            await asyncio.to_thread(writer.give_up)
            if not isinstance(error, MissingChunkError):
                raise
            self.damaged(error.blob)
            await asyncio.sleep(RETRY_S)
            return False
        finally:
            self._sealing = 0
        await self._keep((claim, *keep))
        return True

    async def _keep(self, claims: tuple[Claim, ...]) -> None:
        """These are the snapshots that we hold now."""
        await asyncio.to_thread(self._shelf.keep, claims)
        self._is_sweep_due = True
        self._dispatch(ev.Sealed(claims))

    async def _write(self, writer: snapshots.SnapshotWriter, round_: int) -> tuple[Claim, list[Delta]]:
        """Write a snapshot fragment by fragment; returns the claim, and the records in it above the base.

        Raises MissingChunkError, StorageError or OSError.
        """
        rounds: dict[int, tuple[Delta, ...]] = {}
        digests: dict[int, bytes] = {}
        for fragment in self._core.layout.fragments:
            prefix = await self._merging.prefix(fragment, round_)
            rounds |= prefix.rounds
            digests |= prefix.digests
            await asyncio.to_thread(writer.add, prefix.phi)
            del prefix  # so that only one is in memory
        root = await asyncio.to_thread(writer.finish)
        return await asyncio.to_thread(self._claim, round_, root, self._merging.base, rounds, digests)

    def _claim(
        self, round_: int, root: bytes, base: Base, rounds: Rounds, digests: Digests
    ) -> tuple[Claim, list[Delta]]:
        """The claim of a snapshot of these rounds, and their records."""
        claim = Claim(round_, base.tokens_with(rounds, self._core.manifest), base.chain_with(digests), root)
        return claim, [delta for deltas in rounds.values() for delta in deltas]

    async def _reseal(self) -> None:
        """Write the newest snapshot again, with the records that came late. If that fails, it stays due."""
        late_at = self._late_at
        if await self._seal(self._shelf.claims[0].round) and self._late_at == late_at:
            self._late_since = None

    # -- closing

    async def _close(self, closing: fx.Close) -> None:
        """Drop the closed rounds, once the newest snapshot holds everything merged in them.

        An older snapshot would not match the base, and the records that the next start would need to make it
        match would be gone.
        """
        base = await self._merging.close_up_to(closing.round, lambda: self._late_since is None)
        if self._late_since is not None:
            await self._reseal()
            return
        if base is not None:
            await asyncio.to_thread(self._records.close_up_to, base, self._core.own_last)
        beyond = [delta for delta in closing.deltas if delta.round > closing.round]
        if gone := [delta.record_id for delta in beyond if delta.record_id not in self._core.ledger]:
            await asyncio.to_thread(self._records.drop, gone)
        self._is_sweep_due = True
        if self._closing is closing:
            self._closing = None

    # -- sweeping

    def _may_sweep(self) -> bool:
        """Whether it is known what is of use.

        The snapshot that is wanted may share chunks with one that was wanted before, which its index tells.
        If none is wanted and we have no model, the one before may be wanted again, and its fetch would go on
        where it stopped. A node that comes back with a model soon finds out whether it has to start from
        another one.
        """
        if self._fetch.claim is not None:
            return self._fetch.claim.root in self._chunks
        return not self._core.sealing.is_in_a_hurry

    async def _sweep(self) -> None:
        """Remove the chunks that nobody needs. Raises StorageError or OSError."""
        wanted = [] if self._fetch.claim is None else [self._fetch.claim.root]
        self._is_sweep_due = False
        try:
            blobs = await asyncio.to_thread(lambda: self._chunks.blobs)
            await asyncio.to_thread(self._shelf.sweep, blobs, wanted, self._open_records())
        except MissingChunkError as error:  # an index; to be tried again once that is mended
            self._is_sweep_due = True
            self.damaged(error.blob)
        except (OSError, StorageError):
            self._is_sweep_due = True
            raise

    def _open_records(self) -> list[Delta]:
        """Records whose payloads may still be needed for Phi."""
        return [*self._core.ledger, *self._core.holdings.revoked]
