"""`gossamer.node.daemon.phi.archive`: snapshots are written while merging goes on, and fetched from others.

What is closed or given up goes, and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.restore import restore_state
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.records import GENESIS, Base, RecordStore
from gossamer.protocol.effects import Adopt, Close, Prefetch, Seal
from gossamer.protocol.errors import StorageError
from gossamer.protocol.events import Adopted, Event, Need, Sealed, Unusable
from gossamer.protocol.history.average import Sums
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads import HASH_BYTES, Fragment, TensorSpec, root_of
from gossamer.protocol.records import Claim, Delta
from tests.node.archives import (
    LARGE,
    Fetching,
    Sealing,
    core_with,
    delta,
    merge_all,
    merging_of,
)
from tests.node.full_disk import FullDisk, disk_of
from tests.node.merging import delta_of
from tests.node.trainer_side import until
from tests.node.world import OWN, World, arrive
from tests.protocol.builders import LAYOUT, SMALL, manifest


@pytest.fixture
def world(rng: np.random.Generator, tmp_path: Path) -> World:
    return World(rng, tmp_path / "chunks")


@pytest.mark.parametrize("contacts", [(), ("127.0.0.1:7700",)])
async def test_a_model_of_which_no_snapshot_is_whole_is_fetched_again(tmp_path: Path, contacts: Any) -> None:
    """From those who are to be joined: whoever names nobody would begin the swarm anew, alone."""
    records = RecordStore(tmp_path / "ledger.sqlite", SMALL.swarm_id)
    records.add_snapshot(Claim(8, 1, bytes(32), bytes(32)), (), ())
    restored: list[Any] = []
    core = core_with(
        Ledger(),
        info=SimpleNamespace(bootstrap=contacts),
        restore=lambda *_, claims, **__: restored.append(claims),
    )
    chunks = ChunkStore(tmp_path / "chunks")
    shelf = SnapshotShelf(chunks, LAYOUT.snapshot_bytes)
    merging: Any = SimpleNamespace()
    archive = Archive(core, merging, chunks, records, disk_of(tmp_path), shelf, lambda event: None)
    if contacts:
        await archive.restore()
        assert restored == [()]
    else:
        with pytest.raises(StorageError, match="damaged; fetch it again with --join"):
            await archive.restore()
    records.close()


async def test_chunks_that_an_open_round_shares_survive_the_closing_of_another(tmp_path: Path) -> None:
    node = Adopting(tmp_path, own_last=7)
    await node.begin()
    for data in (b"old", b"shared", b"new"):
        node.chunks.put(sha256(data).digest(), data)
    closed, still_open = delta(b"old", b"shared"), delta(b"shared", b"new")
    node.core.ledger = [still_open]
    node.archive.carry_out(Close(5, (closed,)))
    for _ in range(2):
        await node.archive._one_thing()
    history = node.records.load_history()
    assert (history.base.round, history.own_last) == (5, 7)
    assert [data for data in (b"old", b"shared", b"new") if sha256(data).digest() in node.chunks] == [
        b"shared",
        b"new",
    ]
    node.records.close()


async def test_a_snapshot_is_of_the_set_that_its_claim_names_whatever_is_merged_meanwhile(
    world: World,
) -> None:
    """A record of a sealed round arrives while the snapshot is written, after its fragment was."""
    sealing = Sealing.of_world(world)
    first, *rest = world.deltas
    assert first.round == 1
    merge_all(sealing.state, rest)

    def late(fragment: Fragment) -> None:
        if fragment.index == LAYOUT.of_round(first.round).index:
            sealing.state.merge(1, tuple(d for d in world.deltas if d.round == 1))
            sealing.archive.note_merged(1)

    sealing.between = late
    claim = await sealing.seal(4)
    prefix = [delta for delta in rest if delta.round <= 4]
    loaded = snapshots.load(claim, LAYOUT.numel, world.chunks)
    assert np.array_equal(loaded, world.fold(prefix))
    assert claim.tokens == sum(delta.body.tokens for delta in prefix)
    assert sealing.covered == [sorted(delta.record_id for delta in prefix)]
    without = world.state()
    merge_all(without, rest)
    assert claim.digest == without.chain(4)

    sealing.between = lambda fragment: None
    assert sealing.archive._late_since is not None, "it has to be written anew"
    sealing.archive._late_since = -1e9
    await sealing.archive._one_thing()
    anew = sealing.shelf.claims[0]
    assert anew.round == 4 and anew.digest == sealing.state.chain(4)
    loaded = snapshots.load(anew, LAYOUT.numel, world.chunks)
    assert np.array_equal(loaded, world.fold([*prefix, first]))


async def test_a_snapshot_that_has_to_wait_for_the_swarm_is_written_once_that_has_come_so_far(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be adopted meanwhile does not wait with it."""
    monkeypatch.setattr("gossamer.node.daemon.phi.archive.RETRY_S", 0.0)
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    sealing.is_reached = False
    sealing.archive.carry_out(Seal(4))
    await sealing.archive._one_thing()
    assert not sealing.told and sealing.shelf.claims[0].round == 0
    sealing.is_reached = True
    await sealing.archive._one_thing()
    assert sealing.shelf.claims[0].round == 4


