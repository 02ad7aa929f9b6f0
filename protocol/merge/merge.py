"""Merge: a round's records become one step of Phi.

The merge is a pure function of the *set* of contributions: they are sorted by author first, all scalar
arithmetic is on Python ints and IEEE doubles in that order, and arrays follow `rules.base`. Tensors are
independent, so callers may merge them in any order and on any number of threads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum, inf, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Outer
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.payloads.payload import Payload
from gossamer.protocol.rules import RULES, Deltas
from gossamer.protocol.rules.base import PART, Step, Vector, combine, no_step, scaled, whole
from gossamer.protocol.rules.clipping import ceiling, median_low, shrink_to, usual_rates

Sample = npt.NDArray[np.float32]

SAMPLE_MAX = 1 << 16
"""Elements of a delta that are kept to compare it with others: cosines of samples of dense deltas scatter by
1/256. Exact cosines would cost one more pass over every delta, where a merge takes only two."""


class Measures(NamedTuple):
    """What is remembered of a payload that has been decoded once."""

    norms: tuple[float, ...]
    """The norm of each tensor."""
    sample: Sample
    """Evenly spaced elements of the whole delta: float32[up to SAMPLE_MAX]."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One valid record as Merge sees it.

    `tensor(i)` reads the fragment's tensor `i`. `norms` are the norms of its tensors, and `sample` is some of
    its elements (see `measure`). The sample has no influence on the merge.
    """

    author: bytes
    tokens: int
    steps: int
    staleness: int
    norms: Sequence[float]
    tensor: Callable[[int], Vector]
    sample: Sample | None = None


class Treatment(NamedTuple):
    """What a merge did to one contribution, as factors; all but `pace` are at least 1.0."""

    weighed: bool
    """Whether the contribution counted at all; false if it was too stale."""
    capped: float
    """The factor by which its weight was cut."""
    clipped: float
    """The factor by which clipping shortened it, all tensors together."""
    pace: float
    """Its length per inner step, relative to the round's median."""


def weight_of(tokens: int, steps: int, staleness: int, staleness_max: int) -> float:
    """``tokens * (tokens / steps) / sqrt(1 + staleness)``, 0 beyond `staleness_max`.

    Quantity times quality as in Decoupled DiLoCo, with the staleness decay of asynchronous local SGD (arXiv
    2401.09135). Division and square root are correctly rounded everywhere; a general power is not.
    """
    if staleness > staleness_max:
        return 0.0
    return tokens * (tokens / steps) / sqrt(1 + staleness)


