"""When to publish, and which round: the swarm's clock as one node sees it.

Nobody waits and nobody runs away: a fast node takes more steps per round, a slow one publishes shorter
windows, and one that cannot finish a step skips rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossamer.protocol.limits import CLOCK_SKEW_S, ROUND_SLACK
from gossamer.protocol.manifest import Manifest, PaceSection


def round_clock(rounds: Iterable[int], members: int = 0) -> int:
    """The highest round among live members, leaving out the top third (rounded down).

    So one liar cannot race the clock, and an isolated node still moves. 0 when there is nobody. `members`
    also counts those that have not told a round yet, so that a liar is left out even while few have.
    """
    return clock_among(sorted(rounds), members)


def clock_among(ascending: Sequence[int], members: int = 0) -> int:
    """`round_clock` of rounds that are sorted already."""
    last = len(ascending) - 1
    out = max(members, len(ascending)) // 3
    return ascending[max(last - out, 0)] if ascending else 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Decides at an inner step boundary whether a node publishes, and for which round."""

    section: PaceSection
    fragments: int

    def due(self, own_last: int, clock: int, steps: int, seconds: float) -> int | None:
        """Return the round to publish now, or None.

        `steps` and `seconds` count since this node's previous delta of any fragment: with F fragments a
        round is due F times in a window, so that fragments take turns instead of leaving all at once.
        """
        round_ = max(own_last + 1, clock)
        if steps < 1 or round_ > clock + 1:
            return None
        if clock >= round_:
            return round_
        # A node that opens a round keeps the minimum length, or rounds would outrun `is_plausible`.
        timely = seconds >= self.section.min_round_seconds
        return round_ if timely and self._filled(steps, seconds) else None

    def _filled(self, steps: int, seconds: float) -> bool:
        if self.section.every_steps:
            return steps * self.fragments >= self.section.every_steps
        return seconds * self.fragments >= self.section.every_seconds


def is_plausible(round_: int, manifest: Manifest, unix_s: float) -> bool:
    """Whether the swarm can have reached a round by this time, at the manifest's minimum round length."""
    age = unix_s - manifest.swarm.created + CLOCK_SKEW_S
    return round_ <= age / manifest.pace.min_round_seconds + ROUND_SLACK
