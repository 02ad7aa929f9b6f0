"""How named tensors lie in Phi: which fragment each belongs to, and where it starts.

The model is split by tensor into `F` fragments of about equal size (Streaming DiLoCo, arXiv 2501.18512):
tensors go, largest first, into the fragment that is lightest so far. Every node computes the same split.
Within a fragment, tensors keep the order of the manifest. A snapshot is the fragments' int32 values, one
fragment after another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from math import prod
from typing import NamedTuple


class TensorSpec(NamedTuple):
    """One trainable tensor: its name, its shape and the rule by which its deltas are averaged."""

    name: str
    shape: tuple[int, ...]
    averaging: str

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in its fragment; `offset` and `numel` count elements."""

    spec: TensorSpec
    offset: int
    numel: int

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed subset of the tensors, merged together; `offset` is where it starts in a snapshot."""

    index: int
    slots: tuple[Slot, ...]
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments of a model. Build it with `plan`."""

    fragments: tuple[Fragment, ...]
    numel: int = field(init=False)
    payload_bytes: dict[str, tuple[int, ...]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """The fragments' payload lengths by codec, once computed: a cache for `payload.length_in`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", sum(fragment.numel for fragment in self.fragments))

    @property
    def snapshot_bytes(self) -> int:
        return 4 * self.numel

    def tensors(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Every tensor, with the slice of a snapshot's elements that belongs to it."""
        for fragment in self.fragments:
            for slot in fragment.slots:
                start = fragment.offset + slot.offset
                yield slot.spec, slice(start, start + slot.numel)

    def of_round(self, round_: int) -> Fragment:
        """The fragment that a round concerns."""
        return self.fragments[round_ % len(self.fragments)]

    def trained_tokens(self, delta_tokens: int) -> int:
        """Tokens that were trained on, if deltas of all fragments state `delta_tokens` together.

        An inner step moves all fragments, and the next delta of each states its tokens: `F` times in all.
        """
        return delta_tokens // len(self.fragments)


def plan(tensors: Sequence[TensorSpec], fragments: int) -> Layout:
    """Distribute `tensors` over `fragments`, balanced by element count; the same on every node."""
    loads = [(0, number) for number in range(fragments)]  # a heap
    chosen: list[list[int]] = [[] for _ in range(fragments)]
    for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i].numel, i)):
        load, lightest = loads[0]
        heapreplace(loads, (load + tensors[index].numel, lightest))
        chosen[lightest].append(index)
    built: list[Fragment] = []
    for number, members in enumerate(chosen):
        slots: list[Slot] = []
        offset = 0
        for index in sorted(members):
            slots.append(Slot(tensors[index], offset, tensors[index].numel))
            offset += tensors[index].numel
        start = built[-1].offset + built[-1].numel if built else 0
        built.append(Fragment(number, tuple(slots), start, offset))
    return Layout(tuple(built))
