"""`snapshot_fetch`: what is fetched ahead is not adopted, and what came of one that is given up goes."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gossamer.node.daemon.phi import archive as archive_module
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.archive import SnapshotFetch
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol.claims import Claim
from gossamer.protocol.errors import StorageError
from gossamer.protocol.events import Event, Need, Unusable
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads.chunks import HASH_BYTES, chunk_hashes, root_of
from tests.node.archives import Fetching, Sealing, delta, merge_all
from tests.node.world import World


@pytest.fixture
def world(rng: np.random.Generator, tmp_path: Path) -> World:
    return World(rng, tmp_path / "chunks")


async def test_what_is_fetched_ahead_is_not_adopted(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    hashes = chunk_hashes(b"\0" * 16)
    wanted, other = (Claim(8, 1, bytes(32), root) for root in (root_of(hashes), bytes(32)))
    asked: list[Event] = []
    core: Any = SimpleNamespace(
        layout=SimpleNamespace(snapshot_bytes=16), sealing=SimpleNamespace(adopting=None)
    )
    fetch = SnapshotFetch(core, chunks, asked.append)
    fetch.want(wanted)
    assert not await fetch.advance()
    assert asked == [Need(wanted.key, ((wanted.root, HASH_BYTES),))]
    chunks.put(wanted.root, b"".join(hashes))
    assert not await fetch.advance()
    assert asked[1:] == [Need(wanted.key, ((hashes[0], 16),))]
    chunks.put(hashes[0], b"\0" * 16)
    assert await fetch.advance()
    assert len(asked) == 2, "all of it is here, and only the core's word is missing"
    fetch.want(other, adopts=True)
    chunks.drop(hashes[0])
    await fetch.advance()
    assert len(asked) == 2, "the core has chosen another one since"


async def test_how_far_it_is_is_said_when_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a line brings nothing for hours, its log is no flood."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(archive_module, "PROGRESS_S", 0.0)
    chunks, size = ChunkStore(tmp_path / "chunks"), 2 * CHUNK_BYTES_MAX
    parts = [bytes([number]) * CHUNK_BYTES_MAX for number in range(2)]
    hashes = [sha256(part).digest() for part in parts]
    wanted = Claim(8, 1, bytes(32), root_of(hashes))
    core: Any = SimpleNamespace(
        layout=SimpleNamespace(snapshot_bytes=size), sealing=SimpleNamespace(adopting=None)
    )
    fetch = SnapshotFetch(core, chunks, lambda event: None)
    fetch.want(wanted)
    chunks.put(wanted.root, b"".join(hashes))
    for _ in range(3):
        await fetch.advance()
    chunks.put(hashes[0], parts[0])
    for _ in range(3):
        await fetch.advance()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"fetching the model of round 8: {number} of 2 MiB" for number in range(2)]


async def test_what_the_core_no_longer_adopts_does_not_hold_up_sealing(world: World) -> None:
    """A lineage that was to win has gone on, and nobody has that snapshot any more."""
    sealing = Sealing.of_world(world)
    merge_all(sealing.merger, world.deltas)
    gone = Claim(4, 1, bytes(32), bytes(32))
    sealing.adopt(gone)
    sealing.archive.seal(4)
    await sealing.archive._one_thing()
    assert sealing.told == [Need(gone.key, ((gone.root, HASH_BYTES),))]
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
        lacking = read(reader)
        fetching.adopt(None)
        return lacking

    monkeypatch.setattr(snapshots.SnapshotReader, "read", slowly)
    own = fetching.shelf.claims
    fetching.adopt(claim)
    await fetching.look()
    await fetching.look()
    assert fetching.shelf.claims == own and not fetching.told
    assert fetching.archive.progress() is None


@pytest.mark.parametrize("is_adopted", [True, False])
async def test_a_snapshot_that_cannot_be_used_is_told_of_and_holds_nothing_up(
    world: World, is_adopted: bool
) -> None:
    """A liar lists a chunk that all have, of another size."""
    sealing = Sealing.of_world(world)
    merge_all(sealing.merger, world.deltas)
    short = sha256(b"short").digest()
    world.chunks.put(short, b"short")
    lie = Claim(8, 2**59, bytes(32), root_of([short]))
    world.chunks.put(lie.root, short)
    if is_adopted:
        sealing.adopt(lie)
    else:
        sealing.archive.prefetch(lie)
    sealing.archive.seal(4)
    await sealing.archive._one_thing()
    assert sealing.told[0] == Unusable(lie) and sealing.archive.progress() is None
    sealing.adopt(None)
    await sealing.look()
    assert sealing.shelf.claims[0].round == 4


async def test_another_snapshot_is_fetched_though_the_one_before_turns_out_unusable_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing = Sealing.of_world(world)
    index = bytes(31)
    lie, other = (Claim(8, 1, bytes(32), root) for root in (sha256(index).digest(), bytes(32)))
    world.chunks.put(lie.root, index)
    sealing.adopt(lie)
    read = snapshots.SnapshotReader.read

    def slowly(reader: snapshots.SnapshotReader) -> Any:
        sealing.adopt(other)
        return read(reader)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.SnapshotReader, "read", slowly)
        await sealing.archive._one_thing()
    assert sealing.told == [Unusable(lie)]
    await sealing.archive._one_thing()
    assert sealing.told[1:] == [Need(other.key, ((other.root, HASH_BYTES),))]


async def test_what_came_of_a_snapshot_that_is_given_up_goes(tmp_path: Path) -> None:
    """But for what open records need, or Phi may be rid of yet."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    kept = len(fetching.chunks)
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
    assert len(fetching.chunks) == kept, "and our own snapshot is whole"


