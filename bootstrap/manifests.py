"""Writes manifests: builds a task's model once, and writes down everything that nodes must agree on."""

import difflib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.registry import OptionValue
from gossamer.models.task import Task, default_averaging, named_tensors
from gossamer.models.task_file import kind_of, task_errors
from gossamer.node.daemon.phi import snapshots
from gossamer.node.files import SHARED, keep
from gossamer.node.inputs import expanded, read_manifest
from gossamer.node.trainer import genesis
from gossamer.node.trainer.parameters import check_shareable, is_sharded, parameters_of
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.limits import BLOCKS_MAX, FRAGMENTS_MAX, TENSORS_MAX
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec, plan

# --- What new manifests have where nobody says otherwise.

AMONG_FRIENDS = {"weight_cap": 0.0}
"""For invited members: their machines may differ a thousandfold, and each should count for what it does."""

AMONG_STRANGERS = {"clip": 1.5}
"""For open swarms: half of a manifest's default. It costs nothing in a calm swarm, and two of eight members
that send their deltas with the opposite sign no longer stop it (docs/benchmarks.md)."""

FRAGMENTS = 4
"""Default number of parts that a model is split into. They take turns, so that no delta moves the whole model
at once: 1 % less loss for the same bytes in windows of 30 steps (docs/benchmarks.md)."""

FRAGMENT_NUMEL_MIN = 1 << 20
"""Where the swarm sets its pace, a fragment has at least so many parameters: a round of fewer costs hardly
less, and with fewer rounds windows can be shorter."""

WINDOWS_PER_EPOCH = 4
"""How many windows lie between two snapshots, and between two looks at the pace: after two of these it
follows what lines do. A round is sealed after as many."""

SHORT_WINDOW = 10
"""Windows of so few steps want no momentum: with it, windows of 5 end 2 % higher (docs/benchmarks.md)."""

LADDER = ("int4", "topk8", "topk16", "topk")
"""The codecs of a swarm for which nobody has chosen one: 2, 0.6, 0.37 and 0.13 bit a parameter on a line."""

RETAIN = 256
"""Default number of windows whose records are kept; `history.retain` is this times the fragments, in
rounds."""


def outer_defaults(codec: str, *, by_mean: bool = False, every_steps: int = 0) -> dict[str, float]:
    """Outer settings that suit a codec and a window; `by_mean`: all tensors are averaged by mean. Raises
    ConfigError."""
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is unknown; choose one of {', '.join(CODECS)}")
    chosen = CODECS[codec].outer_by_mean if by_mean else CODECS[codec].outer
    if chosen.momentum and 0 < every_steps <= SHORT_WINDOW:
        chosen = chosen._replace(learning_rate=1.0, momentum=0.0)
    return chosen._asdict()


# --- A manifest as people read and edit it: TOML, with the meaning of values beside them.


COMMENTS = {
    "swarm.created": "Unix seconds",
    "task.source": "digest of its file",
    "outer": "of its codecs, each node uses the finest that its uplink carries",
    "outer.clip": "times the median norm per square root of steps; 0 for none",
    "outer.weight_cap": "times the median weight; 0 for none",
    "pace": "with both lengths 0, the swarm sets its own",
    "pace.every_steps": "inner steps between two deltas of a fragment, or 0 ...",
    "pace.every_seconds": "... and seconds instead",
    "pace.max_mbit": "payloads that a node may receive where the swarm sets its pace; 0 for no bound",
    "history": "all in rounds",
    "history.retain": "how long a partition may last and still heal exactly; 0 keeps all",
    "data": "if all nodes train on the same; 0 if each has its own",
    "data.blocks": "in which nodes claim what they have trained on",
    "admission.mode": "open, or invited: only nodes that an owner invites",
    "admission.owners": "public keys that can invite and revoke",
    "layout": "of each tensor: name, shape, averaging rule",
}
"""What stands behind a line of the file, by section and key."""


def to_toml(manifest: Manifest) -> str:
    """The file's text; read back, it gives the same manifest."""
    lines = ["# A Gossamer swarm. Its nodes agree on all of this: change any value, and it is another swarm."]
    for section, values in manifest.model_dump(exclude={"version"}).items():
        lines += _section(section, values)
    return "\n".join(lines) + "\n"


def _section(name: str, values: Mapping[str, Any], header: str = "[{}]") -> Iterator[str]:
    yield ""
    yield _commented(header.format(name), name)
    for key, value in sorted(values.items(), key=lambda pair: _is_table(pair[1])):  # tables come last
        inner = f"{name}.{_key(key)}"
        if isinstance(value, dict):
            yield from _section(inner, value)
        elif _is_table(value):
            for one in value:
                yield from _section(inner, one, "[[{}]]")
        else:
            yield _commented(f"{_key(key)} = {_value(value)}", f"{name}.{key}")


