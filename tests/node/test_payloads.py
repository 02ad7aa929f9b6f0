"""Payloads that do not fit in memory are read tensor by tensor: the same bits, in bounded memory."""

from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.phi import state as payloads
from gossamer.node.daemon.phi.state import Merger
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge import merge
from gossamer.protocol.payloads.chunks import split_payload
from gossamer.protocol.payloads.layout import TensorSpec
from gossamer.protocol.payloads.payload import section_starts
from gossamer.protocol.records import Delta
from tests.node.chunkfiles import file_of
from tests.node.world import OWN, World, arrive
from tests.protocol.builders import LAYOUT, identity, manifest, random_delta
from tests.protocol.cost import calls

CHUNK = 64
"""Bytes: tensors begin and end inside chunks, and go over several."""


@pytest.fixture
def world(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(limits, "PAYLOAD_CHUNK_BYTES_MIN", CHUNK)
    return World(rng, tmp_path / "chunks")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "KEPT_BYTES", 0)
    monkeypatch.setattr(payloads, "MERGED_BYTES_PER_VALUE", 0)


@pytest.mark.usefixtures("no_room")
def test_payloads_left_on_disk_do_not_change_a_bit(world: World) -> None:
    merger = world.merger()
    arrive(merger, Ledger(), world.deltas)
    assert np.array_equal(merger.phi, world.fold(world.deltas))
    assert not merger._payloads._in_memory


def test_as_many_are_in_memory_as_there_is_room_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a round's payloads: those are read once, the others tensor by tensor."""
    of_round = [delta for delta in world.deltas if delta.round == 1]
    size, fragment = of_round[0].body.payload_bytes, LAYOUT.of_round(1)
    monkeypatch.setattr(payloads, "KEPT_BYTES", 2 * size)
    monkeypatch.setattr(payloads, "MERGED_BYTES_PER_VALUE", 0)
    kept = payloads.Payloads(world.merger()._manifest, world.chunks)
    with kept.room_for(of_round, fragment):
        found = [kept.contribution(delta, fragment) for delta in of_round]
        assert list(kept._in_memory) == [delta.record_id for delta in of_round[:2]]
        assert kept.are_in_memory(of_round[:2]) and not kept.are_in_memory(of_round)
    for delta, contribution in zip(of_round, found, strict=True):
        assert contribution is not None
        whole = payloads.Payload("int4", fragment, world.payloads[delta.record_id])
        for index in range(len(fragment.slots)):
            assert np.array_equal(contribution.tensor(index).decode(), whole.tensor(index))
    with kept.room_for(of_round[2:], fragment):
        for delta in of_round[2:]:
            kept.contribution(delta, fragment)
    assert list(kept._in_memory) == [delta.record_id for delta in of_round[2:]], "those read last"


def test_what_is_kept_costs_a_merge_nothing(world: World) -> None:
    """Of a small model there are thousands: each merge added all of them up, twice."""
    kept = payloads.Payloads(world.merger()._manifest, world.chunks)
    costs = []
    for delta in world.deltas:
        fragment = LAYOUT.of_round(delta.round)
        with kept.room_for([delta], fragment):
            kept.contribution(delta, fragment)
        costs.append(calls(partial(_look, kept, delta)))
    assert len(kept._in_memory) == len(world.deltas) and len(set(costs)) == 1
    for delta in world.deltas:
        kept.forget(delta)
    assert not kept._in_memory and kept._bytes == 0


@pytest.mark.usefixtures("no_room")
def test_damage_found_half_way_through_a_merge_changes_nothing(world: World) -> None:
    merger, ledger = world.merger(), Ledger()
    of_round = [delta for delta in world.deltas if delta.round == 1]
    arrive(merger, ledger, of_round[:3])  # measured, so that they are read next while Phi changes
    before = (merger.phi.copy(), merger.version, merger.tokens, merger.chain())
    victim, blob = of_round[1], of_round[1].body.chunks[6]
    assert not any(blob in delta.body.chunks for delta in of_round if delta is not victim)
    first = section_starts(CODECS["int4"], LAYOUT.of_round(1))[1]
    assert first <= 6 * CHUNK, "the first tensor is merged by then"
    file_of(world.chunks, blob).write_bytes(b"damaged")
    with pytest.raises(MissingChunkError) as error:
        arrive(merger, ledger, of_round[3:])
    assert error.value.blob == blob
    assert np.array_equal(merger.phi, before[0])
    assert (merger.version, merger.tokens, merger.chain()) == before[1:]
    world.keep(victim, world.payloads[victim.record_id])
    merger.merge(1, tuple(ledger.valid(1)))
    assert np.array_equal(merger.phi, world.fold(of_round))


def test_what_was_forgotten_is_measured_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MEASURED_KEPT", 5)
    merger = world.merger()
    arrive(merger, Ledger(), world.deltas)
    assert len(merger._payloads._norms) == 5
    merger.merge(1, ())
    assert np.array_equal(merger.phi, world.fold([delta for delta in world.deltas if delta.round > 1]))


def _look(kept: payloads.Payloads, delta: Delta) -> None:
    with kept.room_for([delta], LAYOUT.of_round(delta.round)):
        pass


def _peak_of_merge(merger: Merger, deltas: tuple[Delta, ...]) -> int:
    """The most memory that the first merge of a round takes."""
    tracemalloc.start()
    try:
        merger.merge(1, deltas)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_round_of_many_members_does_not_need_memory_for_all_their_payloads(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "KEPT_BYTES", 0)
    monkeypatch.setattr(limits, "PAYLOAD_CHUNK_BYTES_MIN", 4096)
    monkeypatch.setattr(merge, "SAMPLE_MAX", 64)
    members, tensors = 64, tuple(TensorSpec(f"w{n}", (1 << 15,), "rda") for n in range(8))
    large = manifest(tensors, fragments=1, outer={"codec": "int4"})
    phi = np.zeros(large.plan().numel, dtype=np.int32)
    chunks = ChunkStore(tmp_path / "chunks")
    made = [random_delta(rng, identity(n), 1, of=large, codec="int4") for n in range(members)]
    for delta, payload in made:
        for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
            chunks.put(blob, piece)
    deltas = tuple(sorted((delta for delta, _ in made), key=lambda delta: delta.author))
    of_payloads = sum(len(payload) for _, payload in made)
    del made, payload
    # The lesser of two: the interpreter's own table of names may grow by megabytes during one.
    peak = min(_peak_of_merge(Merger(large, phi[:], chunks, OWN), deltas) for _ in range(2))
    assert phi.any()
    # Payloads and a copy of the fragment, each as large as it; a tensor of everybody's, and its sums.
    assert peak < 2 * phi.nbytes + of_payloads / 2 < of_payloads
