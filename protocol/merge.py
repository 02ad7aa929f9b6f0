"""Merge: a round's records become one step of Phi (DESIGN, section 3).

A pure function of the *set* of contributions: they are sorted by author first, all scalar arithmetic is on
Python ints and IEEE doubles in that order, and arrays follow `rules.base`. Tensors are independent, so
callers may merge them in any order and on any number of threads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from gossamer.protocol.fixedpoint import Ints, norm
from gossamer.protocol.layout import Fragment
from gossamer.protocol.manifest import Outer
from gossamer.protocol.payload import Payload
from gossamer.protocol.rules import RULES, Deltas

CLIP_RECORDS_MIN = 3
"""With fewer, a median says nothing about who is the odd one out."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One valid record as Merge sees it.

    `tensor(i)` decodes the fragment's tensor `i`; `norms` are those of its tensors, see `norms_of`.
    """

    author: bytes
    tokens: int
    steps: int
    staleness: int
    norms: Sequence[float]
    tensor: Callable[[int], Ints]


def weight_of(tokens: int, steps: int, staleness: int, staleness_max: int) -> float:
    """``tokens * (tokens / steps) / sqrt(1 + staleness)``, 0 beyond `staleness_max`.

    Quantity times quality as in Decoupled DiLoCo; the decay of asynchronous local SGD (arXiv 2401.09135).
    Division and square root are correctly rounded everywhere, a general power is not.
    """
    if staleness > staleness_max:
        return 0.0
    return tokens * (tokens / steps) / sqrt(1 + staleness)


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def norms_of(payload: Payload) -> tuple[float, ...]:
    """Decode every tensor once: its norm, and the proof that the payload decodes.

    Raises PayloadError; such a record weighs nothing, on every node alike, since all hold the same bytes.
    """
    return tuple(norm(payload.tensor(index)) for index in range(payload.tensors))


class RoundMerge:
    """The merge of one round, ready to be carried out tensor by tensor."""

    def __init__(self, contributions: Iterable[Contribution], fragment: Fragment, outer: Outer) -> None:
        ordered = sorted(contributions, key=lambda c: c.author)
        weighed = [(weight_of(c.tokens, c.steps, c.staleness, outer.staleness_max), c) for c in ordered]
        self._counted = [(w, c) for w, c in weighed if w > 0.0]
        self._weights = [w for w, _ in self._counted]
        if outer.weight_cap and self._weights:
            cap = outer.weight_cap * median(self._weights)
            self._weights = [min(w, cap) for w in self._weights]
        self._fragment = fragment
        self._clip = outer.clip

    def tensor(self, index: int) -> Ints:
        """Merge the fragment's tensor `index`: int32[numel], to be subtracted from Phi."""
        slot = self._fragment.slots[index]
        if not self._counted:
            return np.zeros(slot.numel, dtype=np.int32)
        if len(self._counted) == 1:
            return self._counted[0][1].tensor(index)
        norms = [c.norms[index] for _, c in self._counted]
        deltas = Deltas(
            decode=lambda i: self._counted[i][1].tensor(index),
            weights=self._weights,
            norms=norms,
            shrink=self._shrink(norms),
        )
        return RULES[slot.spec.averaging](deltas)

    def _shrink(self, norms: list[float]) -> list[float]:
        """Factors that bring each norm down to `clip` times the median.

        Norms are compared per square root of steps: an honest fast machine's longer window must not look
        like an attack.
        """
        if not self._clip or len(norms) < CLIP_RECORDS_MIN:
            return [1.0] * len(norms)
        rates = [n / sqrt(c.steps) for n, (_, c) in zip(norms, self._counted, strict=True)]
        limit = self._clip * median(rates)
        return [limit / rate if rate > limit else 1.0 for rate in rates]


def merge_round(contributions: Iterable[Contribution], fragment: Fragment, outer: Outer) -> Ints:
    """Merge a whole round: int32[fragment.numel], to be subtracted from the fragment's Phi."""
    merge = RoundMerge(contributions, fragment, outer)
    result = np.empty(fragment.numel, dtype=np.int32)
    for index, slot in enumerate(fragment.slots):
        result[slot.span] = merge.tensor(index)
    return result