def _is_table(value: Any) -> bool:
    """Whether TOML writes it as a table, or as one for each of its items."""
    return isinstance(value[0] if isinstance(value, tuple) and value else value, dict)


def _commented(line: str, name: str) -> str:
    return f"{line}  # {COMMENTS[name]}" if name in COMMENTS else line


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        items = list(map(_value, value))
        rows = value and isinstance(value[0], tuple)  # tensors, a line each
        return "[\n    " + ",\n    ".join(items) + ",\n]" if rows else f"[{', '.join(items)}]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written alike


def _key(name: str) -> str:
    """A TOML key, bare if TOML allows that."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


# --- Existing weights as a swarm's first parameters: a safetensors file, or a folder written by transformers.
#
# Nothing is ever unpickled, so ``.bin`` and ``.pt`` files are refused.

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_weights(model: nn.Module, path: Path) -> None:
    """Set a model's trainable parameters, float32, to the values that a file or folder holds for their names.

    A tensor that the model ties to others may have any of their names. A file may leave out the name of the
    module that holds nearly everything, as transformers' base models do. Buffers are ignored: each node has
    its own. Frozen parameters must be the model's already, since a swarm only shares what it trains.

    Raises:
        ConfigError: the weights cannot be read, or are not this model's; names the first tensor that differs.
    """
    tensors = _tensors(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = _left_out(list(parameters), tensors)
    found = {name: tensors.pop(at) for name in parameters if (at := name.removeprefix(prefix)) in tensors}
    present = {id(parameters[name]) for name in found}
    for name, parameter in parameters.items():
        if parameter.requires_grad and id(parameter) not in present:
            wanted = name.removeprefix(prefix)
            nearest = difflib.get_close_matches(wanted, tensors, n=1)
            guess = f"; the most similar name is {nearest[0]!r}" if nearest else ""
            raise ConfigError(
                f"{path} has no tensor {wanted!r} of shape {list(parameter.shape)}, which the model"
                f" trains{guess}"
            )
    if unknown := tensors.keys() - {name.removeprefix(prefix) for name, _ in model.named_buffers()}:
        raise ConfigError(f"{path} has a tensor {min(unknown)!r}, which the model does not have")
    for name, values in found.items():
        parameter, what = parameters[name], f"{path}: tensor {name.removeprefix(prefix)!r}"
        if not values.is_floating_point():
            raise ConfigError(f"{what} is {values.dtype}, not floating-point: is the model quantised?")
        if values.shape != parameter.shape:
            shape = list(parameter.shape)
            raise ConfigError(f"{what} has shape {list(values.shape)}, but {shape} in the model")
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(values)
    for name, values in found.items():
        if not torch.allclose(parameters[name], values.float(), rtol=0, atol=0, equal_nan=True):
            raise ConfigError(
                f"{path}: tensor {name.removeprefix(prefix)!r} differs from the model's: it is frozen there,"
                " and must be loaded in build_model, or tied to another tensor of the file, which must be"
                " left out"
            )


def _left_out(names: Sequence[str], found: Collection[str]) -> str:
    """What the file leaves out before the model's names: the module without which most names are found."""
    modules = sorted({f"{name.split('.')[0]}." for name in names if "." in name})
    return max(("", *modules), key=lambda module: sum(n.removeprefix(module) in found for n in names))


