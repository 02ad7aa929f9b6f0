"""`gossamer.bootstrap.genesis`: first parameters beside the manifest, exact, and checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gossamer.bootstrap import genesis as genesis_file
from gossamer.bootstrap.genesis import ensure_genesis
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.fixedpoint import Ints, to_fixed
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec, plan

TENSORS = (
    TensorSpec("a", (400, 500), "rda"),  # in both fragments
    TensorSpec("b.c", (7,), "mean"),
    TensorSpec("d", (3, 2, 2), "rda"),
)


def swarm(rng: np.random.Generator, task: str = "my_task:MyTask") -> tuple[Manifest, Ints]:
    """First parameters of every magnitude that fixed point holds, rounded from float32 as a model's are."""
    numel = plan(TENSORS, 2).numel
    values = rng.standard_normal(numel) * 2.0 ** rng.integers(-30, 4, numel)
    values[:4] = 0.0, -0.0, 63.999996, -1.0
    phi = to_fixed(values.astype(np.float32))
    manifest = from_values(
        {
            "swarm": {"name": "n", "created": 0},
            "task": {"name": task},
            "layout": {"fragments": 2, "tensors": TENSORS},
            "genesis": {"digest": snapshots.digest(phi).hex()},
        },
        "test",
    )
    return manifest, phi


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, rng: np.random.Generator) -> None:
    manifest, phi = swarm(rng)
    path = genesis_file.beside(tmp_path / "my.toml")
    assert path.name == "my.genesis.safetensors"
    genesis_file.write(manifest, phi, path)
    assert np.array_equal(genesis_file.read(manifest, path), phi)
    assert {n: (t.shape, t.dtype) for n, t in load_file(path).items()} == {
        spec.name: (spec.shape, np.float32) for spec in TENSORS
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["a"].__setitem__((0, 0), 0.5), "does not hold the initial parameters of this manifest"),
        (lambda t: t.pop("b.c"), "as the swarm's initial parameters"),
        (lambda t: t.update(d=t["d"][:2]), "as the swarm's initial parameters"),
        (lambda t: t["a"].__setitem__((0, 0), np.nan), "not finite"),
        (lambda t: t["a"].__setitem__((0, 0), 64.0), "outside"),
    ],
)
def test_another_file(tmp_path: Path, rng: np.random.Generator, change: object, message: str) -> None:
    manifest, phi = swarm(rng)
    path = tmp_path / "g.safetensors"
    genesis_file.write(manifest, phi, path)
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path)
    with pytest.raises(ConfigError) as caught:
        genesis_file.read(manifest, path)
    assert message in str(caught.value) and "g.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no safetensors", bytes(100)])
def test_a_damaged_file(tmp_path: Path, rng: np.random.Generator, content: bytes) -> None:
    manifest, _ = swarm(rng)
    (tmp_path / "g.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot use .* as the swarm's initial parameters"):
        genesis_file.read(manifest, tmp_path / "g.safetensors")


def test_a_folder_takes_its_first_model_from_the_file_once(tmp_path: Path, rng: np.random.Generator) -> None:
    manifest, phi = swarm(rng)
    home = Home(tmp_path / "d")
    home.create()
    with pytest.raises(ConfigError, match=r"there is no .*my\.genesis\.safetensors with the swarm's initial"):
        ensure_genesis(home, manifest, tmp_path / "my.toml")
    genesis_file.write(manifest, phi, tmp_path / "my.genesis.safetensors")
    ensure_genesis(home, manifest, tmp_path / "my.toml")
    assert genesis.is_stored(manifest, ChunkStore(home.chunks_path))
    (tmp_path / "my.genesis.safetensors").unlink()
    ensure_genesis(home, manifest, tmp_path / "my.toml")
