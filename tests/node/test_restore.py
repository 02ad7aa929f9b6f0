"""`restore` and `generate`: a node's folder alone gives back its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.models.registry import build_task
from gossamer.models.task import named_tensors
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.restore import has_model, replay
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import GENESIS, RecordStore
from gossamer.node.exports.generate import generate, load_into
from gossamer.node.home import Home
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError, DivergedError, StorageError
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import merge_round
from gossamer.protocol.payloads import split_payload
from gossamer.protocol.records import Claim
from tests.node.folders import Folder, some_deltas, text_model
from tests.protocol import builders
from tests.protocol.builders import contribution, identity, random_delta


@pytest.fixture
def made() -> tuple[Manifest, Ints]:
    return text_model()


@pytest.fixture
def home(made: tuple[Manifest, Ints], tmp_path: Path) -> Home:
    """A folder with the first model and nothing else."""
    manifest, phi = made
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(manifest)
    root = snapshots.store(phi, ChunkStore(home.chunks_path))
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    store.add_snapshot(Claim(0, 0, GENESIS.chain, root), (), ())
    store.close()
    return home


def test_the_first_model(home: Home, made: tuple[Manifest, Ints]) -> None:
    manifest, state = replay(home)
    assert manifest == made[0]
    assert np.array_equal(state.phi, made[1])


def test_whether_there_is_a_model_is_asked_without_touching_the_folder(
    home: Home, made: tuple[Manifest, Ints]
) -> None:
    """A daemon may have it, and nothing is locked yet."""
    before = home.ledger_path.read_bytes()
    assert has_model(home, made[0])
    assert home.ledger_path.read_bytes() == before
    home.ledger_path.write_bytes(b"")
    assert not has_model(home, made[0]), "its first start was cut short"


def test_records_are_folded_in_and_those_without_a_payload_left_out(
    home: Home, made: tuple[Manifest, Ints], rng: np.random.Generator
) -> None:
    manifest, phi = made
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    chunks = ChunkStore(home.chunks_path)
    layout = manifest.plan()
    for round_ in (1, 2):
        counted = []
        for author in range(3):
            delta, payload = random_delta(rng, identity(author), round_, of=manifest)
            store.add([delta])
            if author < 2:
                for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
                    chunks.put(blob, piece)
                counted.append(contribution(delta, payload, layout))
                known = delta.body.chunks
        phi = phi - merge_round(counted, layout.of_round(round_), manifest.outer)
    lie = replace(delta.body, round=3, base=2, payload_bytes=delta.body.payload_bytes - 1, chunks=known)
    store.add([builders.signed(identity(1), lie, manifest)])
    _, state = replay(home)  # while the daemon has the database open
    assert np.array_equal(state.phi, phi), "chunks of another size than the record states are not its own"
    store.close()


def test_rounds_that_one_author_trained_alone_are_in_the_model_if_they_were_merged(
    home: Home, made: tuple[Manifest, Ints], rng: np.random.Generator
) -> None:
    """Two of three left early. The records alone look as if the third had signed ahead of them."""
    manifest, phi = made
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    chunks = ChunkStore(home.chunks_path)
    layout = manifest.plan()
    after: dict[int, Ints] = {}
    for round_, authors in ((1, 3), (2, 1), (3, 1), (4, 1)):
        counted = []
        for author in range(authors):
            delta, payload = random_delta(rng, identity(author), round_, of=manifest)
            store.add([delta])
            for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
                chunks.put(blob, piece)
            counted.append(contribution(delta, payload, layout))
        phi = after[round_] = phi - merge_round(counted, layout.of_round(round_), manifest.outer)
    assert np.array_equal(replay(home)[1].phi, after[2]), "nobody knows yet that the swarm got further"
    store.note_reach(4)
    assert np.array_equal(replay(home)[1].phi, after[4])
    store.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_older_snapshot_that_lacks_a_record_is_not_taken_for_the_model(
    tmp_path: Path, rng: np.random.Generator, is_late: bool
) -> None:
    """The newest one is damaged. Of the one before nobody knows what it holds, but that it was everything."""
    phi = rng.integers(-(1 << 20), 1 << 20, builders.LAYOUT.numel).astype(np.int32)
    folder = Folder(tmp_path / "node", builders.SMALL, phi)
    late, *made = some_deltas(rng, builders.SMALL, 3)
    folder.add(*made, *([] if is_late else [late]))
    folder.seal(2)
    folder.add(*([late] if is_late else []))
    newest = folder.seal(3)
    expected = replay(folder.home)[1].phi
    folder.chunks.drop(newest.root)
    if is_late:
        with pytest.raises(StorageError, match="is damaged; start the node, which fetches what is missing"):
            replay(folder.home)
    else:
        assert np.array_equal(replay(folder.home)[1].phi, expected)


def test_a_folder_without_a_node_or_a_model_is_one_clear_line(
    made: tuple[Manifest, Ints], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="not the folder of a node"):
        replay(Home(tmp_path / "missing"))
    home = Home(tmp_path / "joining")
    home.create()
    home.adopt(made[0])
    with pytest.raises(StorageError, match="has no model yet"):
        replay(home)
    RecordStore(home.ledger_path, made[0].swarm_id).close()
    with pytest.raises(StorageError, match="has no model yet"):
        replay(home)


def test_a_model_gets_phi_and_writes(home: Home, made: tuple[Manifest, Ints]) -> None:
    manifest, phi = made
    task = build_task(manifest.task.name, manifest.task.options, ())
    model = task.build_model(99)
    load_into(model, manifest, phi)
    assert np.array_equal(genesis.parameters(model, manifest.plan()), phi)
    assert all(torch.isfinite(parameter).all() for _, parameter in named_tensors(model))
    text = "".join(generate(home, "abc", 7, temperature=0.0, seed=1))
    assert len(text) == 7
    assert text == "".join(generate(home, "abc", 7, temperature=0.0, seed=2, live=True))
    with pytest.raises(ConfigError, match="temperature"):
        next(generate(home, "abc", 7, temperature=-1.0, seed=0))


def test_a_script_s_model_is_not_for_us_to_run(tmp_path: Path) -> None:
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(builders.manifest())
    with pytest.raises(ConfigError, match="trains 'none', a script of its own.*gossamer export"):
        next(generate(home, "abc", 7, temperature=0.0, seed=1))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_model_that_diverged_is_not_handed_out(
    made: tuple[Manifest, Ints], home: Home, sealed: bool
) -> None:
    manifest, phi = made
    phi[0] = VALUE_LIMIT
    root = snapshots.store(phi, ChunkStore(home.chunks_path))
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    store.add_snapshot(Claim(0, 1, GENESIS.chain, root), (), ())
    store.close()
    with pytest.raises(DivergedError, match="fragment 0 of the model.* reached a magnitude of 64") as caught:
        replay(home, sealed=sealed)
    assert ("--sealed" in str(caught.value)) is not sealed
