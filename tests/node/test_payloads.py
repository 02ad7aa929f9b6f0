"""Payloads that do not fit in memory are read tensor by tensor: the same bits, in bounded memory."""

from __future__ import annotations

import tracemalloc
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
    assert not merger._payloads._recent


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
    assert len(merger._payloads._measured) == 5
    merger.merge(1, ())
    assert np.array_equal(merger.phi, world.fold([delta for delta in world.deltas if delta.round > 1]))


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
