"""The model in a node's folder, for other programs: a safetensors file, or a Hugging Face folder.

Works beside a running node, without taking its lock, and without `transformers`. Nodes that hold the same
records write the same bytes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.node import __version__
from gossamer.node.exports import tensorfile
from gossamer.node.exports.pretrained import FOREIGN_WEIGHTS, card, files_beside, frozen_names
from gossamer.node.phi.restore import replay
from gossamer.node.storage.home import Home, manifest_of
from gossamer.node.storage.placing import is_mount_point, is_of_mount, placed, written
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.payloads.layout import Layout

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and from which model."""

    path: Path
    parameters: int
    size: int
    """Bytes of all files."""
    dtype: str
    facts: Mapping[str, str]
    """Which model it is, as also written into the file's metadata."""
    frozen: tuple[str, ...]
    """Names of the model's other parameters and buffers, as far as a script has noted them."""

    def explain(self) -> str:
        """One line for people."""
        return (
            f"wrote {self.path}: {self.parameters:,} parameters as {self.dtype}, {self.size / 1e6:,.1f} MB;"
            f" round {self.facts['round']}, model {self.facts['phi_digest'][:16]}"
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, for scripts."""
        numbers = {key: int(self.facts[key]) for key in ("round", "tokens")}
        return {
            "path": str(self.path),
            "parameters": self.parameters,
            "bytes": self.size,
            "dtype": self.dtype,
            **self.facts,
            **numbers,
            "frozen": list(self.frozen),
        }


def export(
    home: Home, out: Path, *, dtype: str = "float32", sealed: bool = False, force: bool = False
) -> Exported:
    """Write the model to one file if `out` ends in .safetensors, and otherwise to a Hugging Face folder.

    `sealed` writes the newest snapshot instead of all that is merged; `force` replaces an earlier export.

    Raises ConfigError or StorageError.
    """
    if dtype not in tensorfile.DTYPES:
        raise ConfigError(f"there is no dtype {dtype!r}; choose from {', '.join(tensorfile.DTYPES)}")
    manifest = manifest_of(home)  # first, so that a wrong folder is reported before anything else
    files = None if out.suffix == SUFFIX else files_beside(home, manifest, dtype)
    try:
        place = out.resolve()
        _check_place(home, out, place)
        if files is None:
            _check_file(out, place, force)
        else:
            _check_folder(out, place, force, {WEIGHTS, CARD, *(Path(name).parts[0] for name in files)})
        model = _read(home, dtype, sealed)
        with placed(place) as aside:
            size = _write_weights(aside, model) if files is None else _write_folder(aside, model, files)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from None
    return Exported(out, model.layout.numel, size, dtype, model.facts, frozen_names(home))


def _check_place(home: Home, out: Path, place: Path) -> None:
    if not place.parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {place.parent}")
    if place.is_relative_to(home.root.resolve()):
        raise ConfigError(f"{out} is inside the node's own folder; choose a place outside it")


def _check_file(out: Path, place: Path, force: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; choose another name")
    if out.exists() and not force:
        raise ConfigError(f"{out} already exists; choose another name or replace it with --force")
    if out.exists() and is_mount_point(place):
        raise ConfigError(f"{out} is a mount point and cannot be replaced; mount the folder around it")


def _check_folder(out: Path, place: Path, force: bool, names: set[str]) -> None:
    """Only an earlier export is replaced: a wrong name must not cost somebody their own files."""
    if out.suffix in FOREIGN_WEIGHTS:
        raise ConfigError(f"{out}: a file of weights must end in {SUFFIX}; any other name means a folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file; choose a folder, or a name that ends in {SUFFIX}")
    found = sorted(name for name in os.listdir(place) if not is_of_mount(place, name))
    if found and not force:
        raise ConfigError(f"{out} is not empty; choose another folder or replace it with --force")
    others = [name for name in found if name not in names]
    if others:
        raise ConfigError(f"{out} holds {others[0]!r}, which is not part of an export; choose another folder")


@dataclass(frozen=True, slots=True)
class _Model:
    """What to write."""

    layout: Layout
    phi: Ints
    dtype: str
    facts: Mapping[str, str]


def _read(home: Home, dtype: str, sealed: bool) -> _Model:
    """The model, and which one it is, without time or place, so that all nodes write the same."""
    manifest, merger = replay(home, sealed=sealed)
    layout = manifest.plan()
    facts = {
        "swarm": manifest.swarm.name,
        "swarm_id": manifest.swarm_id.hex(),
        "round": str(merger.newest_round),
        "tokens": str(layout.trained_tokens(merger.tokens)),
        "phi_digest": merger.digest().hex(),
        "gossamer_version": __version__,
    }
    return _Model(layout, merger.phi, dtype, facts)


def _write_weights(path: Path, model: _Model) -> int:
    """One safetensors file; returns its size. Raises OSError."""
    metadata = {"format": "pt", **model.facts}  # `transformers` loads no file without a format
    with written(path) as file:
        tensorfile.write(file, model.layout, model.phi, tensorfile.DTYPES[model.dtype], metadata)
        return file.tell()


def _write_folder(folder: Path, model: _Model, files: Mapping[str, bytes]) -> int:
    """A Hugging Face folder; returns the size of its files. Raises OSError."""
    folder.mkdir()
    size = _write_weights(folder / WEIGHTS, model)
    for name, data in {CARD: card(model.facts), **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with written(folder / name) as file:
            file.write(data)
        size += len(data)
    return size
