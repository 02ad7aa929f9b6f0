"""`gossamer.node.exports.export`: the same records make the same files, which appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gossamer.bootstrap.manifests import create
from gossamer.node import __version__
from gossamer.node.daemon.phi import restore, snapshots
from gossamer.node.daemon.phi.restore import averaged, replay
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.exports import export as tensorfile
from gossamer.node.exports.export import export
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import Ints, to_float
from gossamer.protocol.manifest import Manifest
from tests.models.own_tasks import write_task
from tests.node.chunkfiles import file_of
from tests.node.folders import Folder, some_deltas
from tests.protocol import builders

ROUNDS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def first(rng: np.random.Generator) -> tuple[Manifest, Ints]:
    """A swarm's manifest, and a first model with values of all magnitudes."""
    phi = (rng.integers(-(1 << 29), 1 << 29, builders.LAYOUT.numel) >> rng.integers(0, 30)).astype(np.int32)
    return builders.manifest(genesis={"digest": snapshots.digest(phi).hex()}), phi


@pytest.fixture
def folder(first: tuple[Manifest, Ints], tmp_path: Path, rng: np.random.Generator) -> Folder:
    """A node with so many rounds that the average is of several, none of them sealed."""
    folder = Folder(tmp_path / "node", *first)
    folder.add(*some_deltas(rng, first[0], ROUNDS))
    return folder


