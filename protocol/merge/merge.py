"""Merge: a round's records become one step of Phi.

The merge is a pure function of the *set* of contributions: they are sorted by author first, all scalar
arithmetic is on Python ints and IEEE doubles in that order, and arrays follow `rules.base`. Tensors are
independent, so callers may merge them in any order and on any number of threads.

**Tokens** of a set of deltas are what the swarm has trained on, for schedules and in claims.
Tokens are a claim like any other, and one liar could make any number of their sum, for good. So tokens count
as they weigh: not at all in a delta that is too stale to be merged, and where weights are capped, a member's
count for at most `weight_cap` times what is usual.

What is usual is taken over a *stretch* of rounds, from one round at which a snapshot is due to the next,
since in a single round a liar may be alone. Members are compared by their tokens per delta there, with one
vote each however often they published. A stretch is closed as a whole (see `closable_round`), and a
joiner begins at the start of one. So the count of a set is the same whatever part of it is closed, and that
of the closed part is just added.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import fsum, inf, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest, Outer
from gossamer.protocol.payloads import Fragment, Payload
from gossamer.protocol.records import Delta
from gossamer.protocol.rules import RULES, Deltas
from gossamer.protocol.rules.base import (
    PART,
    Step,
    Vector,
    ceiling,
    combine,
    median_low,
    no_step,
    scaled,
    shrink_to,
    usual_rates,
    whole,
)
from gossamer.protocol.sampling import EVERY_ROUND

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
    turn: int = EVERY_ROUND
    """How often the author contributes, see `sampling.is_drawn`."""


class Treatment(NamedTuple):
    """What a merge did to one contribution, as factors; all but `pace` are at least 1.0."""

    stale: bool
    """Whether the contribution was too old to weigh anything."""
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


TURN_TIMES = 2
"""How much more often than usual a member may contribute, at its full weight."""


def _turn_factors(turns: Sequence[int]) -> list[float]:
    """By what to multiply weights, so that nobody gains by stating that its turn comes more often.

    Honest members of a round state the same, but for those on two sides of a partition.
    """
    usual = median_low(turns) if turns else EVERY_ROUND
    return [min(1.0, TURN_TIMES * turn / usual) for turn in turns]


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
        factors = _turn_factors([c.turn for _, c in self._counted])
        self._weights = [min(w, cap) * factor for w, factor in zip(weights, factors, strict=True)]
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
        """The merged tensor part by part; parts that are not yielded are 0.

        A delta that leaves the tensor alone has no vote on it: its expert, head or layer had nothing to learn
        from, which says nothing against what others have learnt.
        """
        voters = [number for number, (_, c) in enumerate(self._counted) if c.norms[index] > 0.0]
        if not voters:
            return no_step()
        shrink = self._shrink(index)
        deltas = Deltas(
            vectors=[self._counted[number][1].tensor(index) for number in voters],
            weights=[self._weights[number] for number in voters],
            norms=[self._counted[number][1].norms[index] for number in voters],
            shrink=[shrink[number] for number in voters],
            root_steps=[self._root_steps[number] for number in voters],
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
        found = {c.author: Treatment(True, 1.0, 1.0, 1.0) for c in self._stale}
        for number, (weight, c) in enumerate(self._counted):
            left = sqrt(fsum((n * shrink[number]) ** 2 for n, shrink in zip(c.norms, by_tensor, strict=True)))
            found[c.author] = Treatment(
                stale=False,
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


USUAL_STRETCHES = 4
"""What is usual just now is the largest value of this many stretches: the newest has hardly begun."""


class _Stretch:
    """What the deltas of one stretch of rounds state."""

    def __init__(self) -> None:
        self.stated: dict[bytes, tuple[int, int]] = {}
        """The tokens of each member's deltas together, and the number of these deltas."""
        self.counted = 0

    def note(self, delta: Delta, sign: int) -> None:
        """A delta joins the stretch (`sign` 1), or leaves it (-1)."""
        tokens, deltas = self.stated.pop(delta.author, (0, 0))
        if deltas + sign:
            self.stated[delta.author] = tokens + sign * delta.body.tokens, deltas + sign

    def count(self, cap: float) -> int:
        """The tokens that count. Python integers and one IEEE multiplication per member."""
        most = ceiling([tokens // deltas for tokens, deltas in self.stated.values()], cap)
        return sum(int(min(tokens, most * deltas)) for tokens, deltas in self.stated.values())


class TokenCount:
    """The count of a set of deltas, kept up to date while the set changes.

    `total` depends on nothing but the set, which never holds two deltas of one author for one round.
    """

    def __init__(self, manifest: Manifest, deltas: Iterable[Delta] = ()) -> None:
        self._outer = manifest.outer
        self._fragments = manifest.layout.fragments
        self._every = manifest.history.snapshot_every
        self._stretches: dict[int, _Stretch] = {}
        self.total = 0
        self.change((), deltas)

    def stretch_of(self, round_: int) -> int:
        """The number of the stretch that a round belongs to. The first one begins with round 1."""
        return (round_ - 1) // self._every

    def change(self, old: Iterable[Delta], new: Iterable[Delta]) -> None:
        """Remove the deltas `old` from the set, and add `new`."""
        touched = set()
        for deltas, sign in ((old, -1), (new, 1)):
            for delta in filter(self._weighs, deltas):
                number = self.stretch_of(delta.round)
                self._stretches.setdefault(number, _Stretch()).note(delta, sign)
                touched.add(number)
        total = self.total
        for number in touched:
            stretch = self._stretches[number]
            before, stretch.counted = stretch.counted, stretch.count(self._outer.weight_cap)
            total += stretch.counted - before
            if not stretch.stated:
                del self._stretches[number]
        self.total = total  # at once: others read it while a merge is under way

    def usual(self, but: Collection[bytes]) -> float:
        """Tokens that the median member outside `but` states per delta lately; infinite if there is none."""
        found = []
        for number in nlargest(USUAL_STRETCHES, self._stretches):
            stated = self._stretches[number].stated.items()
            means = [tokens // deltas for author, (tokens, deltas) in stated if author not in but]
            found += [median_low(means)] if means else []
        return max(found, default=inf)

    def _weighs(self, delta: Delta) -> bool:
        """Whether a merge gives a delta any weight, provided that its payload decodes."""
        body, staleness = delta.body, delta.staleness(self._fragments)
        return weight_of(body.tokens, body.steps, staleness, self._outer.staleness_max) > 0.0


# --- Which deltas are outliers: far longer, or of far more tokens, than was usual lately.
#
# The only consequence is that an outlier's round waits for others' deltas (see `merge.schedule`), beside
# which it can be clipped and capped. So a node judges by what it has merged itself, and nodes may differ.

OUTLIER_TIMES = 8.0
"""A delta this many times as long as usual, or of this many times the usual tokens, is an outlier. Honest
deltas grow by less from round to round; one that grows by more only has to wait."""

USUAL_ROUNDS = 8
"""The usual length is the longest of this many rounds: the delta of a tensor with a single element is 8 times
as long as the one before it in a twelfth of all rounds, because that one was near zero."""


class UsualRates:
    """The lengths of the deltas of each fragment's last rounds, per square root of their inner steps."""

    def __init__(self, own_id: bytes) -> None:
        self._own_id = own_id
        self._rates: dict[int, dict[int, list[float]]] = {}
        """By fragment and by round merged: the usual rate of each tensor (see `rules.base`)."""

    def note(self, round_: int, fragment: Fragment, contributions: Sequence[Contribution]) -> None:
        """A round has been merged from these deltas. A single delta counts as usual only if it is our own."""
        if not contributions or (len(contributions) == 1 and contributions[0].author != self._own_id):
            return
        root_steps = [sqrt(c.steps) for c in contributions]
        norms = [c.norms for c in contributions]
        rates = self._rates.setdefault(fragment.index, {})
        if len(contributions) == 1:
            rates[round_] = [norm / root_steps[0] for norm in norms[0]]
        else:
            rates[round_] = usual_rates(norms, [slot.numel for slot in fragment.slots], root_steps)
        if len(rates) > USUAL_ROUNDS:
            del rates[min(rates)]

    def are_known(self, fragment: Fragment) -> bool:
        """Whether any round of a fragment has shown its usual rates."""
        return fragment.index in self._rates

    def are_all_exceeded(self, fragment: Fragment, contributions: Sequence[Contribution]) -> bool:
        """Whether each of these deltas has a tensor that is far longer than usual. See `are_known` first."""
        rates = self._rates[fragment.index]
        usual = [
            max((rate for rate in known if 0.0 < rate < inf), default=inf)
            for known in zip(*rates.values(), strict=True)
        ]
        return all(
            any(n > OUTLIER_TIMES * rate * sqrt(c.steps) for n, rate in zip(c.norms, usual, strict=True))
            for c in contributions
        )


def of_ordinary_tokens(deltas: tuple[Delta, ...], count: TokenCount) -> tuple[Delta, ...]:
    """The deltas that do not state far more tokens than the deltas of others did lately."""
    most = OUTLIER_TIMES * count.usual(but={delta.author for delta in deltas})
    return tuple(delta for delta in deltas if delta.body.tokens <= most)
