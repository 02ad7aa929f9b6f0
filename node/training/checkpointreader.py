"""Restores a checkpoint at the start.

A fragment's residual is used only if it belongs to the last delta that we published of that fragment: what an
older residual holds has been sent since. A checkpoint that is damaged, or belongs to something else, is left
alone. Everything then begins afresh, and the node logs it.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.node.training.checkpoint import CHECKSUM, VERSION, Progress, checksum, checksums_of
from gossamer.node.training.innerstate import (
    is_sound,
    kinds,
    names,
    options,
    restore_inner,
    state_keepers,
    take_up_learnt,
)
from gossamer.node.training.interrupts import held_back
from gossamer.node.training.outer import OuterLoop

_NOT_AS_WRITTEN = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors from reading JSON, or from using its content, when the file holds something else."""

_OTHER = "the inner optimizer has different {} than its saved state"

log = logging.getLogger("gossamer.checkpoint")


@held_back()  # a watchdog's error would be taken for one of the file's, or of the optimizer's
def restore(
    path: Path, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, bool] | None:
    """Restore a checkpoint. The fragments' `last_published` must already say what others have of us.

    Returns how far the node had come, and whether the inner optimizers resumed: some cannot be saved, and
    optimizers that differ from the saved ones begin afresh. Returns None, with nothing changed, if there is
    no checkpoint or it does not fit the model.
    """
    try:
        tensors, metadata = _read(path)
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            raise ValueError("it is from another model")
        has_inner = _take_up_inner(outer, optimizers, tensors, metadata)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, *_NOT_AS_WRITTEN) as error:
        log.warning("cannot use %s (%s): residuals, inner optimizer and data start afresh", path, error)
        return None
    for state, saved in zip(outer.fragments, rounds, strict=True):
        for i, slot in enumerate(state.fragment.slots):
            state.momentum[i].copy_(tensors[f"momentum/{slot.spec.name}"])
            if saved == state.last_published:
                state.residual[i].copy_(tensors[f"residual/{slot.spec.name}"])
    return progress, has_inner and progress.steps > 0  # before the first step, an optimizer is fresh


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole checkpoint's tensors and metadata. Raises OSError, SafetensorError, KeyError or ValueError."""
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = dict(file.metadata() or {})
        if metadata.get("version") != VERSION:
            raise ValueError("another release wrote it")
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if metadata.pop(CHECKSUM) != checksum(checksums_of(tensors), metadata):
        raise ValueError("it is damaged")
    return tensors, metadata


def _fits(outer: OuterLoop, tensors: Mapping[str, Tensor]) -> bool:
    return all(
        tensors[f"{kind}/{slot.spec.name}"].shape == state.residual[i].shape
        for state in outer.fragments
        for i, slot in enumerate(state.fragment.slots)
        for kind in ("residual", "momentum")
    )


def _take_up_inner(
    outer: OuterLoop,
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: dict[str, Tensor],
    metadata: Mapping[str, str],
) -> bool:
    """Restore the inner optimizers' state, if it fits them; returns whether it does.

    *Places* are the positions that the parameters had among those of the optimizers when they were saved.
    """
    keepers = state_keepers(optimizers)
    if not keepers or "optimizers" not in metadata:
        return False
    names_now = names(keepers, outer.names)
    names_then: list[list[str]] = json.loads(metadata["names"]) if "names" in metadata else names_now
    plain: dict[str, Any] = json.loads(metadata["inner"])
    keys = _keys(tensors, plain)
    learnt: list[dict[str, float]] = json.loads(metadata.get("learnt", "[]"))
    places = _places(list(chain(*names_then)), list(chain(*names_now)))
    if places is None:
        return _begins_afresh(_OTHER.format("parameters"))
    difference = _difference(keepers, places, metadata, around=optimizers)
    if difference is not None:
        has_state = bool(keys or learnt)  # without any, nothing is lost, and there is nothing to log
        return has_state and _begins_afresh(_OTHER.format(difference))
    groups = [group for keeper in keepers for group in keeper.param_groups]
    are_grouped_alike = [*map(sorted, names_then)] == [*map(sorted, names_now)]
    if learnt and not (len(learnt) == len(groups) and are_grouped_alike):
        return _begins_afresh(_OTHER.format("groups"))
    if _is_torn(keepers, places, keys):
        return _begins_afresh("the inner optimizer's saved state is torn")
    if not is_sound(tensors, learnt):
        return _begins_afresh("the inner optimizer's saved state is not finite")
    dtypes: list[str] = json.loads(metadata.get("dtypes", "[]"))
    trained_as = [dtypes[place] for place in places if place < len(dtypes)]
    if not restore_inner(keepers, tensors, plain, places, trained_as):
        return False
    take_up_learnt(keepers, learnt)
    return True


def _difference(
    keepers: Sequence[torch.optim.Optimizer],
    places: Sequence[int],
    metadata: Mapping[str, str],
    *,
    around: Sequence[torch.optim.Optimizer],
) -> str | None:
    """In what the optimizers differ from the saved ones, whose parameters stood at these places; None if in
    nothing."""
    kept, now = _each(json.loads(metadata["optimizers"])), [_each(kinds(keepers))]
    if "names" not in metadata:  # earlier releases wrote down the wrappers around the optimizers
        now.append(_each(kinds(around)))
    if len(kept) != len(places) or [kept[place] for place in places] not in now:
        return "classes or shapes"
    if "options" in metadata:
        decided: list[list[str]] = json.loads(metadata["options"])
        if [decided[place] for place in places] != options(keepers):
            return "options"
    return None


def _begins_afresh(why: str) -> Literal[False]:
    """Log why the inner optimizers do not resume; returns False, for that."""
    log.warning("%s: it starts afresh", why)
    return False


def _places(then: Sequence[str], now: Sequence[str]) -> list[int] | None:
    """Where each of `now` stood in `then`; None if the names differ. Equal names are taken in order."""
    stood, stand = (sorted(range(len(names)), key=names.__getitem__) for names in (then, now))
    if [then[place] for place in stood] != [now[place] for place in stand]:
        return None
    moved = dict(zip(stand, stood, strict=True))
    return [moved[place] for place in range(len(now))]


def _each(optimizers: Sequence[Sequence[Any]]) -> list[tuple[str, list[int]]]:
    """For each parameter, the class of its optimizer and its shape."""
    return [(kind, shape) for kind, shapes in optimizers for shape in shapes]


def _keys(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[int, set[str]]:
    """The keys of each parameter's saved state, by the place that the parameter had then."""
    keys: dict[int, set[str]] = {}
    for name in (*(name[len("inner/") :] for name in tensors if name.startswith("inner/")), *plain):
        index, key = name.split("/", 1)
        keys.setdefault(int(index), set()).add(key)
    return keys


def _is_torn(
    optimizers: Sequence[torch.optim.Optimizer], places: Sequence[int], keys: Mapping[int, set[str]]
) -> bool:
    """Whether the state was saved in the middle of a first step, as earlier releases could: it would end
    training at every start.

    In such a state, of two parameters in one group with equally many dimensions, one has only some of the
    other's keys. Some optimizers keep other keys for larger parameters, but not fewer.
    """
    place = iter(places)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        alike: dict[int, set[frozenset[str]]] = {}
        for parameter in group["params"]:
            if found := keys.get(next(place)):
                alike.setdefault(parameter.dim(), set()).add(frozenset(found))
        if any(one < other for kept in alike.values() for one in kept for other in kept):
            return True
    return False
