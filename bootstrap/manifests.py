"""Writes manifests: builds a task's model once, and writes down everything that nodes must agree on."""

import time
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.bootstrap.defaults import (
    AMONG_FRIENDS,
    AMONG_STRANGERS,
    EVERY_STEPS,
    FRAGMENTS,
    RETAIN,
    outer_defaults,
)
from gossamer.bootstrap.manifest_toml import to_toml
from gossamer.models.errors import TaskError
from gossamer.models.registry import OptionValue
from gossamer.models.task_file import kind_of
from gossamer.node.given import read_manifest
from gossamer.node.phi import snapshots
from gossamer.node.storage.placing import put
from gossamer.node.tilde import expanded
from gossamer.node.training import genesis
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.limits import TENSORS_MAX
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads.layout import TensorSpec, plan

if TYPE_CHECKING:
    from torch import nn

    from gossamer.models.task import Task

CUSTOM = "custom"
"""The task of a swarm that is trained by people's own scripts."""


def create(
    *,
    name: str,
    task: str,
    options: Mapping[str, OptionValue],
    codec: str,
    every_steps: int | None,
    every_seconds: float,
    fragments: int | None = None,
    seed: int,
    averaging: str | None = None,
    owners: tuple[str, ...] = (),
    invited: bool = False,
    settings: Sequence[str] = (),
    weights: Path | None = None,
    data: Sequence[Path] = (),
    trial: bool = True,
) -> tuple[Manifest, Ints]:
    """Build the task's model from `seed` and describe the swarm that trains it.

    `task` is named by a person at this machine: a task that comes with Gossamer, or ``FILE.py:CLASS``. That
    file is run and, with `trial`, tried out for one step on `data`. `settings` are further options, as on a
    command line (``key=value``). `weights` holds first parameters in place of those that follow from the seed
    (see `weights.load_weights`).

    `averaging` is the rule for weight matrices, whatever the task says; None leaves it to the task. Vectors
    and embeddings get `mean`, except that `centered-clip` applies to all tensors: a defence with a gap is
    none. `owners` are public keys in hex. `invited` lets in only those whom they invite; weights are then not
    capped, since members' machines may differ a thousandfold.

    Returns the manifest and Phi_0, int32[numel]. Raises ConfigError.
    """
    here = [path.absolute() for path in data]
    try:
        # A custom task may change the working directory, as scripts do to find their data; we restore it.
        with chdir("."):
            kind = kind_of(task)
            resolved = kind.resolve({**options, **kind.read(settings)})
            built = kind.task(resolved, here)
            model = built.build_model(seed)
            if kind.source and trial:
                _try_out(built, seed, model, has_data=bool(here))
            from gossamer.models.task import embeddings_known

            tensors = _shareable_tensors(model)
            with embeddings_known(model):
                by_task = {key: built.averaging(model, key, parameter) for key, parameter in tensors.items()}
    except TaskError as error:
        raise ConfigError(str(error)) from error
    _check_fragments("--fragments", fragments, len(tensors))
    if weights is not None:
        from gossamer.bootstrap.weights import load_weights

        load_weights(model, weights)
    return _describe(
        model,
        _rules(averaging, model, tensors) if averaging else by_task,
        {"name": kind.name, "seed": seed, "source": kind.source, "options": resolved},
        name=name,
        codec=codec,
        every_steps=every_steps,
        every_seconds=every_seconds,
        fragments=fragments,
        owners=owners,
        invited=invited,
    )


def _try_out(task: "Task", seed: int, model: "nn.Module", *, has_data: bool) -> None:
    """Raise TaskError for the first thing in a custom task that does not work."""
    from gossamer.models import checking

    again = checking.build_again(task, seed, model)
    try:
        batch = checking.first_batch(task)
    except TaskError as error:
        if has_data:
            raise
        raise TaskError(f"{error} (init tests the task on data: give --data, or --no-trial)") from error
    checking.try_step(task, again, batch)


def describe(
    model: "nn.Module",
    *,
    name: str,
    codec: str = "int4",
    every_steps: int | None = None,
    every_seconds: float = 0.0,
    fragments: int | None = None,
    averaging: str | Mapping[str, str] | None = None,
    task: str = CUSTOM,
    options: Mapping[str, OptionValue] | None = None,
    owners: tuple[str, ...] = (),
    invited: bool = False,
) -> Manifest:
    """The manifest of a swarm that trains this model in scripts, with `Peer.attach`.

    It describes what the model holds now: the names and shapes of its trainable parameters, and their values
    as the swarm's first. Write it with `write` and give the file to every node. A later call describes
    another swarm, since the time is part of the manifest, in whole seconds.

    Args:
        model: as the script builds it, wrapped or compiled or not, but before it is sharded.
        name: the swarm's name, for people.
        codec: how deltas are compressed: 'exact', 'int8', 'int4', 'int2' or 'topk'.
        every_steps: inner steps between two deltas of the same fragment; by default 30.
        every_seconds: seconds between them, instead of `every_steps`.
        fragments: how many parts the model is split into, which take turns; by default 4, or fewer if there
            are fewer tensors.
        averaging: rules ('rda', 'mean' or 'centered-clip') by tensor, where the default of `Task.averaging`
            does not suit; or one rule for all weight matrices ('centered-clip': for all tensors). Use 'mean'
            if the inner optimizer is Muon at a constant rate.
        task: a name for what is trained, for people. Part of the swarm id, as `options` is.
        options: what else scripts should agree on.
        owners: public keys, 64 hex digits each, that may invite and revoke.
        invited: let in only those whom an owner has invited.

    Raises ConfigError: the model cannot be shared, or an argument does not fit it (the message says which).
    """
    tensors = _shareable_tensors(model)
    if not isinstance(options, Mapping | None):
        raise ConfigError(f"options is {options!r:.60}: give a dict of what the scripts must agree on")
    if not isinstance(averaging, str | Mapping | None):
        raise ConfigError(
            f"averaging is {averaging!r:.60}: give one rule for all matrices, or a dict of rules"
        )
    for_matrices, by_name = (averaging, {}) if isinstance(averaging, str) else ("rda", averaging or {})
    unknown = set(by_name) - set(tensors)
    if unknown:
        raise ConfigError(f"averaging names tensor {min(unknown)!r}, which the model does not train")
    _check_fragments("fragments", fragments, len(tensors))
    manifest, _ = _describe(
        model,
        {**_rules(for_matrices, model, tensors), **by_name},
        {"name": task, "options": dict(options or {})},
        name=name,
        codec=codec,
        every_steps=every_steps,
        every_seconds=every_seconds,
        fragments=fragments,
        owners=owners,
        invited=invited,
    )
    return manifest


