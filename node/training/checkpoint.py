"""What only this node knows, kept across restarts: residuals, momenta, inner optimizer, data position.

Phi is the swarm's; all else that training needs is here. A checkpoint is one safetensors file, written while
training goes on (see `checkpointwriter`) and again when the node leaves. When one is read back, a fragment's
residual counts only if it belongs to the last delta that we published of it: what an older one holds has been
sent since. It carries a checksum, since a flipped bit in a momentum would make the node diverge at every
start.
"""

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.node.training.innerstate import DTYPES, dtypes, inner_state, kinds, options, restore_inner
from gossamer.node.training.outer import OuterLoop

VERSION = "2"
CHECKSUM = "crc32"

_NOT_AS_WRITTEN = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading JSON, and using what it holds, comes to where something else was written."""

log = logging.getLogger("gossamer.checkpoint")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this node has come over all its runs."""

    steps: int = 0
    """Inner steps, and so batches drawn."""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor of a checkpoint."""

    name: str
    tensor: Tensor
    fragment: int | None = None
    """The fragment whose residual or momentum it is."""
    parameter: int | None = None
    """The parameter whose inner state it is."""


class State:
    """What a checkpoint holds, and where in its file: a header, then the tensors one after another.

    See https://huggingface.co/docs/safetensors.
    """

    def __init__(self, tensors: Sequence[Saved], metadata: Mapping[str, str]) -> None:
        # The widest numbers first: then all lie at multiples of their size, as readers like them.
        self.tensors = sorted(tensors, key=lambda saved: -saved.tensor.itemsize)
        self.groups = _groups(tensors, self.tensors)
        """Indices of the tensors whose elements are copied together, the widest first: what is kept of one
        parameter's elements. Groups of one parameter or fragment stand one after another."""
        self._metadata = dict(metadata)
        ends = accumulate((saved.tensor.nbytes for saved in self.tensors), initial=0)
        self._offsets = list(ends)

    @classmethod
    def of(cls, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> "State":
        """The state as it is now; its tensors go on changing."""
        inner = inner_state(optimizers)
        tensors = [
            Saved(name, tensor, parameter=_parameter(name))
            for name, tensor in (inner.tensors.items() if inner else ())
        ]
        for index, state in enumerate(outer.fragments):
            for i, slot in enumerate(state.fragment.slots):
                tensors.append(Saved(f"residual/{slot.spec.name}", state.residual[i], index))
                tensors.append(Saved(f"momentum/{slot.spec.name}", state.momentum[i], index))
        metadata = {"version": VERSION}
        if inner and optimizers:
            metadata |= {"inner": json.dumps(inner.values), "optimizers": kinds(optimizers)}
            metadata |= {"options": options(optimizers), "dtypes": json.dumps(dtypes(optimizers))}
            if any(inner.learnt):
                metadata["learnt"] = json.dumps(inner.learnt)
        return cls(tensors, metadata)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self._offsets[-1]

    def offset(self, index: int, elements: int) -> int:
        """Where, counted from the first tensor, an element of a tensor stands."""
        return self._offsets[index] + elements * self.tensors[index].tensor.itemsize

    def header(self, progress: Progress, rounds: Sequence[int], checksums: Mapping[str, int]) -> bytes:
        """The header, JSON; `rounds` are those that the fragments' residuals belong to, `checksums` the
        CRC-32 of each tensor's bytes."""
        header: dict[str, Any] = {
            saved.name: {
                "dtype": DTYPES[saved.tensor.dtype],
                "shape": list(saved.tensor.shape),
                "data_offsets": [start, start + saved.tensor.nbytes],
            }
            for saved, start in zip(self.tensors, self._offsets, strict=False)
        }
        metadata = {
            "steps": str(progress.steps),
            "tokens": str(progress.tokens),
            "rounds": json.dumps(list(rounds)),
        }
        metadata |= self._metadata
        metadata[CHECKSUM] = checksum(checksums, metadata)
        return json.dumps({"__metadata__": metadata, **header}).encode()


def _parameter(name: str) -> int:
    """Of which parameter an inner tensor is, counted through all optimizers."""
    return int(name.split("/", 2)[1])


def _groups(tensors: Sequence[Saved], in_file: Sequence[Saved]) -> list[list[int]]:
    """Which tensors of a file to copy together, in the order of `tensors`."""
    places = {saved.name: place for place, saved in enumerate(in_file)}
    groups: dict[object, list[int]] = {}
    for saved in tensors:
        alike = (saved.parameter, saved.tensor.numel())
        groups.setdefault(saved.name if saved.parameter is None else alike, []).append(places[saved.name])
    return [sorted(group) for group in groups.values()]


def checksum(found: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """That of a checkpoint, from those of its tensors: against bad disks, since it is nobody's but ours."""
    whole = json.dumps([sorted(found.items()), sorted(metadata.items())])
    return f"{zlib.crc32(whole.encode()):08x}"


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes; they are on the CPU."""
    views = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: zlib.crc32(view.numpy().data) for name, view in views.items()}


def restore(
    path: Path, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, bool] | None:
    """Take up a checkpoint. The fragments' `last_published` must say what others have of us.

    Returns how far the node had come, and whether the inner optimizers go on from there (some cannot be
    saved, and others than those that were saved begin afresh). None, with nothing changed, if there is no
    checkpoint or it does not fit the model.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != VERSION:
                raise ValueError("another release wrote it")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if metadata.pop(CHECKSUM) != checksum(checksums_of(tensors), metadata):
            raise ValueError("it is damaged")
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            raise ValueError("it is of another model")
        is_ours = metadata.get("optimizers") == kinds(optimizers) and bool(optimizers)
        now = options(optimizers)
        if is_ours and metadata.get("options", now) != now:  # earlier releases do not say
            log.warning("the inner optimizer has other options than its saved state: it begins afresh")
            is_ours = False
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        learnt = json.loads(metadata.get("learnt", "[]"))
        if is_ours and len(learnt) not in (0, len(groups)):
            log.warning("the inner optimizer has other groups than its saved state: it begins afresh")
            is_ours = False
        # A state that diverged since the last delta would make the model diverge again, at any learning rate.
        has_inner = is_ours and all(
            map(_is_finite, (t for n, t in tensors.items() if n.startswith("inner/")))
        )
        has_inner = has_inner and all(isfinite(number) for numbers in learnt for number in numbers.values())
        if has_inner:
            trained_as = list(json.loads(metadata.get("dtypes", "[]")))  # earlier releases do not say
            has_inner = restore_inner(optimizers, tensors, json.loads(metadata["inner"]), trained_as)
        if has_inner:
            for group, numbers in zip(groups, learnt, strict=False):
                group.update(numbers)
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


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; those of a byte are taken to be, for torch cannot tell of all such dtypes."""
    return tensor.itemsize == 1 or bool(tensor.isfinite().all())


def _fits(outer: OuterLoop, tensors: dict[str, Tensor]) -> bool:
    return all(
        tensors[f"{kind}/{slot.spec.name}"].shape == state.residual[i].shape
        for state in outer.fragments
        for i, slot in enumerate(state.fragment.slots)
        for kind in ("residual", "momentum")
    )