def _tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of a folder's files. Raises ConfigError."""
    if path.is_dir():
        path = path / (INDEX if (path / INDEX).exists() else SINGLE)
    if not path.exists():
        raise ConfigError(f"--from {path}: no such file or folder")
    if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
        raise ConfigError(
            f"--from {path}: only safetensors files are read, since other formats may run code when they are"
            " opened; convert the weights with safetensors.torch.save_model"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        files = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        parts = [load_file(path.parent / Path(name).name) for name in files]
        return {name: tensor for part in parts for name, tensor in part.items()}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read weights from {path}: {error}") from None


# --- A new swarm's manifest: of a task, or of a model at hand.

CUSTOM = "custom"
"""The task of a swarm that is trained by people's own scripts."""


class Settings(TypedDict, total=False):
    """What a swarm agrees on besides its model. `describe` explains them."""

    name: Required[str]
    codec: str | None
    every_steps: int | None
    every_seconds: float
    fragments: int | None
    owners: tuple[str, ...]
    invited: bool
    samples: int


def create(
    *,
    task: str,
    seed: int,
    options: Mapping[str, OptionValue] | None = None,
    settings: Sequence[str] = (),
    averaging: str | None = None,
    weights: Path | None = None,
    data: Sequence[Path] = (),
    same_data: bool = False,
    trial: bool = True,
    **swarm: Unpack[Settings],
) -> tuple[Manifest, Ints]:
    """Build the task's model from `seed` and describe the swarm that trains it.

    `task` is named by a person at this machine: a task that comes with Gossamer, or ``FILE.py:CLASS``. That
    file is run and, with `trial`, tried out for one step on `data`. `settings` are further options, as on a
    command line (``key=value``). `weights` holds first parameters in place of those that follow from the seed
    (see `load_weights`). `averaging` is the rule for weight matrices, whatever the task says; None leaves it
    to the task. Vectors and embeddings get `mean`, except that `centered-clip` applies to all tensors: a
    defence with a gap is none. With `same_data`, all nodes train on `data`, and the swarm goes through it
    together.

    Returns the manifest and Phi_0, int32[numel]. Raises ConfigError.
    """
    here, digest = [path.absolute() for path in data], ""
    try:
        # A custom task may change the working directory, as scripts do to find their data; we restore it.
        with chdir("."), task_errors():
            kind = kind_of(task)
            resolved = kind.resolve({**(options or {}), **kind.read(settings)})
            built = kind.task(resolved, here)
            model = built.build_model(seed)
            tensors = _shareable_tensors(model)
            if kind.source and trial:
                _try_out(built, seed, model, has_data=bool(here))
            if same_data:
                swarm["samples"], digest = built.shared_data()
            by_task = {key: built.averaging(model, key, parameter) for key, parameter in tensors.items()}
    except TaskError as error:
        raise ConfigError(str(error)) from error
    if same_data and not swarm["samples"]:
        raise ConfigError(
            "this task cannot share its data out: see Task.shared_data, or leave --same-data out"
        )
    if weights is not None:
        load_weights(model, weights)
    rules = _rules(averaging, model, tensors) if averaging else by_task
    described = {"name": kind.name, "seed": seed, "source": kind.source, "options": resolved}
    return _describe(model, rules, described, digest=digest, **swarm)


def _try_out(task: Task, seed: int, model: nn.Module, *, has_data: bool) -> None:
    """Raise TaskError for the first thing in a custom task that does not work."""
    from gossamer.models import trial

    again = trial.build_again(task, seed, model)
    try:
        with task_errors():
            batch = next(task.batches(trial.STREAM))
    except TaskError as error:
        hint = "" if has_data else " (init tests the task on data: give --data, or --no-trial)"
        raise TaskError(f"{error}{hint}") from error
    with task_errors("the step that init tries"):
        trial.try_step(task, again, batch)


def describe(
    model: nn.Module,
    *,
    task: str = CUSTOM,
    options: Mapping[str, OptionValue] | None = None,
    averaging: str | Mapping[str, str] | None = None,
    **swarm: Unpack[Settings],
) -> Manifest:
    """The manifest of a swarm that trains this model in scripts, with `Peer.attach`.

    It describes what the model holds now: the names and shapes of its trainable parameters, and their values
    as the swarm's first. Write it with `write` and give the file to every node. A later call describes
    another swarm, since the time is part of the manifest, in whole seconds.

    Args:
        model: as the script builds it, wrapped or compiled or not, but before it is sharded.
        name: the swarm's name, for people.
        codec: how deltas are compressed: 'exact', 'int8', 'int4', 'int2', 'topk8', 'topk16' or 'topk'. By
            default each node uses the finest of 'int4' and the three last ones that its uplink carries.
        every_steps: inner steps between two deltas of the same fragment; by default the swarm sets them.
        every_seconds: seconds between them, instead of `every_steps`.
        fragments: how many parts the model is split into, which take turns; by default 4, or fewer if there
            are fewer tensors.
        averaging: rules ('rda', 'mean' or 'centered-clip') by tensor, where the default of `Task.averaging`
            does not suit; or one rule for all weight matrices ('centered-clip': for all tensors). Use 'mean'
            if the inner optimizer is Muon at a constant rate, or windows are short.
        samples: the size of the data set, if all nodes train on the same one: `Peer.shard` then draws each
            sample about once an epoch in the whole swarm.
        task: a name for what is trained, for people. Part of the swarm id, as `options` is.
        options: what else scripts should agree on.
        owners: public keys, 64 hex digits each, that may invite and revoke.
        invited: let in only those whom an owner has invited. Weights are then not capped, since members'
            machines may differ a thousandfold.

    Raises ConfigError: the model cannot be shared, or an argument does not fit it (the message says which).
    """
    tensors = _shareable_tensors(model)
    for_matrices, by_name = (averaging, {}) if isinstance(averaging, str) else ("rda", averaging or {})
    if unknown := set(by_name) - set(tensors):
        raise ConfigError(f"averaging names tensor {min(unknown)!r}, which the model does not train")
    rules = {**_rules(for_matrices, model, tensors), **by_name}
    return _describe(model, rules, {"name": task, "options": dict(options or {})}, **swarm)[0]


def _shareable_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors that a swarm of this model shares. Raises ConfigError if there are none, or some cannot be
    shared."""
    tensors = {name: parameter for name, parameter in parameters_of(model).items() if parameter.requires_grad}
    if len(tensors) > TENSORS_MAX:
        raise ConfigError(
            f"the model trains {len(tensors)} tensors, but a manifest lists {TENSORS_MAX} at most: stack"
            " small ones into larger ones, or freeze some"
        )
    check_shareable(tensors)
    if sharded := next((name for name, parameter in tensors.items() if is_sharded(parameter)), None):
        raise ConfigError(f"tensor {sharded!r} is sharded: describe the model before it is")
    return tensors


def _describe(
    model: nn.Module,
    rules: Mapping[str, str],
    task: Mapping[str, object],
    *,
    name: str,
    codec: str | None = None,
    every_steps: int | None = None,
    every_seconds: float = 0.0,
    fragments: int | None = None,
    owners: tuple[str, ...] = (),
    invited: bool = False,
    samples: int = 0,
    digest: str = "",
) -> tuple[Manifest, Ints]:
    """A manifest and Phi_0, from a model and its tensors' averaging rules."""
    if every_steps and every_seconds:
        raise ConfigError("every_steps and every_seconds both set the length of a window: give one of them")
    every_steps = every_steps or 0
    is_set_by_swarm = not (every_steps or every_seconds)
    specs = tuple(
        TensorSpec(tensor_name, tuple(parameter.shape), rules[tensor_name])
        for tensor_name, parameter in named_tensors(model)
    )
    if fragments is None:
        numel = sum(spec.numel for spec in specs)
        most = max(1, numel // FRAGMENT_NUMEL_MIN) if is_set_by_swarm else FRAGMENTS
        fragments = min(FRAGMENTS, most, len(specs))
    if not isinstance(fragments, int) or not 1 <= fragments <= FRAGMENTS_MAX:
        raise ConfigError(f"fragments must be 1 to {FRAGMENTS_MAX}, not {fragments!r}")
    phi = genesis.parameters(model, plan(specs, fragments))
    by_mean = all(spec.averaging == "mean" for spec in specs)
    names = (codec,) if codec else LADDER
    # One momentum is for all rungs. In windows of a fixed length it would harm the coarse ones.
    length = every_steps if codec or is_set_by_swarm else SHORT_WINDOW
    usual = {one: outer_defaults(one, by_mean=by_mean, every_steps=length) for one in names}
    momentum = max(settings.pop("momentum") for settings in usual.values())
    for one, settings in usual.items():
        if momentum and not CODECS[one].outer.momentum:  # as usual in short windows, where momentum has faded
            settings["learning_rate"] = round(settings["learning_rate"] / (1 + momentum), 2)
    values = {
        "swarm": {"name": name, "created": int(time.time())},
        "task": task,
        "outer": {
            "codecs": [{"name": one, **settings} for one, settings in usual.items()],
            "momentum": momentum,
            **(AMONG_FRIENDS if invited else AMONG_STRANGERS),
        },
        "pace": {"every_steps": every_steps, "every_seconds": every_seconds},
        "history": {
            "retain": RETAIN * fragments,
            "seal_after": WINDOWS_PER_EPOCH * fragments,
            "snapshot_every": WINDOWS_PER_EPOCH * fragments,
        },
        "data": {"samples": samples, "blocks": min(samples, BLOCKS_MAX), "digest": digest},
        "admission": {"mode": "invited" if invited else "open", "owners": owners},
        "layout": {"fragments": fragments, "tensors": specs},
        "genesis": {"digest": snapshots.digest(phi).hex()},
    }
    return from_values(values, "the new manifest"), phi


def _rules(for_matrices: str, model: nn.Module, tensors: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Every tensor's averaging rule, given that of weight matrices."""
    if for_matrices != "rda":
        return dict.fromkeys(tensors, for_matrices)
    return {name: default_averaging(model, parameter) for name, parameter in tensors.items()}


def write(manifest: Manifest, path: str | Path, *, replace: bool = False) -> None:
    """Write a manifest as TOML that a person can read and edit.

    A manifest is written once: without `replace`, raises ConfigError if the file there describes another
    swarm, or cannot be read (it may have an editing mistake). Raises StorageError if it cannot be written.
    """
    place = expanded(path)
    if not replace and place.is_file() and read_manifest(place).swarm_id != manifest.swarm_id:
        raise ConfigError(
            f"{path} is the manifest of another swarm: write it only once, then read it; to begin another"
            " swarm, remove it or choose another name"
        )
    keep(place, to_toml(manifest).encode(), mode=SHARED)