def _shareable_tensors(model: "nn.Module") -> "dict[str, nn.Parameter]":
    """The tensors that a swarm of this model shares. Raises ConfigError if there are none, or some cannot be
    shared."""
    from gossamer.node.training.parameters import (  # torch: not for a bootstrap peer
        check_shareable,
        parameters_of,
    )
    from gossamer.node.training.sharding import is_sharded

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


def _pace(every_steps: int | None, every_seconds: float) -> dict[str, object]:
    """The length of windows; by default 30 steps. Raises ConfigError."""
    if every_steps and every_seconds:
        raise ConfigError("every_steps and every_seconds both set the length of a window: give one of them")
    if every_steps is None:
        every_steps = 0 if every_seconds else EVERY_STEPS
    return {"every_steps": every_steps, "every_seconds": every_seconds}


def _check_fragments(argument: str, fragments: int | None, tensors: int) -> None:
    """Raise ConfigError for an impossible number; `argument` is its name for the person."""
    if fragments is None:
        return
    if not isinstance(fragments, int) or not 1 <= fragments <= tensors:
        raise ConfigError(f"{argument} must be 1 to {tensors}, the number of tensors, not {fragments!r}")


def _describe(
    model: "nn.Module",
    rules: Mapping[str, str],
    task: Mapping[str, object],
    *,
    name: str,
    codec: str,
    every_steps: int | None,
    every_seconds: float,
    fragments: int | None,
    owners: tuple[str, ...],
    invited: bool,
) -> tuple[Manifest, Ints]:
    """A manifest and Phi_0, from a model and its tensors' averaging rules."""
    from gossamer.models.task import named_tensors

    specs = tuple(
        TensorSpec(tensor_name, tuple(parameter.shape), rules[tensor_name])
        for tensor_name, parameter in named_tensors(model)
    )
    if fragments is None:
        fragments = min(FRAGMENTS, len(specs))
    phi = genesis.parameters(model, plan(specs, fragments))
    by_mean = all(spec.averaging == "mean" for spec in specs)
    usual = outer_defaults(codec, by_mean=by_mean)
    values = {
        "swarm": {"name": name, "created": int(time.time())},
        "task": task,
        "outer": {"codec": codec, **usual, **(AMONG_FRIENDS if invited else AMONG_STRANGERS)},
        "pace": _pace(every_steps, every_seconds),
        "history": {"retain": RETAIN * fragments},
        "admission": {"mode": "invited" if invited else "open", "owners": owners},
        "layout": {"fragments": fragments, "tensors": specs},
        "genesis": {"digest": snapshots.digest(phi).hex()},
    }
    return from_values(values, "the new manifest"), phi


def _rules(for_matrices: str, model: "nn.Module", tensors: "Mapping[str, nn.Parameter]") -> dict[str, str]:
    """Every tensor's averaging rule, given that of weight matrices."""
    from gossamer.models.task import default_averaging, embeddings_known

    if for_matrices != "rda":
        return dict.fromkeys(tensors, for_matrices)
    with embeddings_known(model):
        return {name: default_averaging(model, parameter) for name, parameter in tensors.items()}


def write(manifest: Manifest, path: str | Path, *, replace: bool = False) -> None:
    """Write a manifest as TOML that a person can read and edit.

    A manifest is written once: without `replace`, raises ConfigError if the file there describes another
    swarm. Raises StorageError if it cannot be written.
    """
    place = expanded(Path(path))
    try:
        if not replace:
            _check_of_no_other_swarm(place, manifest)
        put(place, to_toml(manifest).encode())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _check_of_no_other_swarm(path: Path, manifest: Manifest) -> None:
    """Raise ConfigError for a file with another swarm's manifest, which some nodes may have already.

    Also for a file that cannot be read: it may be a manifest with an editing mistake.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        known = read_manifest(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; correct it, remove it, or choose another name") from None
    if known.swarm_id != manifest.swarm_id:
        ours, theirs = known.swarm_id.hex()[:12], manifest.swarm_id.hex()[:12]
        raise ConfigError(
            f"{path} is the manifest of swarm {ours}, and that of swarm {theirs} would replace it: write it"
            " only once, then read it; to begin another swarm, remove it or choose another name"
        )


def read(path: str | Path) -> Manifest:
    """Read a manifest that a person has written or edited. Raises ConfigError."""
    return read_manifest(expanded(Path(path)))