async def test_what_the_next_snapshot_shares_with_one_given_up_is_not_fetched_again(tmp_path: Path) -> None:
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    fetching.archive.prefetch(fetching.claim(b"A", b"B", b"c"))
    await fetching.look()
    later = fetching.claim(b"a", b"d", b"e", index=False)
    fetching.adopt(later)
    await fetching.look()
    assert fetching.here() == "ab", "its index will tell"
    fetching.claim(b"a", b"D", b"e")
    await fetching.look()
    assert fetching.here() == "ad"
    assert isinstance(fetching.told[-1], Need)
    assert fetching.told[-1].chunks == ((sha256(b"e" * CHUNK_BYTES_MAX).digest(), CHUNK_BYTES_MAX),)


async def test_of_the_snapshot_of_another_lineage_only_what_differs_is_fetched(tmp_path: Path) -> None:
    """A second record for a closed round changes one fragment: the other chunks are here already."""
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    fetching.shelf.restore([fetching.claim(b"A", b"B", b"C")])
    fetching.adopt(fetching.claim(b"a", b"d", b"c"))
    await fetching.look()
    need = fetching.told[-1]
    assert isinstance(need, Need)
    assert need.chunks == ((sha256(b"d" * CHUNK_BYTES_MAX).digest(), CHUNK_BYTES_MAX),)
    assert fetching.here() == "abc"


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
        self.kept = len(chunks)
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
    node.chunks.put(later.root, b"".join(sha256(x * CHUNK_BYTES_MAX).digest() for x in (b"a", b"d", b"e")))
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
    assert node.here() == "" and len(node.chunks) == node.kept, "and its own snapshot is whole"


async def test_what_is_given_up_is_removed_though_that_fails_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching = Fetching(ChunkStore(tmp_path / "chunks"))
    fetching.adopt(fetching.claim(b"A", b"B", b"c"))
    fetching.adopt(None)

    def refuse(blob: bytes) -> bytes:
        raise StorageError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(fetching.chunks, "get", refuse)
        with pytest.raises(StorageError):
            await fetching.look()
    await fetching.look()
    assert fetching.here() == ""


async def test_the_index_of_a_liar_is_removed_as_well(world: World) -> None:
    sealing = Sealing.of_world(world)
    lie = Claim(8, 1, bytes(32), sha256(bytes(31)).digest())
    world.chunks.put(lie.root, bytes(31))
    sealing.adopt(lie)
    await sealing.archive._one_thing()
    sealing.adopt(None)
    await sealing.look()
    assert lie.root not in world.chunks
