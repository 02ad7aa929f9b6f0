"""The model in a node's folder, for other programs: a safetensors file, or a Hugging Face folder.

Works beside a running node, without taking its lock, and without `transformers`. Nodes that hold the same
records write the same bytes.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gossamer.models import TaskError
from gossamer.models.registry import task_names
from gossamer.models.task_file import task_errors
from gossamer.node import __version__
from gossamer.node.daemon.phi.restore import averaged, replay
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.files import SHARED, keep, placed, replacing
from gossamer.node.home import Home, manifest_of
from gossamer.node.trainer.data import build_task
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import Ints, to_float
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Layout

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
CARD = "README.md"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT's folders hold in place of a configuration. There the model is adapters to another one."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAMES = "names.json"
"""In `Home.pretrained_path`, of adapters: what PEFT's files call the tensors, by the swarm's names."""
FROZEN = "frozen.json"
"""In `Home.pretrained_path`: a list of the names that the model has beside those that the swarm trains."""

FOREIGN_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
"""How names of weight files end, and the index of several. Our own weights are in one file."""


# --- Phi as a safetensors file, written tensor by tensor.
#
# The safetensors library needs all tensors in memory at once and writes the metadata in a different order
# each time; here the same Phi gives the same bytes. The format is the header's length in 8 bytes, little
# endian; the header, JSON padded with spaces; and the tensors' bytes (https://huggingface.co/docs/safetensors).

_ALIGNMENT = 8


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded half to even, as torch does; there are no NaNs in Phi."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


DTYPES: dict[str, tuple[str, int, Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]]] = {
    "float32": ("F32", 4, lambda values: values.astype("<f4", copy=False)),
    "bfloat16": ("BF16", 2, _bfloat16),
    "float16": ("F16", 2, lambda values: values.astype("<f2")),
}
"""What safetensors calls it, bytes per number, and the conversion to an array with these bytes, little
endian."""


def write(
    path: Path,
    layout: Layout,
    phi: Ints,
    dtype: str,
    metadata: Mapping[str, str],
    names: Mapping[str, str] | None = None,
) -> int:
    """Write Phi or its average, int32[layout.numel], as tensors of the layout's names and shapes; those in
    `names` under other names.

    Returns the file's size. Raises OSError."""
    code, itemsize, convert = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for spec, _ in layout.tensors(phi):
        begin, end = end, end + spec.numel * itemsize
        header[(names or {}).get(spec.name, spec.name)] = {
            "dtype": code,
            "shape": spec.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path, durable=True, mode=SHARED) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in layout.tensors(phi):
            file.write(convert(to_float(values)).data)
        return file.tell()


# --- What a Hugging Face folder holds beside the weights: configuration, tokenizer, model card.
#
# A task, built in or from a file, provides these itself. For a model of `transformers`, the script that
# trains it has left them in `Home.pretrained_path`, as `save_pretrained` writes them.


def files_beside(home: Home, manifest: Manifest, dtype: str) -> dict[str, bytes]:
    """All files but the card, by name; `dtype` is that of the weights. Raises ConfigError or StorageError."""
    is_built_in = manifest.task.name in task_names()
    if home.pretrained_path.is_dir():
        local = frozen_names(home)
        files = _kept_files(home.pretrained_path)
    elif is_built_in or home.task() is not None:
        try:
            with task_errors():
                task = build_task(home, manifest)
                files, local = task.pretrained_files(), ()
                if not is_built_in:  # built-in models hold nothing else, and may take long to build
                    from gossamer.models.task import local_tensors

                    shared = {spec.name for spec in manifest.layout.tensors}
                    local = tuple(local_tensors(task.build_model(manifest.task.seed), shared))
        except TaskError as error:
            raise ConfigError(str(error)) from None
    else:
        raise ConfigError(
            f"swarm {manifest.swarm.name!r} trains {manifest.task.name!r}, and {home.root} has no"
            " Hugging Face configuration of its model; export to a .safetensors file"
        )
    if local:
        raise ConfigError(
            f"the swarm does not hold all of this model: {local[0]!r}, for example, is frozen or a buffer,"
            " and each node has its own. Export to a .safetensors file, and load it into the model that"
            " training began with (load_state_dict with strict=False)"
        )
    return files if ADAPTER_CONFIG in files else {**files, CONFIG: _with_dtype(files[CONFIG], dtype)}


def frozen_names(home: Home) -> tuple[str, ...]:
    """Names that are not in Phi, as far as a script has noted them. Raises StorageError."""
    return tuple(map(str, _noted(home.pretrained_path / FROZEN) or ()))


