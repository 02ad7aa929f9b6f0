"""What only this node knows, kept across restarts: residuals, momenta, inner optimizer, data position.

Phi is the swarm's; a checkpoint holds everything else that training needs. It is one safetensors file,
written while training goes on (see `checkpointwriter`) and again when the node leaves, and read at the next
start (see `checkpointreader`). It carries a checksum, since a flipped bit in a momentum would make the node
diverge at every start.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.node.training.innerstate import (
    DTYPES,
    dtypes,
    inner_state,
    kinds,
    names,
    options,
    state_keepers,
)
from gossamer.node.training.outer import OuterLoop

VERSION = "2"
CHECKSUM = "crc32"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this node has come over all its runs."""

    steps: int = 0
    """Inner steps, which is also the number of batches drawn."""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor of a checkpoint."""

    name: str
    tensor: Tensor
    fragment: int | None = None
    """For a residual or a momentum: its fragment."""
    parameter: int | None = None
    """For an inner state: its parameter."""


class State:
    """What a checkpoint holds, and where in its file: a header, then the tensors one after another.

    See https://huggingface.co/docs/safetensors.
    """

    def __init__(self, tensors: Sequence[Saved], metadata: Mapping[str, str]) -> None:
        # The widest dtypes first: then every tensor is aligned to its item size, as readers prefer.
        self.tensors = sorted(tensors, key=lambda saved: -saved.tensor.itemsize)
        self.groups = _groups(tensors, self.tensors)
        """Indices of tensors whose elements are copied together, the widest first: an inner optimizer's
        tensors for one parameter. Groups of the same parameter or fragment follow each other."""
        self._metadata = dict(metadata)
        ends = accumulate((saved.tensor.nbytes for saved in self.tensors), initial=0)
        self._offsets = list(ends)

    @classmethod
    def of(cls, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> "State":
        """The current state. It refers to the live tensors, which go on changing."""
        keepers = state_keepers(optimizers)
        inner = inner_state(keepers) if keepers else None
        tensors = [
            Saved(name, tensor, parameter=_parameter(name))
            for name, tensor in (inner.tensors.items() if inner else ())
        ]
        for index, state in enumerate(outer.fragments):
            for i, slot in enumerate(state.fragment.slots):
                tensors.append(Saved(f"residual/{slot.spec.name}", state.residual[i], index))
                tensors.append(Saved(f"momentum/{slot.spec.name}", state.momentum[i], index))
        metadata = {"version": VERSION}
        if inner and keepers:
            metadata["inner"] = json.dumps(inner.values)
            metadata["optimizers"] = json.dumps(kinds(keepers))
            metadata["names"] = json.dumps(names(keepers, outer.names))
            metadata["options"] = json.dumps(options(keepers))
            metadata["dtypes"] = json.dumps(dtypes(keepers))
            if any(inner.learnt):
                metadata["learnt"] = json.dumps(inner.learnt)
        return cls(tensors, metadata)

    @property
    def has_inner(self) -> bool:
        """Whether the inner optimizers' state is in it."""
        return "inner" in self._metadata

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self._offsets[-1]

    def offset(self, index: int, elements: int) -> int:
        """Byte offset of an element of a tensor, counted from the first tensor."""
        return self._offsets[index] + elements * self.tensors[index].tensor.itemsize

    def header(self, progress: Progress, rounds: Sequence[int], checksums: Mapping[str, int]) -> bytes:
        """The header, JSON. `rounds` are the rounds to which the fragments' residuals belong, `checksums` the
        CRC-32 of each tensor's bytes."""
        metadata = self._with(progress, rounds)
        return self._header({**metadata, CHECKSUM: checksum(checksums, metadata)})

    def header_bytes(self, rounds: int) -> int:
        """The largest size of the header, with this number of rounds."""
        longest = self._with(Progress(2**63, 2**63), [2**63] * rounds)
        return len(self._header({**longest, CHECKSUM: checksum({}, {})}))

    def _with(self, progress: Progress, rounds: Sequence[int]) -> dict[str, str]:
        said = {
            "steps": str(progress.steps),
            "tokens": str(progress.tokens),
            "rounds": json.dumps(list(rounds)),
        }
        return said | self._metadata

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        return f'{{"__metadata__": {json.dumps(metadata)}, {self._entries}}}'.encode()

    @cached_property
    def _entries(self) -> str:
        """The header's entries for the tensors. Each is encoded by itself: one long call would hold up
        training."""
        return ", ".join(
            f"{json.dumps(saved.name)}: "
            + json.dumps(
                {
                    "dtype": DTYPES[saved.tensor.dtype],
                    "shape": list(saved.tensor.shape),
                    "data_offsets": [start, start + saved.tensor.nbytes],
                }
            )
            for saved, start in zip(self.tensors, self._offsets, strict=False)
        )


def _parameter(name: str) -> int:
    """The index of the parameter that an inner tensor belongs to, counted through all optimizers."""
    return int(name.split("/", 2)[1])


def _groups(tensors: Sequence[Saved], in_file: Sequence[Saved]) -> list[list[int]]:
    """Which tensors of a file to copy together, as indices into `in_file`; in the order of `tensors`."""
    places = {saved.name: place for place, saved in enumerate(in_file)}
    groups: dict[object, list[int]] = {}
    for saved in tensors:
        alike = (saved.parameter, saved.tensor.numel())
        groups.setdefault(saved.name if saved.parameter is None else alike, []).append(places[saved.name])
    return [sorted(group) for group in groups.values()]


def checksum(found: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """A checkpoint's checksum, from those of its tensors. It guards against bad disks, not against people."""
    whole = json.dumps([sorted(found.items()), sorted(metadata.items())])
    return f"{zlib.crc32(whole.encode()):08x}"


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes. The tensors are on the CPU."""
    views = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: zlib.crc32(view.numpy().data) for name, view in views.items()}
