"""What members' deltas have been like lately, and whose are bad often enough to say so.

The merge bounds what a bad delta can do; this module names the members that send them. It judges and never
acts: nothing here reaches Phi, so nodes may differ in it. The figures of each member's latest merged rounds
are kept. A *verdict* begins when half of these rounds are bad in one way, and ends when at most a quarter
are, so that its beginning and its end are announced once each.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import fsum
from statistics import median
from typing import NamedTuple

import numpy as np

from gossamer.protocol import limits
from gossamer.protocol.blocks import runs_in, size_of
from gossamer.protocol.merge.merge import RoundMerge, Sample
from gossamer.protocol.records import Delta

ROUNDS_KEPT = 20
"""How many rounds of a member are looked at: enough for shares to mean something, few enough to be recent."""

ROUNDS_MIN = 8
"""Fewer judged rounds than this say nothing: the first windows of a joiner or a resumed node are odd."""

BLAME_SHARE, PARDON_SHARE = 0.5, 0.25
"""Shares of bad rounds at which a verdict begins and ends. Apart, or it would come and go with each round."""

VOID_MIN = 2
"""Void rounds are evidence by themselves, whatever their share. The first one is not enough: a node whose
folder was restored from a backup equivocates once."""

CLIPPED_MIN = 1.5
"""A delta is called clipped if it was shortened by this factor or more, and is too long per step by as much,
too. A window twice as long makes a delta between 1.4 and 2 times as long. Clipping assumes 1.4, so that the
fastest honest members are clipped often (docs/benchmarks.md), but their length per step is below the
median."""

OPPOSED_BELOW = -0.1
"""A delta is opposed if its cosine with the others' sum is below this. Measured (docs/benchmarks.md): -0.02
for honest members in the worst single round, where each has a text of its own; -0.5 at most for deltas turned
around. Deltas that have nothing in common scatter around 0, by 1/256 and less."""

CAPPED_MIN = 100.0
"""A smaller factor may be a faster machine's, and so may a larger one: the verdict names both reasons."""

GREEDY_MIN = 8.0
"""All samples of a data set make about as many tokens. But a slow member may claim in one delta what it has
trained on for several."""

COMPARED_MIN = 3
"""Deltas needed to compare: if two point apart, nobody can tell which is opposed to the other."""

CANCELLED_BELOW = 0.01
"""If the others' directions add up to less than this part of one of them, they have none in common."""


class Figures(NamedTuple):
    """One member in one merged round."""

    void: bool = False
    """The member equivocated, or its payload does not decode."""
    stale: bool = False
    """Its delta was too old to weigh anything."""
    capped: float = 1.0
    """The factor by which its weight was cut."""
    clipped: float = 1.0
    """The factor by which its delta was shortened."""
    pace: float = 1.0
    """Its delta's length per inner step, relative to the round's median."""
    agreement: float | None = None
    """Cosine with the sum of the others' directions; None where fewer than 3 deltas could be compared."""
    greedy: bool = False
    """It claims far more of the data than its tokens make."""

    @property
    def is_overweight(self) -> bool:
        return self.capped >= CAPPED_MIN

    @property
    def is_clipped(self) -> bool:
        return min(self.clipped, self.pace) >= CLIPPED_MIN

    @property
    def is_opposed(self) -> bool:
        return self.agreement is not None and self.agreement < OPPOSED_BELOW


class RoundFigures(NamedTuple):
    """A merged round: its members' figures, and how much its deltas agree."""

    members: Mapping[bytes, Figures]
    agreement: float | None
    """Mean cosine of pairs of deltas; None with fewer than two."""


class Change(NamedTuple):
    """A verdict on a member began or changed, or (None) ended."""

    node_id: bytes
    verdict: str | None


class Summary(NamedTuple):
    """A member's figures over the rounds kept. Factors are means over the rounds in which they were not 1."""

    judged: int
    void: int
    stale: int
    capped: int
    cap_factor: float
    clipped: int
    clip_factor: float
    opposed: int
    agreement: float | None
    """Mean over the rounds in which it could be measured."""
    verdict: str | None


NOTHING_SENT = Summary(0, 0, 0, 0, 1.0, 0, 1.0, 0, None, None)


def figures(merge: RoundMerge, void: Iterable[bytes] = (), greedy: Collection[bytes] = ()) -> RoundFigures:
    """What a round's merge did to its members; `void` are authors whose payloads do not decode, `greedy`
    those of `greedy_in`."""
    agreements, overall = agreement({c.author: c.sample for c in merge.contributions if c.sample is not None})
    members = {author: Figures(void=True) for author in void}
    for author, treated in merge.treatment().items():
        members[author] = Figures(False, *treated, agreements.get(author), author in greedy)
    return RoundFigures(members, overall)


def greedy_in(deltas: Iterable[Delta]) -> set[bytes]:
    """Who claims far more blocks of the data for its tokens than others do in a round; nobody if fewer than 3
    claim any."""
    claimed = {d.author: size_of(runs_in(d.body.blocks)) / d.body.tokens for d in deltas if d.body.blocks}
    if len(claimed) < COMPARED_MIN:
        return set()
    usual = median(claimed.values())
    return {author for author, rate in claimed.items() if rate > GREEDY_MIN * usual}


