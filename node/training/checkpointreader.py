"""Taking up a checkpoint at the start.

A fragment's residual counts only if it belongs to the last delta that we published of it: what an older one
holds has been sent since. A checkpoint that is damaged, or of something else, is left alone: all begins
afresh then, and the node says so.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.node.training.checkpoint import CHECKSUM, VERSION, Progress, checksum, checksums_of
from gossamer.node.training.innerstate import kinds, options, restore_inner
from gossamer.node.training.outer import OuterLoop

_NOT_AS_WRITTEN = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading JSON, and using what it holds, comes to where something else was written."""

log = logging.getLogger("gossamer.checkpoint")


def restore(
    path: Path, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, bool] | None:
    """Take up a checkpoint. The fragments' `last_published` must say what others have of us.

    Returns how far the node had come, and whether the inner optimizers go on from there (some cannot be
    saved, and others than those that were saved begin afresh). None, with nothing changed, if there is no
    checkpoint or it does not fit the model.
    """
    try:
        tensors, metadata = _read(path)
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            raise ValueError("it is of another model")
        has_inner = _take_up_inner(optimizers, tensors, metadata)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, *_NOT_AS_WRITTEN) as error:
        log.warning("cannot use %s (%s): residuals and inner optimizer begin afresh", path, error)
        return None
    for state, saved in zip(outer.fragments, rounds, strict=True):
        for i, slot in enumerate(state.fragment.slots):
            state.momentum[i].copy_(tensors[f"momentum/{slot.spec.name}"])
            if saved == state.last_published:
                state.residual[i].copy_(tensors[f"residual/{slot.spec.name}"])
    return progress, has_inner


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
    optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor], metadata: Mapping[str, str]
) -> bool:
    """Have the inner optimizers go on where they were, if they can; returns whether they do."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    learnt: list[dict[str, float]] = json.loads(metadata.get("learnt", "[]"))
    if not optimizers or metadata.get("optimizers") != kinds(optimizers):
        return False
    now = options(optimizers)
    if metadata.get("options", now) != now:  # earlier releases do not say
        log.warning("the inner optimizer has other options than its saved state: it begins afresh")
        return False
    if len(learnt) not in (0, len(groups)):
        log.warning("the inner optimizer has other groups than its saved state: it begins afresh")
        return False
    if not _is_sound(tensors, learnt):
        return False
    trained_as = list(json.loads(metadata.get("dtypes", "[]")))  # earlier releases do not say
    if not restore_inner(optimizers, tensors, json.loads(metadata["inner"]), trained_as):
        return False
    for group, numbers in zip(groups, learnt, strict=False):
        group.update(numbers)
    return True


def _is_sound(tensors: Mapping[str, Tensor], learnt: Sequence[Mapping[str, float]]) -> bool:
    """Whether the inner state is finite.

    One that diverged since the last delta would make the model diverge again, at any learning rate.
    """
    inner = (tensor for name, tensor in tensors.items() if name.startswith("inner/"))
    numbers = (number for numbers in learnt for number in numbers.values())
    return all(map(_is_finite, inner)) and all(map(isfinite, numbers))


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; those of a byte are taken to be, for torch cannot tell of all such dtypes."""
    return tensor.itemsize == 1 or bool(tensor.isfinite().all())
