"""The node's past, as the core decides about it: seal, close, adopt.

One worker does it all, one thing after another: snapshots are written from copies of Phi's fragments, one at
a time, with the later rounds taken back, while merging goes on; a record that arrives late for a sealed round
has the snapshot written anew after a moment; what is closed is dropped from disk.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from gossamer.node.phi import snapshots
from gossamer.node.phi.merger import Merger
from gossamer.node.phi.merging import Merging
from gossamer.node.phi.restore import is_held, restore_merger
from gossamer.node.storage.base import Base
from gossamer.node.storage.chunkstore import ChunkStore, MissingChunkError
from gossamer.node.storage.recordstore import RecordStore
from gossamer.protocol import effects as fx
from gossamer.protocol.chunks import chunk_sizes
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import Claim
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

LATE_SETTLE_S = 2.0
"""Late records come in bunches: a snapshot is written anew when none has come for this long."""

LATE_PATIENCE_S = 6.0
"""So long after the first of them it is, though they go on coming: our claim is not that of the others until
then, and would soon pass for another lineage."""

RETRY_S = 5.0
PROGRESS_S = 2.0

log = logging.getLogger("gossamer.archive")


class Archive:
    """Carries out Seal, Close, Adopt and Prefetch."""

    def __init__(
        self,
        core: Replica,
        merging: Merging,
        chunks: ChunkStore,
        records: RecordStore,
        shelf: snapshots.SnapshotShelf,
        dispatch: Callable[[fx.Event], object],
    ) -> None:
        self._core = core
        self._merging = merging
        self._chunks = chunks
        self._records = records
        self._shelf = shelf
        self._dispatch = dispatch
        self._adopting: Claim | None = None
        self._prefetching: Claim | None = None
        """What may have to be adopted soon."""
        self._reader: snapshots.SnapshotReader | None = None
        """Of the one of those that is being fetched."""
        self._given_up: set[bytes] = set()
        """Roots of those that were fetched and are not any more, until what came of them is removed."""
        self._seal_round = 0
        self._sealing = 0
        """The round whose snapshot is being written."""
        self._closing: fx.Close | None = None
        self._late_since: float | None = None
        """When the first late record was merged that the newest snapshot lacks."""
        self._late_at = 0.0
        """When the last was."""
        self._lost: set[bytes] = set()
        """Chunks of kept snapshots that turned out damaged on disk."""
        self._news = asyncio.Event()
        self._told_at = 0.0
        self._reach = self._reach_noted = 0
        merging.on_merged = self._note_merged

    # -- the start

    async def restore(self, credentials: Iterable[bytes] = ()) -> list[fx.Effect]:
        """Read back what an earlier run left on disk; returns the core's effects. Raises StorageError.

        `credentials` are grants that we were given otherwise.
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
            needed = self._shelf.blobs().union(*(delta.body.chunks for delta in stored))
            try:
                await asyncio.to_thread(self._chunks.sweep, needed)
            except OSError as error:  # a read-only disk, say: it takes space, and no more
                log.warning("cannot remove chunks that nobody needs any more: %s", error.strerror)
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
            is_copy=self._records.is_copy,
            credentials=[*kept, *credentials],
        )

    # -- what the core asks

    def adopt(self, claim: Claim) -> None:
        """Fetch a snapshot and start from it; a newer request replaces an older one."""
        self._seek(claim, None)

    def prefetch(self, claim: Claim) -> None:
        """Fetch a snapshot that is not to be adopted yet."""
        self._seek(self._adopting, claim)

    def seal(self, round_: int) -> None:
        """Snapshot everything up to a round."""
        self._seal_round = round_
        self._news.set()

    def close(self, effect: fx.Close) -> None:
        """Drop what is closed."""
        earlier = self._closing.deltas if self._closing else ()
        self._closing = fx.Close(effect.round, earlier + effect.deltas)
        self._news.set()

    def snapshot_lost(self, blob: bytes) -> None:
        """A chunk of a kept snapshot turned out damaged on disk."""
        self._lost.add(blob)
        self._news.set()

    def chunk_here(self) -> None:
        """Chunks that were asked for have arrived."""
        self._news.set()

    def progress(self) -> tuple[int, int] | None:
        """Chunks here and chunks in all of the snapshot that is being fetched."""
        claim = self._adopting or self._prefetching
        if claim is None:
            return None
        total = len(chunk_sizes(self._core.layout.snapshot_bytes))
        return total - len(self._core.fetcher.wants.missing(claim.key)), total

    # -- the worker

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self._one_thing()
            except (OSError, StorageError) as error:
                log.error("%s; trying again in %.0f s", error, RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def _one_thing(self) -> None:
        if self._reach > self._reach_noted:
            await asyncio.to_thread(self._records.note_reach, self._reach)
            self._reach_noted = self._reach
        if self._adopting is not None and self._adopting != self._core.sealing.adopting:
            self._reader = None
            self._seek(None, self._prefetching)  # nobody has it any more: our own history goes on
        if self._given_up and self._may_clear_up:
            await self._drop_others()
        if self._adopting is not None:
            if await self._try_to_adopt(self._adopting):
                return
        elif self._prefetching is not None:
            await self._go_on_fetching(self._prefetching)
        elif self._closing is not None:
            await self._close(self._closing)
            return
        elif self._shelf.claims and self._seal_round > self._shelf.claims[0].round:
            await self._seal(self._seal_round)
            return
        elif self._is_due_anew(time.monotonic()):
            await self._seal_anew()
            return
        elif self._lost:
            await self._mend(next(iter(self._lost)))
            return
        await self._wait()

    @property
    def _sought(self) -> set[bytes]:
        """Roots of the snapshots that are wanted."""
        return {claim.root for claim in (self._adopting, self._prefetching) if claim is not None}

    def _seek(self, adopting: Claim | None, prefetching: Claim | None) -> None:
        """From now on these are wanted; any other is given up."""
        before = self._sought
        self._adopting, self._prefetching = adopting, prefetching
        self._given_up = (self._given_up | before) - self._sought
        self._news.set()  # what had to wait for them may be done now

    @property
    def _may_clear_up(self) -> bool:
        """Whether what came of the snapshots that were given up is of no use any more.

        The one that is wanted now may share chunks with them: its index tells. Where none is, and we have no
        model yet, one of them may be wanted again: that goes on where it was.
        """
        if self._sought:
            return all(root in self._chunks for root in self._sought)
        return self._core.sealing.joined

    def _is_due_anew(self, now: float) -> bool:
        """Whether the newest snapshot is to be written anew."""
        if self._late_since is None:
            return False
        return now - self._late_at > LATE_SETTLE_S or now - self._late_since > LATE_PATIENCE_S

    async def _wait(self) -> None:
        busy = bool(self._sought) or self._late_since is not None
        try:
            async with asyncio.timeout(0.5 if busy else None):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def _note_merged(self, round_: int) -> None:
        if self._merging.reach > max(self._reach, self._core.ledger.horizon):
            # Others are gone, or were away: the records do not tell the next start, nor who reads the folder.
            self._reach = self._merging.reach
            self._news.set()
        sealed = max(self._sealing, self._shelf.claims[0].round if self._shelf.claims else 0)
        if round_ <= sealed:
            self._late_at = time.monotonic()
            if self._late_since is None:
                self._late_since = self._late_at
            self._news.set()

    async def _go_on_with(self, claim: Claim) -> Ints | None:
        """Ask for what is missing of a snapshot, read what is here; returns Phi once that is all of it.

        Raises MissingChunkError or PayloadError.
        """
        total = self._core.layout.snapshot_bytes
        lacking = await asyncio.to_thread(snapshots.missing, claim.root, total, self._chunks)
        if lacking and self._is_wanted(claim):  # else the core has thought better of it
            self._dispatch(fx.Need(claim.key, lacking))
            self._tell_progress(claim, len(lacking))
        if self._reader is None or self._reader.root != claim.root:
            self._reader = None  # before there is memory for another
            self._reader = snapshots.SnapshotReader(claim.root, total, self._chunks)
        reader = self._reader
        is_read = await asyncio.to_thread(reader.read_on)
        return reader.phi if is_read and not lacking else None

    def _is_wanted(self, claim: Claim) -> bool:
        return claim == self._prefetching or claim == self._adopting == self._core.sealing.adopting

    async def _go_on_fetching(self, claim: Claim) -> None:
        try:
            await self._go_on_with(claim)
        except MissingChunkError:
            pass
        except PayloadError as error:
            self._give_up(claim, error)

    async def _try_to_adopt(self, claim: Claim) -> bool:
        """Start from a snapshot once all of it is here; returns whether it was."""
        try:
            phi = await self._go_on_with(claim)
        except MissingChunkError:
            return False
        except PayloadError as error:
            self._give_up(claim, error)
            return False
        if phi is None:
            return False
        self._reader = None
        base = Base(claim.round, claim.digest, claim.tokens)
        await asyncio.to_thread(self._records.begin_at, claim, self._core.own_last)
        self._shelf.replace(claim)
        merger = Merger(self._core.manifest, phi, self._chunks, self._core.identity.node_id, base=base)
        await self._merging.begin(merger, claim.round)
        await self._drop_others()
        self._seek(None, None)
        self._given_up.discard(claim.root)
        self._seal_round = claim.round
        self._late_since = None
        if claim.round:
            tokens = self._core.layout.trained_tokens(claim.tokens)
            log.info("starting from the swarm's model of round %d (%d tokens)", claim.round, tokens)
        self._dispatch(fx.Adopted(claim))
        self._merging.look()  # it may have found before that we have not joined
        return True

    def _give_up(self, claim: Claim, error: PayloadError) -> None:
        """A snapshot cannot be used: the core chooses another one, or our own history goes on."""
        log.error("the snapshot of round %d cannot be used: %s", claim.round, error)
        self._reader = None
        wanted = (self._adopting, self._prefetching)
        self._seek(*(None if other is None or other.root == claim.root else other for other in wanted))
        self._dispatch(fx.Unusable(claim))

    def _tell_progress(self, claim: Claim, lacking: int) -> None:
        now = time.monotonic()
        total = len(chunk_sizes(self._core.layout.snapshot_bytes))
        if now - self._told_at > PROGRESS_S and claim.root in self._chunks:
            self._told_at = now
            log.info("fetching the model of round %d: %d of %d MiB", claim.round, total - lacking, total)

    async def _seal_anew(self) -> None:
        """Write the newest snapshot with what came late for it. If that fails, it is still to be done."""
        since, self._late_since = self._late_since, None  # what is merged from now on is late again
        is_done = False
        try:
            is_done = await self._seal(self._shelf.claims[0].round)
        finally:
            if not is_done and self._late_since is None:
                self._late_since = since

    async def _mend(self, blob: bytes) -> None:
        """A chunk of a snapshot was damaged: the newest is written anew, an older one is given up. If that
        fails, it is still to be done. Raises StorageError or OSError."""
        claim = self._shelf.claim_with(blob)
        if claim is None or blob in self._chunks:
            pass
        elif claim == self._shelf.claims[0]:
            log.warning("the snapshot of round %d was damaged on disk: writing it anew", claim.round)
            if not await self._seal(claim.round):
                return
        else:
            log.warning("the snapshot of round %d was damaged on disk: it is given up", claim.round)
            await asyncio.to_thread(self._records.drop_snapshot, claim.root)
            self._shelf.give_up(claim)
            self._dispatch(fx.Sealed(self._shelf.claims))
            await self._drop_others()
        self._lost.discard(blob)

    async def _seal(self, round_: int) -> bool:
        """Write the snapshot of everything merged up to a round, and claim it; returns whether that is done.

        Not if a payload turned out damaged, or the swarm turns out not to have come so far: what else is to
        be done is not kept waiting. Raises StorageError or OSError.
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
            self._merging.chunk_lost(error.blob)
            await asyncio.sleep(RETRY_S)
            return False
        except (OSError, StorageError):
            await asyncio.to_thread(writer.give_up)
            raise
        finally:
            self._sealing = 0
        self._dispatch(fx.Sealed(self._shelf.claims))
        await self._drop_others()
        return True

    async def _write(self, writer: snapshots.SnapshotWriter, round_: int) -> tuple[Claim, list[Delta]]:
        """Write a snapshot fragment by fragment; returns the claim, and the records above the base in it.

        Raises MissingChunkError, StorageError or OSError.
        """
        rounds: dict[int, tuple[Delta, ...]] = {}
        digests: dict[int, bytes] = {}
        for fragment in self._core.layout.fragments:
            prefix = await self._merging.prefix(fragment, round_)
            rounds |= prefix.rounds
            digests |= prefix.digests
            await asyncio.to_thread(writer.add, prefix.phi)
            del prefix  # before there is another
        root = await asyncio.to_thread(writer.finish)
        base = self._merging.base
        claim = Claim(round_, base.tokens_with(rounds), base.chain_with(digests), root)
        return claim, [delta for deltas in rounds.values() for delta in deltas]

    async def _close(self, closing: fx.Close) -> None:
        base = await self._merging.close_up_to(closing.round)
        if base is not None:
            await asyncio.to_thread(self._records.close_up_to, base, self._core.own_last)
        await asyncio.to_thread(self._drop_closed, closing.deltas, self._open_records())
        if self._closing is closing:
            self._closing = None

    def _drop_closed(self, closed: Iterable[Delta], open_records: Iterable[Delta]) -> None:
        self._shelf.drop_unneeded({blob for delta in closed for blob in delta.body.chunks}, open_records)

    async def _drop_others(self) -> None:
        """Remove what is left of snapshots that are not kept or wanted. Raises StorageError or OSError."""
        given_up, self._given_up = self._given_up, set()
        try:
            await asyncio.to_thread(self._shelf.drop_others, self._open_records(), given_up, self._sought)
        except MissingChunkError as error:  # an index: what it lists is known until that is mended
            self._given_up |= given_up - self._sought
            self.snapshot_lost(error.blob)
        except (OSError, StorageError):
            self._given_up |= given_up - self._sought
            raise

    def _open_records(self) -> list[Delta]:
        """Those whose payloads Phi may need yet."""
        return [*self._core.ledger, *self._core.holdings.revoked]