def agreement(samples: Mapping[bytes, Sample]) -> tuple[dict[bytes, float], float | None]:
    """Each delta's cosine with the sum of the others' directions, and the mean cosine of pairs.

    Directions are summed, not deltas: each member has one vote, or the sender of the longest delta would be
    the standard for the others. The cosines are empty with fewer than 3 deltas that are not zero, the mean is
    None with fewer than 2.
    """
    lengths = {author: float(np.linalg.norm(sample)) for author, sample in samples.items()}
    units = {author: samples[author] / np.float32(n) for author, n in lengths.items() if n > 0.0}
    count = len(units)
    if count < 2:
        return {}, None
    total = np.zeros_like(next(iter(units.values())))
    for unit in units.values():
        total += unit
    squared = float(np.dot(total, total))
    overall = (squared - count) / (count * (count - 1))
    if count < COMPARED_MIN:
        return {}, overall
    cosines = {}
    for author, unit in units.items():
        along = float(np.dot(unit, total))
        others = max(0.0, squared - 2 * along + 1.0) ** 0.5
        cosines[author] = (along - 1.0) / others if others > CANCELLED_BELOW else 0.0
    return cosines, overall


class _Member:
    """One member's latest rounds, and what they come to."""

    def __init__(self) -> None:
        self.rounds: dict[int, Figures] = {}
        self.charges: frozenset[str] = frozenset()
        self.summary = NOTHING_SENT


class ContributionStats:
    """The figures of every member's latest rounds."""

    def __init__(self) -> None:
        self._members: dict[bytes, _Member] = {}
        """Those first of which nothing has come for longest."""
        self.agreement: float | None = None
        """Mean cosine of pairs of deltas in the newest round that had two."""
        self._newest = 0

    def note(self, round_: int, found: RoundFigures, equivocated: Iterable[bytes] = ()) -> list[Change]:
        """Take in a round that was merged, or merged again with other records, and the members void in it.

        Returns the changes of verdicts.
        """
        if found.agreement is not None and round_ >= self._newest:
            self._newest, self.agreement = round_, found.agreement
        members = {**found.members, **dict.fromkeys(equivocated, Figures(void=True))}
        changes = [self._note(author, round_, members[author]) for author in sorted(members)]
        return [change for change in changes if change is not None]

    def _note(self, author: bytes, round_: int, of_member: Figures) -> Change | None:
        member = self._members.pop(author, None) or _Member()
        if len(self._members) >= limits.MEMBERS_MAX:
            del self._members[next(iter(self._members))]
        self._members[author] = member
        member.rounds[round_] = of_member
        if len(member.rounds) > ROUNDS_KEPT:
            del member.rounds[min(member.rounds)]
        before, kept = member.charges, list(member.rounds.values())
        member.charges = _charges(kept, before)
        member.summary = _summary(kept, member.charges)
        return None if member.charges == before else Change(author, member.summary.verdict)

    def of(self, author: bytes) -> Summary:
        """A member's figures; zeros if it has sent nothing lately."""
        member = self._members.get(author)
        return member.summary if member is not None else NOTHING_SENT


class _Charge(NamedTuple):
    """A way in which a member's round can be bad."""

    is_bad: Callable[[Figures], bool]
    words: Callable[[str, Sequence[Figures]], str]
    """What a verdict says of it: "clipped in 18 of the last 20 rounds, by 9.8x on average"."""


_CHARGES = {
    "void": _Charge(lambda f: f.void, lambda where, _: f"void (equivocated, or cannot be decoded) {where}"),
    "stale": _Charge(lambda f: f.stale, lambda where, _: f"too late to count {where}"),
    "clipped": _Charge(
        lambda f: f.is_clipped,
        lambda where, bad: f"clipped {where}, by {_mean([f.clipped for f in bad]):.1f}x on average",
    ),
    "opposed": _Charge(lambda f: f.is_opposed, lambda where, _: f"opposed to the others {where}"),
    "greedy": _Charge(
        lambda f: f.greedy, lambda where, _: f"claimed more of the data than it can have trained on {where}"
    ),
    "overweight": _Charge(
        lambda f: f.is_overweight,
        lambda where, bad: (
            f"weight capped {where}, by {_mean([f.capped for f in bad]):,.0f}x on average: far faster, or"
            " overstating its tokens"
        ),
    ),
}
"""In the order in which a verdict names them."""


def _charges(rounds: Sequence[Figures], before: frozenset[str]) -> frozenset[str]:
    """The charges that stand now, given those that stood before."""
    bad = {name: sum(map(charge.is_bad, rounds)) for name, charge in _CHARGES.items()}
    return frozenset(name for name in bad if _stands(name, bad[name], len(rounds), name in before))


def _stands(name: str, bad: int, judged: int, stood: bool) -> bool:
    if name == "void":
        return bad >= (1 if stood else VOID_MIN)
    if stood:
        return bad > PARDON_SHARE * judged
    return judged >= ROUNDS_MIN and bad >= BLAME_SHARE * judged


def _summary(rounds: Sequence[Figures], charges: frozenset[str]) -> Summary:
    agreements = [f.agreement for f in rounds if f.agreement is not None]
    capped = [f.capped for f in rounds if f.capped > 1.0]
    clipped = [f.clipped for f in rounds if f.is_clipped]
    parts = []
    for name, charge in _CHARGES.items():
        if name in charges:
            bad = [figures for figures in rounds if charge.is_bad(figures)]
            parts.append(charge.words(f"in {len(bad)} of the last {len(rounds)} rounds", bad))
    return Summary(
        judged=len(rounds),
        void=sum(f.void for f in rounds),
        stale=sum(f.stale for f in rounds),
        capped=len(capped),
        cap_factor=_mean(capped) if capped else 1.0,
        clipped=len(clipped),
        clip_factor=_mean(clipped) if clipped else 1.0,
        opposed=sum(f.is_opposed for f in rounds),
        agreement=_mean(agreements) if agreements else None,
        verdict="; ".join(parts) or None,
    )


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