def _noted(path: Path) -> Any:
    """What a script has noted for us, a list or a map of names; None if it has not. Raises StorageError."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot use {path}: {error}") from None
    if not isinstance(found, list | dict):
        raise StorageError(f"cannot use {path}: it is neither a list nor a map")
    return found


def card(facts: Mapping[str, str], library: str) -> bytes:
    """The model card, in Markdown, with `facts` as a table."""
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    text = f"---\nlibrary_name: {library}\n---\n\n# {facts['swarm']}\n\nTrained by a Gossamer swarm.\n\n"
    return f"{text}| | |\n| --- | --- |\n{rows}".encode()


def _kept_files(folder: Path) -> dict[str, bytes]:
    """The files that a script has left, except weights. Raises StorageError."""
    try:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in (FROZEN, NAMES) and not path.name.endswith(FOREIGN_WEIGHTS)
        }
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from None
    if files.keys().isdisjoint((CONFIG, ADAPTER_CONFIG)):
        raise StorageError(f"{folder} has no {CONFIG}; export to a .safetensors file")
    return files


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """The configuration with another dtype: `transformers` loads weights in the dtype that it states."""
    try:
        values = {**json.loads(config), "dtype": dtype}
    except (ValueError, TypeError):
        raise StorageError(f"the model's {CONFIG} is damaged; export to a .safetensors file") from None
    values.pop("torch_dtype", None)  # the older name of "dtype"
    return (json.dumps(values, indent=2) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and from which model."""

    path: Path
    parameters: int
    bytes: int
    """Of all files."""
    dtype: str
    facts: Mapping[str, Any]
    """Which model it is; as text, also in the metadata of the weights."""
    frozen: tuple[str, ...]
    """Names of the model's other parameters and buffers, as far as a script has noted them."""

    def explain(self) -> str:
        """One line for people."""
        return (
            f"wrote {self.path}: {self.parameters:,} parameters as {self.dtype}, {self.bytes / 1e6:,.1f} MB;"
            f" {self.facts['model']} model as of round {self.facts['round']}, Phi"
            f" {self.facts['phi_digest'][:16]}"
        )

    def as_json(self) -> dict[str, Any]:
        """All fields, for scripts."""
        fields = {**asdict(self), "path": str(self.path)}
        return {**fields.pop("facts"), **fields}


def model_in(home: Home, *, live: bool, sealed: bool = False) -> tuple[Manifest, PhiState, Ints]:
    """The averaged model in a node's folder, or the live one, which is Phi itself: int32[numel]; and the
    state that it is of. Raises ConfigError, StorageError or DivergedError."""
    if not live:
        return averaged(home, sealed=sealed)
    manifest, state = replay(home, sealed=sealed)
    return manifest, state, state.phi


def export(
    home: Home,
    out: Path,
    *,
    dtype: str = "float32",
    live: bool = False,
    sealed: bool = False,
    force: bool = False,
) -> Exported:
    """Write the model to one file if `out` ends in .safetensors, and otherwise to a Hugging Face folder: one
    for `PeftModel.from_pretrained` if the swarm trains adapters of PEFT's.

    `live` writes the model that is trained, and not the average; `sealed` writes either as of the newest
    snapshot instead of all that is merged; `force` replaces an earlier export.

    Raises ConfigError or StorageError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    manifest = manifest_of(home)  # first, so that a wrong folder is reported before anything else
    files = None if out.suffix == SUFFIX else files_beside(home, manifest, dtype)
    try:
        place = out.resolve()
        if not place.parent.is_dir():
            raise ConfigError(f"cannot write {out}: there is no folder {place.parent}")
        if place.is_relative_to(home.root.resolve()):
            raise ConfigError(f"{out} is inside the node's own folder; choose a place outside it")
        are_adapters = files is not None and ADAPTER_CONFIG in files
        name = ADAPTER_WEIGHTS if are_adapters else WEIGHTS
        names = (_noted(home.pretrained_path / NAMES) or {}) if are_adapters else {}
        _check_place(out, force, None if files is None else {name, CARD, *files})
        manifest, state, model = model_in(home, live=live, sealed=sealed)
        layout = manifest.plan()
        # Which model it is, without time or place, so that all nodes write the same.
        facts = {
            "swarm": manifest.swarm.name,
            "swarm_id": manifest.swarm_id.hex(),
            "model": "live" if live else "average",
            "round": state.newest_round,
            "tokens": layout.trained_tokens(state.tokens),
            "phi_digest": state.digest().hex(),
            "gossamer_version": __version__,
        }
        texts = {key: str(value) for key, value in facts.items()}
        with nullcontext(place) if files is None else placed(place) as aside:
            weights = aside if files is None else aside / name
            if files is not None:
                aside.mkdir()
            metadata = {"format": "pt", **texts}  # `transformers` loads no file without a format
            size = write(weights, layout, model, dtype, metadata, names)
            about = card(texts, "peft" if are_adapters else "transformers")
            for name, data in ({CARD: about, **files} if files is not None else {}).items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                keep(aside / name, data, mode=SHARED)
                size += len(data)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from None
    return Exported(out, layout.numel, size, dtype, facts, frozen_names(home))


def _check_place(out: Path, force: bool, names: set[str] | None) -> None:
    """A file of weights goes there, or a folder with these `names`. Only an earlier export is replaced: a
    wrong name must not cost somebody their own files."""
    if names is not None and out.suffix in FOREIGN_WEIGHTS:
        raise ConfigError(f"{out}: a file of weights must end in {SUFFIX}; any other name means a folder")
    if not out.exists():
        return
    if out.is_dir() != (names is not None):
        raise ConfigError(
            f"{out} is a {'folder' if out.is_dir() else 'file'}: a file of weights ends in {SUFFIX}, and any"
            " other name means a folder; choose another"
        )
    found = sorted(os.listdir(out)) if names is not None else [out.name]
    if found and not force:
        raise ConfigError(f"{out} already exists; choose another name or replace it with --force")
    tops = {Path(name).parts[0] for name in names or found}
    others = [name for name in found if name not in tops]
    if others:
        raise ConfigError(f"{out} holds {others[0]!r}, which is not part of an export; choose another folder")