def facts(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return file.metadata()


def files(folder: Path) -> dict[str, bytes]:
    """Everything under a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def as_pretrained(folder: Folder, **extra: bytes) -> None:
    """Leave what a script that trains a model of transformers leaves."""
    for name, data in {"config.json": b'{"model_type": "llama", "torch_dtype": "float16"}', **extra}.items():
        path = folder.home.pretrained_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# -- one file


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_holds_every_tensor_as_torch_would_round_it(
    folder: Folder, tmp_path: Path, dtype: str, live: bool
) -> None:
    out = tmp_path / "out.safetensors"
    done = export(folder.home, out, dtype=dtype, live=live)
    found = load_file(out)
    _, state, mean = averaged(folder.home)
    assert not np.array_equal(mean, state.phi)
    held = dict(folder.manifest.plan().tensors(state.phi if live else mean))
    assert {(name, tuple(tensor.shape)) for name, tensor in found.items()} == {spec[:2] for spec in held}
    for spec, values in held.items():
        expected = torch.from_numpy(to_float(values).reshape(spec.shape)).to(DTYPES[dtype])
        assert torch.equal(found[spec.name], expected), spec.name
    assert facts(out) == {
        "format": "pt",
        "swarm": "test",
        "swarm_id": folder.manifest.swarm_id.hex(),
        "model": "live" if live else "average",
        "round": str(ROUNDS),
        "tokens": str(ROUNDS * 3 * 1000 // 2),  # two fragments: every token stands in a delta of each
        "phi_digest": state.digest().hex(),
        "gossamer_version": __version__,
    }
    assert int.from_bytes(out.read_bytes()[:8], "little") % 8 == 0, "tensors can be mapped where they are"
    assert done.bytes == out.stat().st_size and done.parameters == folder.manifest.plan().numel


def test_the_same_records_make_the_same_bytes_on_every_node(
    folder: Folder, first: tuple[Manifest, Ints], tmp_path: Path, rng: np.random.Generator
) -> None:
    """One got them in another order, and one began at a snapshot and never had the old ones."""
    made = [
        (delta, b"".join(folder.chunks.get(blob) for blob in delta.body.chunks)) for delta in folder.deltas
    ]
    claim = folder.seal(4)
    reordered = Folder(tmp_path / "reordered", *first)
    reordered.add(*(made[index] for index in rng.permutation(len(made))))
    joiner = Folder(tmp_path / "joiner", *first)
    joiner.begin_at(claim, folder)
    joiner.add(*(pair for pair in made if pair[0].round > 4))
    for one in (folder, reordered, joiner):
        as_pretrained(one)
    exports = []
    for number, one in enumerate((folder, folder, reordered, joiner)):
        export(one.home, tmp_path / f"{number}.safetensors", dtype="bfloat16")
        export(one.home, tmp_path / f"{number}")
        exports.append(((tmp_path / f"{number}.safetensors").read_bytes(), files(tmp_path / f"{number}")))
    assert all(found == exports[0] for found in exports)


def test_a_sealed_export_is_the_snapshot(folder: Folder, tmp_path: Path) -> None:
    folder.seal(8)
    phi = folder.state(upto=8).phi
    models = {"live": phi, "average": averaged(folder.home, sealed=True)[2]}
    assert not np.array_equal(*models.values())
    for name, model in models.items():
        out = tmp_path / f"{name}.safetensors"
        done = export(folder.home, out, sealed=True, live=name == "live")
        assert (done.facts["model"], done.facts["round"]) == (name, 8)
        assert done.facts["phi_digest"] == snapshots.digest(phi).hex()
        for spec, values in folder.manifest.plan().tensors(model):
            assert np.array_equal(load_file(out)[spec.name].flatten(), to_float(values).flatten())
    assert export(folder.home, tmp_path / "all.safetensors").facts["round"] == ROUNDS


def test_a_joiner_without_the_sums_exports_the_live_model_only(
    folder: Folder, first: tuple[Manifest, Ints], tmp_path: Path
) -> None:
    claim, joiner = folder.seal(8), Folder(tmp_path / "joiner", *first)
    joiner.begin_at(claim, folder)
    _, roots, _ = snapshots.read_index(claim.root, first[0].plan().snapshot_bytes, folder.chunks)
    for root in roots:
        joiner.chunks.drop(root)
    with pytest.raises(StorageError, match="still fetching .* or use the live model .--live."):
        export(joiner.home, tmp_path / "out.safetensors")
    assert export(joiner.home, tmp_path / "out.safetensors", live=True).facts["model"] == "live"


# -- beside a daemon that moves on


@pytest.mark.parametrize(
    ("owner", "name", "sealed"),
    [
        pytest.param(snapshots, "load", (3, 5), id="before the snapshot is read, which goes"),
        pytest.param(restore, "_fold", (5,), id="before payloads are looked for, which go"),
        pytest.param(PhiState, "merge", (5,), id="before payloads are read, which go"),
    ],
)
def test_what_the_daemon_drops_meanwhile_is_read_from_a_newer_snapshot(
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    sealed: tuple[int, ...],
) -> None:
    """It seals and closes between the reading of the records and that of the chunks they name."""
    folder.seal(1)
    expected = replay(folder.home)[1].digest().hex()
    original: Callable[..., Any] = getattr(owner, name)

    def after_the_daemon(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        for round_ in sealed:
            folder.seal(round_)
        folder.close(4)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, after_the_daemon)
    done = export(folder.home, tmp_path / "out.safetensors")
    assert done.facts["phi_digest"] == expected and done.facts["round"] == ROUNDS
    assert getattr(owner, name) is original, "the daemon did come in between"


def test_damage_is_said_and_never_passed_over(folder: Folder, tmp_path: Path) -> None:
    """A payload with a flipped bit must not be left out, and a reader removes nothing."""
    blob = folder.deltas[-1].body.chunks[0]
    path = file_of(folder.chunks, blob)
    path.write_bytes(bytes(len(path.read_bytes())))
    before = files(folder.home.chunks_path)
    for _ in range(2):
        with pytest.raises(StorageError, match="is damaged"):
            export(folder.home, tmp_path / "out.safetensors")
    assert files(folder.home.chunks_path) == before
    assert list(tmp_path.glob("*out*")) == []


def test_a_reader_changes_nothing_in_the_folder(folder: Folder, tmp_path: Path) -> None:
    def state() -> dict[str, bytes]:
        return {name: data for name, data in files(folder.home.root).items() if not name.endswith("-shm")}

    with folder.records() as store:  # a row that does not verify is the daemon's to drop
        store._db.execute("UPDATE deltas SET envelope = x'00' WHERE round = 10")
        before = state()
        export(folder.home, tmp_path / "out.safetensors")
        assert state() == before, "-shm has the locks of those who read"


# -- what is at OUT


def test_an_earlier_export_is_replaced_only_by_force(folder: Folder, tmp_path: Path) -> None:
    as_pretrained(folder)
    file, out = tmp_path / "out.safetensors", tmp_path / "out"
    for path in (file, out):
        export(folder.home, path)
        with pytest.raises(ConfigError, match="--force"):
            export(folder.home, path, dtype="float16")
        whole = path.stat()
        export(folder.home, path, dtype="float16", force=True)
        assert path.stat().st_ino != whole.st_ino
    assert {t.dtype for p in (file, out / "model.safetensors") for t in load_file(p).values()} == {
        torch.float16
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["node", "out", "out.safetensors"]


@pytest.mark.parametrize("force", [False, True])
def test_no_name_costs_anybody_a_file(folder: Folder, tmp_path: Path, force: bool) -> None:
    as_pretrained(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all my work")
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "notes").write_text("more of it")
    before = files(tmp_path)
    for name, problem in {
        "mine": "already exists|'thesis.tex', which is not part of an export",
        "a.safetensors": "is a folder",
        "notes": "is a file",
        "weights.pt": "must end in .safetensors",
        "missing/out": "there is no folder",
        "node/out.safetensors": "the node's own folder",
        "node/pretrained": "the node's own folder",
        "node": "the node's own folder",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            export(folder.home, tmp_path / name, force=force)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    as_pretrained(folder)
    export(folder.home, tmp_path / name)
    before = files(tmp_path)
    written = 0

    def disk_is_full(values: Ints) -> np.ndarray:
        nonlocal written
        written += 1
        if written == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return to_float(values)

    monkeypatch.setattr(tensorfile, "to_float", disk_is_full)
    with pytest.raises(StorageError, match=f"cannot write .*{name}: No space left on device"):
        export(folder.home, tmp_path / name, force=True)
    assert files(tmp_path) == before


def test_a_pipe_or_a_mount_point_is_refused_in_a_line(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's volume, in whose place nothing can be put."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(StorageError, match="it is a device, a pipe or a socket, not a file"):
        export(folder.home, tmp_path / "pipe.safetensors", force=True)
    as_pretrained(folder)
    before = files(tmp_path)

    def is_mounted(old: Path, new: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr("gossamer.node.files.os.replace", is_mounted)
    with pytest.raises(StorageError, match="cannot write .*out: Device or resource busy"):
        export(folder.home, tmp_path / "out")
    assert files(tmp_path) == before


# -- Hugging Face folders


def test_what_a_script_left_beside_the_weights_goes_along(folder: Folder, tmp_path: Path) -> None:
    as_pretrained(
        folder,
        **{
            "tokenizer.json": b"{}",
            "README.md": b"a card of its own",
            "additional_chat_templates/tool.jinja": b"{{ tools }}",
            "model.safetensors": b"the weights that training began with",
            "model.safetensors.index.json": b"{}",
            "frozen.json": b"[]",
        },
    )
    export(folder.home, tmp_path / "out", dtype="bfloat16")
    found = files(tmp_path / "out")
    assert sorted(found) == [
        "README.md",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert found["README.md"] == b"a card of its own"
    assert json.loads(found["config.json"]) == {"model_type": "llama", "dtype": "bfloat16"}
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(builders.TENSORS)


def test_adapters_are_written_as_peft_reads_them(folder: Folder, tmp_path: Path) -> None:
    names = {spec.name: f"base_model.{spec.name}" for spec in builders.TENSORS}
    as_pretrained(folder, **{"adapter_config.json": b"{}", "names.json": json.dumps(names).encode()})
    (folder.home.pretrained_path / "config.json").unlink()
    export(folder.home, tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == set(names.values())
    assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_with_frozen_parameters_is_no_whole_folder(folder: Folder, tmp_path: Path) -> None:
    as_pretrained(folder, **{"frozen.json": b'["lm_head.weight", "norm.weight"]'})
    with pytest.raises(ConfigError, match=r"does not hold all of this model: 'lm_head.*\.safetensors"):
        export(folder.home, tmp_path / "out")
    done = export(folder.home, tmp_path / "out.safetensors")
    assert done.frozen == ("lm_head.weight", "norm.weight")


@pytest.mark.parametrize(
    ("layer", "local"),
    [
        ("nn.Linear(8, 8).requires_grad_(False)", "'0.weight'"),
        ("nn.BatchNorm1d(8)", "'0.running_mean'"),
        ("nn.LayerNorm(8)", None),
    ],
)
def test_a_tasks_model_that_holds_more_than_the_swarm_is_no_whole_folder(
    task_folder: Path, tmp_path: Path, layer: str, local: str | None
) -> None:
    text = write_task(
        task_folder,
        "def build_model(self, seed):\n        return nn.Sequential(",
        "def pretrained_files(self):\n        return {'config.json': b'{}'}\n\n"
        f"    def build_model(self, seed):\n        return nn.Sequential({layer}, ",
    )
    manifest, phi = create(
        name="t",
        task=text,
        options={},
        codec="int4",
        every_steps=4,
        every_seconds=0.0,
        fragments=1,
        seed=0,
    )
    home = Folder(tmp_path / "node", manifest, phi).home
    home.keep_task(text)
    if local is None:
        export(home, tmp_path / "out")
        assert sorted(files(tmp_path / "out")) == ["README.md", "config.json", "model.safetensors"]
        return
    with pytest.raises(
        ConfigError, match=f"does not hold all of this model: {local}, for example, is frozen or"
    ):
        export(home, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b"[1]", "config.json is damaged"),
        ("config.json", b"\xff{", "config.json is damaged"),
        ("frozen.json", b"{", "cannot use .*frozen.json"),
        ("frozen.json", b"5", "cannot use .*frozen.json"),
    ],
)
def test_damaged_companions_are_one_line(
    folder: Folder, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    as_pretrained(folder, **{name: content})
    with pytest.raises(StorageError, match=problem):
        export(folder.home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_a_script_is_one_file_only(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trains 'none'.*export to a \.safetensors file"):
        export(folder.home, tmp_path / "out")
    folder.home.pretrained_path.mkdir()
    with pytest.raises(StorageError, match="has no config.json"):
        export(folder.home, tmp_path / "out")
