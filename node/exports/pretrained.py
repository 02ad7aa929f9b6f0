"""What a Hugging Face folder holds beside the weights: configuration, tokenizer, model card.

A task, built in or from a file, provides these itself. For a model of `transformers`, the script that trains
it has left them in `Home.pretrained_path`, as `save_pretrained` writes them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.models.errors import TaskError
from gossamer.models.registry import task_names
from gossamer.node import own_task
from gossamer.node.storage.home import Home
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.models.task import Task

CONFIG = "config.json"
FROZEN = "frozen.json"
"""In `Home.pretrained_path`: a list of the names that the model has beside those that the swarm trains."""

FOREIGN_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")
"""How names of weight files end, and the index of several. Our own weights are in one file."""


def files_beside(home: Home, manifest: Manifest, dtype: str) -> dict[str, bytes]:
    """All files but the card, by name; `dtype` is that of the weights. Raises ConfigError or StorageError."""
    if home.pretrained_path.is_dir():
        local = frozen_names(home)
        files = _kept_files(home.pretrained_path)
    elif manifest.task.name in task_names() or home.task() is not None:
        try:
            files, local = _of_task(own_task.build(home, manifest), manifest)
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
    return {**files, CONFIG: _with_dtype(files[CONFIG], dtype)}


def _of_task(task: "Task", manifest: Manifest) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """A task's files, and the names that its model has beside Phi. Raises TaskError."""
    from gossamer.models.task import local_names

    files = task.pretrained_files()
    if manifest.task.name in task_names():
        return files, ()  # built-in models have nothing else, and may take long to build
    shared = {spec.name for spec in manifest.layout.tensors}
    return files, tuple(local_names(task.build_model(manifest.task.seed), shared))


def frozen_names(home: Home) -> tuple[str, ...]:
    """Names that are not in Phi, as far as a script has noted them. Raises StorageError."""
    path = home.pretrained_path / FROZEN
    try:
        names = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot use {path}: {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StorageError(f"cannot use {path}: it should be a list of names")
    return tuple(names)


def card(facts: Mapping[str, str]) -> bytes:
    """The model card, in Markdown, with `facts` as a table."""
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    text = f"---\nlibrary_name: transformers\n---\n\n# {facts['swarm']}\n\nTrained by a Gossamer swarm.\n\n"
    return f"{text}| | |\n| --- | --- |\n{rows}".encode()


def _kept_files(folder: Path) -> dict[str, bytes]:
    """The files that a script has left, except weights. Raises StorageError."""
    try:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != FROZEN and not path.name.endswith(FOREIGN_WEIGHTS)
        }
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}") from None
    if CONFIG not in files:
        raise StorageError(f"{folder} has no {CONFIG}; export to a .safetensors file")
    return files


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """The configuration with another dtype: `transformers` loads weights in the dtype that it states."""
    try:
        values: Any = json.loads(config)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise StorageError(f"the model's {CONFIG} is damaged; export to a .safetensors file")
    values.pop("torch_dtype", None)  # the older name of "dtype"
    return (json.dumps({**values, "dtype": dtype}, indent=2) + "\n").encode()