@pytest.mark.parametrize("error", [MissingChunkError(bytes(32)), StorageError("too many open files")])
async def test_a_late_record_is_sealed_also_where_that_fails_at_first(
    world: World, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    """In a swarm that rests there is no next snapshot: the claim to this one would stay wrong for ever."""
    monkeypatch.setattr("gossamer.node.daemon.phi.archive.RETRY_S", 0.0)
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, [delta for delta in world.deltas if delta.round > 1])
    await sealing.seal(4)
    sealing.state.merge(1, tuple(delta for delta in world.deltas if delta.round == 1))
    sealing.archive.note_merged(1)
    errors = [error]

    def fail(fragment: Fragment) -> None:
        if errors:
            raise errors.pop()

    sealing.between = fail
    for _ in range(2):
        sealing.archive._late_since = sealing.archive._late_since and -1e9  # it is quiet
        with suppress(StorageError):
            await sealing.archive._one_thing()
    assert sealing.shelf.claims[0].digest == sealing.state.chain(4)
    assert sealing.archive._late_since is None, "and once is enough"


async def test_sealing_takes_memory_for_a_fragment_and_not_for_phi(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    fragments = 64  # a thread may let go of some a moment after its work is known to be done
    tensors = tuple(TensorSpec(f"w{n}", (1 << 17,), "mean") for n in range(fragments))
    large = manifest(tensors, fragments=fragments)
    phi = rng.integers(-(1 << 22), 1 << 22, large.plan().numel).astype(np.int32)
    chunks = ChunkStore(tmp_path / "chunks")
    sealing = Sealing(PhiState(large, phi, chunks, OWN), chunks, large)
    tracemalloc.start()
    try:
        claim = await sealing.seal(4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sealing.told and np.array_equal(snapshots.load(claim, len(phi), chunks), phi)
    assert peak < phi.nbytes / 2


@pytest.mark.parametrize("full", ["chunks", "records"])
async def test_a_snapshot_that_the_disk_has_no_room_for_leaves_nothing_and_is_made_later(
    world: World, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    genesis, before = sealing.shelf.claims, len(world.chunks.blobs)
    put = world.chunks.put
    room = iter([None] if full == "chunks" else [])

    def refuse(blob: bytes, data: bytes | memoryview, *, durable: bool = False) -> None:
        put(blob, data, durable=durable)
        if full == "chunks" and next(room, "full"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def refuse_records(claim: Claim, covered: list[bytes], keep: list[bytes]) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(world.chunks, "put", refuse)
        if full == "records":
            patch.setattr(sealing.archive._records, "add_snapshot", refuse_records)
        with pytest.raises((OSError, StorageError)):
            await sealing.seal(4)
    assert len(world.chunks.blobs) <= before + (full == "chunks")  # but for what the refusal itself left
    assert sealing.shelf.claims == genesis and not sealing.told

    claim = await sealing.seal(4)
    assert claim.round == 4 and sealing.told, "others hear of it"
    assert snapshots.missing(claim, 4 * LAYOUT.numel, world.chunks) == ()


async def test_while_the_disk_takes_nothing_no_snapshot_is_begun(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    with monkeypatch.context() as patch:
        disk = FullDisk(world.chunks, 10**6, patch)
        sealing.archive.carry_out(Seal(4))
        running = asyncio.create_task(sealing.archive.run())
        await until(lambda: not sealing.disk.is_writable)
        await asyncio.sleep(0.05)
        assert disk.left == 10**6 - 1
    sealing.disk._open.set()
    await until(lambda: sealing.shelf.claims[0].round == 4)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("what", ["index", "chunk"])
async def test_a_damaged_chunk_of_the_newest_snapshot_is_written_anew(world: World, what: str) -> None:
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    claim = await sealing.seal(4)
    blob = claim.root if what == "index" else world.chunks.get(claim.root)[:32]
    world.chunks.drop(blob)
    sealing.archive.damaged(blob)
    await sealing.look()
    assert sealing.shelf.claims[0] == claim
    assert snapshots.missing(claim, 4 * LAYOUT.numel, world.chunks) == ()
    told = len(sealing.told)
    await sealing.look()
    assert len(sealing.told) == told and sealing.archive._late_since is None, "once is enough"


async def test_a_payload_keeps_the_chunks_that_it_shares_with_a_snapshot_when_that_goes(
    world: World,
) -> None:
    """A liar can publish what a snapshot consists of; all would lose it at the same time."""
    sealing = Sealing.of_world(world)
    genesis = set(sealing.shelf._owner)
    shared = min(genesis - {sealing.shelf.claims[0].root})
    sealing.core.ledger = [SimpleNamespace(body=SimpleNamespace(chunks=(shared,)))]
    merge_all(sealing.state, world.deltas)
    for round_ in (2, 4, 6):
        await sealing.seal(round_)
    await sealing.look()
    assert {blob for blob in genesis if blob in world.chunks} == {shared}


async def test_our_snapshot_is_kept_until_it_is_noted_durably_that_another_took_its_place(
    tmp_path: Path,
) -> None:
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    own = fetching.shelf.claims[0]

    def refuse(claim: Claim, own_last: int, decided: bytes) -> None:
        raise StorageError("the disk is full")

    fetching.archive._records.begin_at = refuse  # type: ignore[method-assign]
    fetching.adopt(fetching.claim(b"A", b"B", b"C"))
    with pytest.raises(StorageError):
        await fetching.look()
    fetching.adopt(fetching.claim(b"D", b"e", b"f"))
    await fetching.look()
    assert fetching.here() == "d"
    assert snapshots.missing(own, LARGE.plan().snapshot_bytes, fetching.chunks) == ()


@pytest.mark.parametrize("arrives", ["before", "as it begins"])
async def test_what_came_late_is_sealed_before_it_is_closed(
    world: World, tmp_path: Path, arrives: str
) -> None:
    """The base says that it is merged, and the next start has nothing but the snapshot to have it from."""
    records = RecordStore(tmp_path / "ledger.sqlite", SMALL.swarm_id)
    ledger = Ledger()
    core = core_with(ledger, clock=100, horizon=100, caught_up=True, rests=False)
    merging = merging_of(core)
    state, shelf = world.state(), SnapshotShelf(world.chunks, LAYOUT.snapshot_bytes)
    genesis = Claim(0, 0, GENESIS.chain, snapshots.store(state.phi, world.chunks))
    records.add_snapshot(genesis, [], [])
    records.add(world.deltas)
    shelf.restore([genesis])
    archive = Archive(core, merging, world.chunks, records, disk_of(tmp_path), shelf, lambda event: None)
    await merging.begin(state)
    late, *rest = world.deltas
    assert late.round == 1
    arrive(state, ledger, rest)
    archive.carry_out(Seal(4))
    await archive._one_thing()

    def comes() -> None:
        world.keep(late, world.payloads[late.record_id])
        arrive(state, ledger, [late])
        archive.note_merged(late.round)

    busy = merging._busy
    if arrives == "before":
        comes()
    else:
        await busy.acquire()
    archive.carry_out(Close(2, ()))
    closing = asyncio.create_task(archive._one_thing())
    if arrives != "before":
        await asyncio.sleep(0)
        busy.release()
        comes()
    await closing
    assert merging.base.round == records.load_history().base.round == 0
    assert shelf.claims[0].digest == state.chain(4)
    ledger.close(2)
    await archive._one_thing()
    history = records.load_history()
    assert history.base.round == 2
    restored, claims = restore_state(SMALL, world.chunks, history, records.load(LAYOUT), OWN)
    assert restored is not None and claims == shelf.claims
    assert np.array_equal(restored.phi, world.fold([d for d in world.deltas if d.round <= 4]))
    records.close()


class Adopting:
    """A node that takes another snapshot over than it had."""

    def __init__(self, tmp_path: Path, *, own_last: int = 0) -> None:
        self.chunks = ChunkStore(tmp_path / "chunks")
        self.records = RecordStore(tmp_path / "ledger.sqlite", SMALL.swarm_id)
        self.core = core_with(Ledger(), own_last=own_last)
        self.loop = merging_of(self.core)
        shelf = SnapshotShelf(self.chunks, LAYOUT.snapshot_bytes)
        disk = disk_of(tmp_path)
        self.archive = Archive(self.core, self.loop, self.chunks, self.records, disk, shelf, self._tell)
        self.told: Callable[[Event], None] = lambda event: None

    def _tell(self, event: Event) -> None:
        self.told(event)

    async def begin(self, base: Base = GENESIS) -> None:
        await self.loop.begin(PhiState(SMALL, np.zeros(LAYOUT.numel, np.int32), self.chunks, OWN, base=base))

    def closed(self) -> Delta:
        """A delta of a closed round, whose payload is here still."""
        found = delta(b"of a closed round")
        self.chunks.put(found.body.chunks[0], b"of a closed round")
        return found

    def adopt(self, round_: int, value: int = 1) -> Claim:
        phi, nothing = (np.full(LAYOUT.numel, each, np.int32) for each in (value, 0))
        root = snapshots.store(phi, self.chunks, Sums(nothing, nothing))
        winner = Claim(round_, 12345, bytes([7]) * 32, root)
        self.core.sealing.adopting = self.core.sealing.sought = winner
        self.archive.carry_out(Adopt(winner))
        return winner


async def test_a_closing_that_waited_does_not_lower_the_base_that_was_adopted_meanwhile(
    tmp_path: Path,
) -> None:
    """Or the next start would merge once more what is in Phi."""
    node = Adopting(tmp_path)
    await node.begin()
    closed = node.closed()
    node.archive.carry_out(Close(100, (closed,)))
    winner = node.adopt(200)
    for _ in range(3):
        await node.archive._one_thing()
    assert node.loop.base == node.records.load_history().base == Base(200, winner.digest, winner.tokens)
    assert closed.body.chunks[0] not in node.chunks
    node.records.close()


async def test_what_is_fetched_early_is_here_and_waits_until_the_core_adopts_it(tmp_path: Path) -> None:
    node = Adopting(tmp_path)
    await node.begin()
    claim = node.adopt(100)
    node.core.sealing.adopting = None
    node.archive.carry_out(Prefetch(claim))
    await node.archive._one_thing()
    assert claim.root in node.chunks and node.loop.base == GENESIS
    node.adopt(100)
    await node.archive._one_thing()
    assert node.loop.base.round == 100
    node.records.close()


async def test_of_a_snapshot_that_was_adopted_nothing_stays_once_another_is(tmp_path: Path) -> None:
    node = Adopting(tmp_path)
    await node.begin()
    first = node.adopt(100)
    await node.archive._one_thing()
    assert first.root in node.chunks
    second = node.adopt(200, value=2)
    for _ in range(3):
        await node.archive._one_thing()
    assert first.root not in node.chunks and len(node.chunks.blobs) == 2 + 2, "an index and a chunk each"
    assert np.all(snapshots.load(second, LAYOUT.numel, node.chunks) == 2)
    node.records.close()


async def test_what_the_core_drops_as_it_goes_back_is_neither_merged_nor_on_disk(tmp_path: Path) -> None:
    """Unless it has come again meanwhile: others hold it, too."""
    node = Adopting(tmp_path)
    core = node.core
    core.clock, core.horizon = 30, 31
    core.caught_up, core.rests, core.somebody_trains = True, True, False
    made = [delta_of(author, 100 * author, 1000 * author) for author in (1, 2, 3)]
    for one, payload in made:
        node.chunks.put(one.body.chunks[0], payload)
        core.ledger.add(one)
    kept, gone, back = (one for one, _ in made)
    node.records.add([kept, gone, back])

    def told(event: Event) -> None:
        if isinstance(event, Adopted):  # as the core answers
            dropped = tuple(core.ledger.drop_beyond(100))
            node.archive.carry_out(Close(event.claim.round, dropped))

    node.told = told
    await node.begin()
    node.adopt(30)
    await node.archive._one_thing()
    core.ledger.add(back)
    for _ in range(2):
        await node.archive._one_thing()
    assert node.records.load(LAYOUT) == [kept, back]
    assert gone.body.chunks[0] not in node.chunks and back.body.chunks[0] in node.chunks
    node.records.close()


async def test_how_far_rounds_were_merged_is_noted_also_by_who_has_gone_back(tmp_path: Path) -> None:
    """What it had reached alone, far ahead, is of the history that it has given up."""
    node = Adopting(tmp_path)
    await node.begin()

    async def merged(round_: int) -> int:
        """As `MergeLoop` tells of it; returns what the next start is told."""
        node.core.merges.reach = round_
        node.archive.note_merged(round_)
        await node.archive._one_thing()
        return node.records.load_history().reach

    assert await merged(191) == 191
    node.adopt(30)
    await node.archive._one_thing()
    assert node.records.load_history().reach == 0
    assert await merged(33) == 33
    node.records.close()


async def test_what_the_core_no_longer_adopts_does_not_hold_up_sealing(world: World) -> None:
    """A lineage that was to win has gone on, and nobody has that snapshot any more."""
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    gone = Claim(4, 1, bytes(32), bytes(32))
    sealing.adopt(gone)
    sealing.archive.carry_out(Seal(4))
    await sealing.archive._one_thing()
    assert sealing.told == [Need(gone.key, ((gone.root, 3 * HASH_BYTES),))]
    sealing.adopt(None)
    await sealing.archive._one_thing()
    assert sealing.shelf.claims[0].round == 4 and sealing.archive.progress() is None


async def test_what_the_core_gives_up_while_it_is_read_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model that lies here already is read for minutes, and its claim may be gone by then."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    claim = fetching.claim(b"A", b"B", b"C")
    read = snapshots.SnapshotReader.read

    def slowly(reader: snapshots.SnapshotReader) -> Any:
        fetching.adopt(None)
        return read(reader)

    monkeypatch.setattr(snapshots.SnapshotReader, "read", slowly)
    own = fetching.shelf.claims
    fetching.adopt(claim)
    await fetching.look()
    await fetching.look()
    assert fetching.shelf.claims == own and not fetching.told
    assert fetching.archive.progress() is None


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_snapshot_that_cannot_be_used_is_told_of_and_holds_nothing_up(
    world: World, is_early: bool
) -> None:
    """A liar lists a chunk that all have, of another size."""
    sealing = Sealing.of_world(world)
    merge_all(sealing.state, world.deltas)
    short = sha256(b"short").digest()
    world.chunks.put(short, b"short")
    lie = Claim(8, 2**59, bytes(32), root_of([short] * 3))
    world.chunks.put(lie.root, short * 3)
    sealing.adopt(lie)
    if is_early:
        sealing.core.sealing.adopting = None
        sealing.archive.carry_out(Prefetch(lie))
    sealing.archive.carry_out(Seal(4))
    await sealing.archive._one_thing()
    assert sealing.told[0] == Unusable(lie) and sealing.archive.progress() is None
    sealing.adopt(None)
    await sealing.look()
    assert sealing.shelf.claims[0].round == 4


async def test_what_came_of_a_snapshot_that_is_given_up_goes(tmp_path: Path) -> None:
    """But for what open records need, or Phi may be rid of yet."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    kept = len(fetching.chunks.blobs)
    claim = fetching.claim(b"A", b"B", b"C")
    fetching.chunks.drop(sha256(b"c" * CHUNK_BYTES_MAX).digest())
    fetching.core.ledger = [delta(b"a" * CHUNK_BYTES_MAX)]
    fetching.core.holdings.revoked = [delta(b"b" * CHUNK_BYTES_MAX)]
    fetching.adopt(claim)
    await fetching.look()
    assert fetching.here() == "ab"
    fetching.adopt(None)
    await fetching.look()
    assert fetching.here() == "ab" and claim.root not in fetching.chunks
    fetching.core.ledger, fetching.core.holdings.revoked = [], []
    fetching.adopt(fetching.claim(b"A", b"B", b"c"))
    await fetching.look()
    fetching.adopt(None)
    await fetching.look()
    assert len(fetching.chunks.blobs) == kept, "and our own snapshot is whole"


async def test_a_joiner_whose_network_fails_for_a_while_goes_on_with_what_it_has(tmp_path: Path) -> None:
    """As long as it has no model, and seeks no other."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    fetching.core.sealing.joined, fetching.core.sealing.is_in_a_hurry = False, True
    claim = fetching.claim(b"A", b"B", b"c")
    fetching.adopt(claim)
    await fetching.look()
    fetching.adopt(None)
    await fetching.look()
    fetching.adopt(claim)
    await fetching.look()
    assert fetching.here() == "ab"
    fetching.adopt(fetching.claim(b"D", b"e", b"f"))
    await fetching.look()
    assert fetching.here() == "d"


class Restarted(Fetching):
    """A node that was killed while it fetched a snapshot, of which two chunks are here."""

    def __init__(self, chunks: ChunkStore, *, joined: bool) -> None:
        super().__init__(chunks)
        self.kept = len(chunks.blobs)
        self.fetched = self.claim(b"A", b"B", b"c")
        self.core.sealing.joined = joined
        self.core.sealing.is_in_a_hurry = True  # as until it is known what it goes on with
        self.archive._is_sweep_due = True


@pytest.mark.parametrize("joined", [True, False], ids=["came back after long", "joiner"])
async def test_who_is_killed_while_it_fetches_a_snapshot_goes_on_with_what_had_come(
    tmp_path: Path, joined: bool
) -> None:
    node = Restarted(ChunkStore(tmp_path / "chunks"), joined=joined)
    await node.look()
    node.core.sealing.joined = False  # the swarm has outlived what it holds, as it finds out again
    node.adopt(node.fetched)
    await node.look()
    need = node.told[-1]
    assert isinstance(need, Need)
    assert need.chunks == ((sha256(b"c" * CHUNK_BYTES_MAX).digest(), CHUNK_BYTES_MAX),)


async def test_what_had_come_of_another_snapshot_goes_once_the_index_of_the_one_that_is_wanted_is_here(
    tmp_path: Path,
) -> None:
    """A joiner that is killed again and again, while snapshots are superseded, does not fill its disk."""
    node = Restarted(ChunkStore(tmp_path / "chunks"), joined=False)
    node.core.ledger = [delta(b"b" * CHUNK_BYTES_MAX)]
    later = node.claim(b"a", b"d", b"e", index=False)
    node.adopt(later)
    await node.look()
    assert node.here() == "ab"
    node.claim(b"d", b"D", b"e", index=False)
    node.claim(b"a", b"d", b"e")
    node.chunks.drop(sha256(b"e" * CHUNK_BYTES_MAX).digest())
    await node.look()
    assert node.here() == "abd" and node.fetched.root not in node.chunks
    node.core.ledger = []
    node.archive._is_sweep_due = True
    await node.look()
    assert node.here() == "ad"


async def test_what_had_come_goes_where_a_nodes_own_history_turns_out_to_go_on(tmp_path: Path) -> None:
    node = Restarted(ChunkStore(tmp_path / "chunks"), joined=True)
    await node.look()
    assert node.here() == "ab"
    node.core.sealing.is_in_a_hurry = False
    await node.look()
    assert node.here() == "" and len(node.chunks.blobs) == node.kept, "and its own snapshot is whole"


async def test_the_index_of_a_liar_is_removed_as_well(world: World) -> None:
    sealing = Sealing.of_world(world)
    lie = Claim(8, 1, bytes(32), sha256(bytes(31)).digest())
    world.chunks.put(lie.root, bytes(31))
    sealing.adopt(lie)
    await sealing.archive._one_thing()
    sealing.adopt(None)
    await sealing.look()
    assert lie.root not in world.chunks


async def test_who_has_begun_fetches_the_sums_and_says_so_once_they_are_here(tmp_path: Path) -> None:
    """It trains meanwhile; a restart goes on with them."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    core, chunks = fetching.core, fetching.chunks
    claim = fetching.claim(b"A", b"B", b"C")
    hashes, (earlier, current), _ = snapshots.read_index(claim.root, LARGE.plan().snapshot_bytes, chunks)
    assert earlier == current and len(hashes) == 3
    index = chunks.get(earlier)
    piece = chunks.get(index[:HASH_BYTES])
    core.identity = SimpleNamespace(node_id=OWN)
    core.merges = SimpleNamespace(reach=0)
    begun: list[PhiState] = []

    async def begin(state: PhiState, tell: Callable[[], None] = lambda: None) -> None:
        begun.append(state)
        tell()

    fetching.begin = begin  # type: ignore[attr-defined]
    fetching.archive._records.begin_at = lambda claim, own_last, decided: None  # type: ignore[method-assign]
    chunks.drop(earlier)
    fetching.adopt(claim)
    await fetching.archive._one_thing()
    assert [type(event) for event in fetching.told] == [Need, Adopted] and begun[0].average() is None
    core.sealing.adopting = None
    fetching.archive.carry_out(Seal(16))
    await fetching.archive._one_thing()
    need = fetching.told[-1]
    assert isinstance(need, Need) and need.chunks == ((earlier, len(index)),) and need.key == claim.key
    assert fetching.archive.progress() is None, "the model is here"
    chunks.put(earlier, index)
    await fetching.archive._one_thing()
    need = fetching.told[-1]
    assert isinstance(need, Need) and need.chunks == ((index[:HASH_BYTES], CHUNK_BYTES_MAX),)
    chunks.put(index[:HASH_BYTES], piece)
    await fetching.archive._one_thing()
    assert fetching.told[-1] == Sealed((claim,)) and begun[0].average() is not None
