"""Existing weights as a swarm's first parameters: a safetensors file, or a folder written by transformers.

Nothing is ever unpickled, so ``.bin`` and ``.pt`` files are refused.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.protocol.errors import ConfigError, DivergedError
from gossamer.protocol.fixedpoint import to_fixed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before every name."""


def load_weights(model: nn.Module, path: Path) -> None:
    """Set a model's trainable parameters, float32, to the values that a file or folder holds for their names.

    A tensor that the model ties to others may have any of their names. A file may leave out the name of the
    module that holds nearly everything, as transformers' base models do. Buffers are ignored: each node has
    its own.

    Raises:
        ConfigError: the weights cannot be read, or are not this model's; names the first tensor that differs.
    """
    weights = _Weights(path)
    naming = _naming(_all_names(model), weights.names)
    aliases = _aliases(model)
    used: set[str] = set()
    for name, parameter in named_tensors(model):
        names = [naming.of(alias) for alias in aliases[parameter]]
        present = [alias for alias in names if alias in weights.names]
        if not present:
            raise ConfigError(_missing(weights, naming.of(name), parameter))
        values, *others = [_fitting(weights, alias, parameter) for alias in present]
        if not all(torch.equal(values, other) for other in others):
            raise ConfigError(
                f"{path}: {' and '.join(present)} differ, but are one tensor in the model: leave out all but"
                " the one that counts"
            )
        try:
            to_fixed(values.numpy())
        except DivergedError as error:
            raise ConfigError(f"{path}: tensor {present[0]!r}: {error}; scale or freeze it") from None
        with torch.no_grad():
            parameter.copy_(values)
        used.update(present)
    _check_others(model, weights, naming, weights.names - used)


class _Naming(NamedTuple):
    """How the model's names become the file's."""

    drop: str = ""
    add: str = ""

    def of(self, name: str) -> str:
        return self.add + name.removeprefix(self.drop)


def _naming(names: Iterable[str], found: frozenset[str]) -> _Naming:
    """The naming by which the most names are found."""
    modules = sorted({f"{name.split('.')[0]}." for name in names if "." in name})
    candidates = [
        _Naming(),
        *(_Naming(add=wrapper) for wrapper in _WRAPPERS),
        *(_Naming(drop=module) for module in modules),
    ]
    return max(candidates, key=lambda naming: sum(naming.of(name) in found for name in names))


def _all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every name of every parameter."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    return aliases


def _fitting(weights: "_Weights", name: str, parameter: nn.Parameter) -> Tensor:
    """A tensor of the file as float32. Raises ConfigError if it cannot be this parameter's."""
    values = weights.get(name)
    if values.dtype not in _FLOATS:
        raise ConfigError(
            f"{weights.path}: tensor {name!r} is {_plain(values.dtype)}; weights must be float32, float64,"
            " bfloat16 or float16 (a quantised model cannot be trained)"
        )
    if values.shape != parameter.shape:
        raise ConfigError(
            f"{weights.path}: tensor {name!r} has shape {list(values.shape)}, but {list(parameter.shape)} in"
            " the model"
        )
    return values.float()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _missing(weights: "_Weights", name: str, parameter: nn.Parameter) -> str:
    nearest = difflib.get_close_matches(name, weights.names, n=1)
    guess = f"; the most similar name is {nearest[0]!r}" if nearest else ""
    shape = list(parameter.shape)
    return f"{weights.path} has no tensor {name!r} of shape {shape}, which the model trains{guess}"


def _check_others(model: nn.Module, weights: "_Weights", naming: _Naming, names: Iterable[str]) -> None:
    """Raise ConfigError for unused tensors in the file that matter: frozen parameters must have the same
    values in the model, and names that the model does not have are refused. Buffers are ignored."""
    frozen = {naming.of(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {naming.of(name) for name, _ in model.named_buffers()}
    for name in sorted(names):
        if name in frozen:
            if not torch.equal(_fitting(weights, name, frozen[name]), frozen[name].float()):
                raise ConfigError(
                    f"{weights.path}: tensor {name!r} is frozen in the model, with different values; a swarm"
                    " only shares what it trains, so load the rest in build_model"
                )
        elif name not in buffers:
            raise ConfigError(f"{weights.path} has a tensor {name!r}, which the model does not have")


class _Weights:
    """Named tensors of one file, or of several with an index."""

    def __init__(self, path: Path) -> None:
        """Open the files. Raises ConfigError."""
        self.path = path
        self._files: dict[str, Any] = {}
        try:
            for file in _files(path):
                opened: Any = safe_open(file, framework="pt", device="cpu")
                self._files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read weights from {path}: {error}") from None
        self.names = frozenset(self._files)

    def get(self, name: str) -> Tensor:
        """A tensor by name. Raises ConfigError."""
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read tensor {name!r} from {self.path}: {error}") from None
        return tensor


def _files(path: Path) -> Iterator[Path]:
    """The safetensors files that a path stands for. Raises ConfigError or OSError."""
    if path.is_dir():
        found = [path / name for name in (SINGLE, INDEX) if (path / name).exists()]
        if not found:
            raise ConfigError(f"{path} holds neither {SINGLE} nor {INDEX}; give the file itself with --from")
        path = found[0]
    if not path.exists():
        raise ConfigError(f"--from {path}: no such file or folder")
    if path.name.endswith(".index.json"):
        yield from _shards(path)
    elif path.suffix == ".safetensors":
        yield path
    else:
        raise ConfigError(
            f"--from {path}: only safetensors files are read, since other formats may run code when they are"
            " opened; convert the weights with safetensors.torch.save_model"
        )


def _shards(index: Path) -> Iterator[Path]:
    """The files that an index lists, which lie beside it. Raises ConfigError or OSError."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is not an index of safetensors files") from None
    for name in sorted(names, key=str):
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} names {name!r}, which is not a file beside it")
        yield index.parent / name