def measure(payload: Payload) -> Measures:
    """Decode every tensor once: norms, a sample, and the proof that the payload decodes.

    Raises PayloadError if not. Such a record weighs nothing, on every node alike: all hold the same bytes.
    """
    norms, picked = [], []
    # Odd: otherwise it would always fall on the same columns of matrices whose width is a power of two.
    stride = -(-payload.numel // SAMPLE_MAX) | 1
    offset = 0
    for index in range(payload.tensors):
        section, squares = payload.section(index), 0
        for start in range(0, section.numel, PART):
            stop = min(start + PART, section.numel)
            found = section.survey(start, stop, slice(-(offset + start) % stride, None, stride))
            squares += found.squares
            picked.append(found.sample)
        norms.append(sqrt(squares))
        offset += section.numel
    return Measures(tuple(norms), np.concatenate(picked).astype(np.float32))


def _root_steps(steps: Sequence[int], weight_cap: float) -> list[float]:
    """Square roots of the steps, to compare lengths by.

    Steps are only claimed, like tokens, and are bounded alike: where weights are capped, steps beyond
    `weight_cap` times the median excuse no greater length. Otherwise anybody could state 2**24 steps, and
    have a delta of a thousand times the usual length pass unclipped.
    """
    most = ceiling(steps, weight_cap)
    return [sqrt(min(s, most)) for s in steps]


class RoundMerge:
    """The merge of one round, ready to be carried out tensor by tensor."""

    def __init__(self, contributions: Iterable[Contribution], fragment: Fragment, outer: Outer) -> None:
        ordered = sorted(contributions, key=lambda c: c.author)
        weighed = [(weight_of(c.tokens, c.steps, c.staleness, outer.staleness_max), c) for c in ordered]
        self._stale = [c for w, c in weighed if w == 0.0]
        self._counted = [(w, c) for w, c in weighed if w > 0.0]
        weights = [w for w, _ in self._counted]
        cap = ceiling(weights, outer.weight_cap)
        self._weights = [min(w, cap) for w in weights]
        self._root_steps = _root_steps([c.steps for _, c in self._counted], outer.weight_cap)
        sizes = [slot.numel for slot in fragment.slots]
        self._usual = usual_rates([c.norms for c in self.contributions], sizes, self._root_steps)
        self._fragment = fragment
        self._clip = outer.clip

    def tensor(self, index: int) -> Ints:
        """Merge the fragment's tensor `index`: int32[numel], to be subtracted from Phi."""
        return whole(self._steps(index), self._fragment.slots[index].numel)

    def subtract(self, index: int, view: Ints, *, back: bool = False) -> None:
        """Subtract what `tensor` gives from that tensor of Phi, int32[numel], or add it `back`.

        It goes part by part, in little memory. Nothing is raised on the way: every payload has been measured.
        """
        for step in self._steps(index):
            step.add_to(view, 1 if back else -1)

    def _steps(self, index: int) -> Iterator[Step]:
        """The merged tensor part by part; parts that are not yielded are 0."""
        if not self._counted:
            return no_step()
        norms = [c.norms[index] for _, c in self._counted]
        deltas = Deltas(
            vectors=[c.tensor(index) for _, c in self._counted],
            weights=self._weights,
            norms=norms,
            shrink=self._shrink(index),
            root_steps=self._root_steps,
            usual=self._usual[index],
        )
        if len(self._counted) == 1:
            return scaled(combine(deltas, [1]), 1.0)
        return RULES[self._fragment.slots[index].spec.averaging](deltas)

    @property
    def contributions(self) -> list[Contribution]:
        """The deltas that count, in order of author."""
        return [c for _, c in self._counted]

    def treatment(self) -> dict[bytes, Treatment]:
        """What the merge does to every contribution, by author."""
        slots = range(len(self._fragment.slots))
        by_tensor = [self._shrink(index) for index in slots]
        lengths = [sqrt(fsum(n * n for n in c.norms)) for c in self.contributions]
        paces = [length / c.steps for length, c in zip(lengths, self.contributions, strict=True)]
        usual = median_low(paces) if paces else 0.0
        found = {c.author: Treatment(False, 1.0, 1.0, 1.0) for c in self._stale}
        for number, (weight, c) in enumerate(self._counted):
            left = sqrt(fsum((n * shrink[number]) ** 2 for n, shrink in zip(c.norms, by_tensor, strict=True)))
            found[c.author] = Treatment(
                weighed=True,
                capped=weight / self._weights[number],
                clipped=lengths[number] / left if left > 0.0 else 1.0,
                pace=paces[number] / usual if usual > 0.0 else 1.0,
            )
        return found

    def _shrink(self, index: int) -> list[float]:
        """Factors by which clipping shortens each delta of tensor `index`."""
        limit = self._clip * self._usual[index] if self._clip else inf
        return shrink_to(limit, [c.norms[index] for _, c in self._counted], self._root_steps)


def merge_round(contributions: Iterable[Contribution], fragment: Fragment, outer: Outer) -> Ints:
    """Merge a whole round: int32[fragment.numel], to be subtracted from the fragment's Phi."""
    merge = RoundMerge(contributions, fragment, outer)
    result = np.empty(fragment.numel, dtype=np.int32)
    for index, slot in enumerate(fragment.slots):
        result[slot.span] = merge.tensor(index)
    return result
