"""The node's past: carries out what the core decides about it (seal, close, adopt).

One worker does all of it, one thing after another. It writes snapshots while merging goes on, from copies of
Phi's fragments, one at a time, with the later rounds taken back. When a record arrives late for a sealed
round, it writes the snapshot again after a moment. It drops closed rounds from disk.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
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

# --- Fetches a snapshot from others: what is asked for, how far it is, and what becomes of those given up.
#
# Its chunks come through the core, as payloads do, and are stored among all others. They are read as they
# come.

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


LATE_SETTLE_S = 2.0
"""Late records come in bunches: a snapshot is written again when none has come for this long."""

LATE_PATIENCE_S = 6.0
"""A snapshot is written again this long after the first late record at the latest, even if more keep coming:
until then our claim differs from the others', and would soon pass for another lineage."""

RETRY_S = 5.0


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
        self._seal_round = 0
        self._sealing = 0
        """The round whose snapshot is being written; 0 if none is."""
        self._closing: fx.Close | None = None
        self._late_since: float | None = None
        """When the first late record was merged that the newest snapshot lacks."""
        self._late_at = 0.0
        """When the last such record was merged."""
        self._lost: set[bytes] = set()
        """Chunks of kept snapshots that turned out damaged on disk."""
        self._limit = RateLimit()
        self._news = asyncio.Event()
        self._fetch = SnapshotFetch(core, chunks, dispatch, self._news.set)
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
        self._fetch.has_leftovers = True
        if merger is not None:
            self._shelf.restore(claims)
            await self._merging.begin(merger, history.reach)
        elif history.claims and not self._core.info.bootstrap:
            raise StorageError("our copy of the model is damaged; fetch it again with --join HOST:PORT")
        return self._core.restore(
            stored,
            [delta.record_id for delta in stored if is_held(delta, self._chunks)],
            time.monotonic(),
            claims=self._shelf.claims,
            floor=history.base.round,
            own_last=history.own_last,
            credentials=[*kept, *credentials],
        )

    # -- what the core asks

    def adopt(self, claim: Claim) -> None:
        """Fetch a snapshot and start from it; a newer request replaces an older one."""
        self._fetch.seek(claim, None)

    def prefetch(self, claim: Claim) -> None:
        """Begin to fetch a snapshot that is not to be adopted yet."""
        self._fetch.seek(self._fetch.adopting, claim)

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
        """A chunk on disk turned out damaged: if it is part of a delta, fetch it again; if it is part of a
        snapshot that we keep, repair that."""
        for delta in self._open_records():
            if blob in delta.body.chunks:
                if self._limit.allows("damaged"):  # a failing disk damages hundreds of chunks in a minute
                    log.warning("chunk %s was damaged on disk; fetching it again", short(blob))
                sizes = payload_chunk_sizes(delta.body.payload_bytes)
                self._dispatch(ev.Need(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True))))
        if self._shelf.claim_with(blob) is not None:
            self._lost.add(blob)
            self._news.set()

    def chunk_here(self) -> None:
        """Chunks that were asked for have arrived."""
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
        self._fetch.check()
        if self._fetch.may_clear_leftovers:
            await self._drop_leftovers()
        if self._fetch.may_clear_up:
            await self._drop_others()
        if not await self._did_something():
            await self._wait()

    async def _did_something(self) -> bool:
        """Do the first thing that is due; False if none is."""
        if (claim := self._fetch.adopting) is not None:
            if not await self._fetch.go_on(claim):
                return False
            await self._adopt(claim, self._fetch.take())
        elif (claim := self._fetch.prefetching) is not None:
            await self._fetch.go_on(claim)
            return False
        elif self._closing is not None:
            await self._close(self._closing)
        elif self._shelf.claims and self._seal_round > self._shelf.claims[0].round:
            await self._seal(self._seal_round)
        elif self._is_reseal_due(time.monotonic()):
            await self._reseal()
        elif self._lost:
            await self._mend(next(iter(self._lost)))
        else:
            return False
        return True

    def _is_reseal_due(self, now: float) -> bool:
        """Whether it is time to write the newest snapshot again."""
        if self._late_since is None:
            return False
        return now - self._late_at > LATE_SETTLE_S or now - self._late_since > LATE_PATIENCE_S

    async def _wait(self) -> None:
        busy = bool(self._fetch.sought) or self._fetch.has_leftovers or self._late_since is not None
        try:
            async with asyncio.timeout(0.5 if busy else None):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def note_merged(self, round_: int) -> None:
        """A round has been merged. If it came late, the newest snapshot must be written again to hold it."""
        if self._merging.reach > max(self._reach, self._core.ledger.horizon):
            # Others are gone, or were away: the records alone do not tell this to a later start, or a reader.
            self._reach = self._merging.reach
            self._news.set()
        sealed = max(self._sealing, self._shelf.claims[0].round if self._shelf.claims else 0)
        if round_ <= sealed:
            self._late_at = time.monotonic()
            if self._late_since is None:
                self._late_since = self._late_at
            self._news.set()

    async def _adopt(self, claim: Claim, phi: Ints) -> None:
        """Start from a snapshot whose chunks are all here. Raises StorageError."""
        base = Base(claim.round, claim.digest, claim.tokens)
        await asyncio.to_thread(self._records.begin_at, claim, self._core.own_last)
        self._shelf.replace(claim)
        own_id = self._core.identity.node_id
        merger = await asyncio.to_thread(Merger, self._core.manifest, phi, self._chunks, own_id, base=base)
        # The core is told at once: by the history before, later rounds could be merged than the swarm is at.
        await self._merging.begin(merger, claim.round, partial(self._adopted, claim))
        self._merging.look()  # its last look may have found that we had not joined
        await self._drop_others()

    def _adopted(self, claim: Claim) -> None:
        """Our history begins at a snapshot."""
        self._reach = self._reach_noted = 0  # of the history before; `begin_at` deleted it
        self._fetch.adopted(claim)
        self._seal_round = claim.round
        self._late_since = None
        if claim.round:
            tokens = self._core.layout.trained_tokens(claim.tokens)
            log.info("starting from the swarm's model of round %d (%d tokens)", claim.round, tokens)
        self._dispatch(ev.Adopted(claim))

    async def _reseal(self) -> None:
        """Write the newest snapshot again, with the records that came late. If that fails, it stays due."""
        since, self._late_since = self._late_since, None  # records merged from now on are late again
        is_done = False
        try:
            is_done = await self._seal(self._shelf.claims[0].round)
        finally:
            if not is_done and self._late_since is None:
                self._late_since = since

    async def _mend(self, blob: bytes) -> None:
        """A chunk of a snapshot was damaged: write the newest snapshot again, or give an older one up.

        If that fails, it stays due. Raises StorageError or OSError.
        """
        claim = self._shelf.claim_with(blob)
        if claim is None or blob in self._chunks:
            pass
        elif claim == self._shelf.claims[0]:
            log.warning("the snapshot of round %d was damaged on disk: writing it again", claim.round)
            if not await self._seal(claim.round):
                return
        else:
            log.warning("the snapshot of round %d was damaged on disk: discarding it", claim.round)
            await asyncio.to_thread(self._records.drop_snapshot, claim.root)
            self._shelf.give_up(claim)
            self._dispatch(ev.Sealed(self._shelf.claims))
            await self._drop_others()
        self._lost.discard(blob)

    async def _seal(self, round_: int) -> bool:
        """Write the snapshot of everything merged up to a round, and claim it; returns whether that is done.

        It is not if a payload turned out damaged, or the swarm turns out not to have reached that round: then
        other work comes first. Raises StorageError or OSError.
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
            self._shelf.claims = (claim, *keep)
        except MissingChunkError as error:
            await asyncio.to_thread(writer.give_up)
            self.damaged(error.blob)
            await asyncio.sleep(RETRY_S)
            return False
        except (OSError, StorageError):
            await asyncio.to_thread(writer.give_up)
            raise
        finally:
            self._sealing = 0
        self._dispatch(ev.Sealed(self._shelf.claims))
        await self._drop_others()
        return True

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
        await asyncio.to_thread(self._drop_closed, closing.deltas, self._open_records())
        if self._closing is closing:
            self._closing = None

    def _drop_closed(self, closed: Iterable[Delta], open_records: Iterable[Delta]) -> None:
        self._shelf.drop_unneeded({blob for delta in closed for blob in delta.body.chunks}, open_records)

    async def _drop_leftovers(self) -> None:
        """Remove chunks that an earlier run has left and that nobody needs. Raises StorageError."""
        blobs, sought = self._chunks.blobs, self._fetch.sought
        try:
            await asyncio.to_thread(self._shelf.drop_others, self._open_records(), (), sought, blobs)
        except MissingChunkError as error:  # as below
            self.damaged(error.blob)
            return
        except OSError as error:  # a read-only disk, say: the chunks only take up space
            log.warning("cannot remove chunks that are no longer needed: %s", error.strerror or error)
        self._fetch.has_leftovers = False

    async def _drop_others(self) -> None:
        """Remove the chunks of snapshots that are not kept or wanted. Raises StorageError or OSError."""
        given_up, sought = self._fetch.take_given_up(), self._fetch.sought
        try:
            await asyncio.to_thread(self._shelf.drop_others, self._open_records(), given_up, sought)
        except MissingChunkError as error:  # an index: the shelf knows what it listed until that is mended
            self._fetch.put_back(given_up)
            self.damaged(error.blob)
        except (OSError, StorageError):
            self._fetch.put_back(given_up)
            raise

    def _open_records(self) -> list[Delta]:
        """Records whose payloads may still be needed for Phi."""
        return [*self._core.ledger, *self._core.holdings.revoked]
