"""Rounds that wait for others' deltas before they are merged.

A delta far longer than usual, or of far more tokens, may be a liar's, and it can be clipped and capped only
beside deltas of others. So a round with too few deltas waits until others have published for it, or the swarm
has gone past it, or they have had enough time to publish.
"""

from collections import deque
from statistics import median

HELD_BACK_ROUNDS = 2
HELD_BACK_MIN_S = 5.0
"""A round is held back for as long as two of the last rounds took, and at least for this long. By then all
members that are going to publish have done so; where training has ended, none will."""

PACE_ROUNDS = 8


class HeldBack:
    """Which rounds wait, and until when."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._pace: deque[float] = deque(maxlen=PACE_ROUNDS)
        """Seconds that the swarm's last rounds took."""
        self._clock, self._clock_moved_at = 0, 0.0

    def __bool__(self) -> bool:
        """Whether any round may have to wait."""
        return bool(self._until)

    def note_clock(self, clock: int, now: float) -> None:
        """The swarm is at round `clock`. The first reading says nothing about its pace."""
        if clock > self._clock:
            if self._clock:
                self._pace.append((now - self._clock_moved_at) / (clock - self._clock))
            self._clock, self._clock_moved_at = clock, now

    def hold(self, round_: int, now: float) -> None:
        """Make a round wait."""
        usual = median(self._pace) if self._pace else 0.0
        self._until[round_] = now + max(HELD_BACK_MIN_S, HELD_BACK_ROUNDS * usual)

    def release(self, round_: int) -> bool:
        """A round waits no longer; returns whether it did wait."""
        return self._until.pop(round_, None) is not None

    def close(self, floor: int) -> None:
        """Rounds up to `floor` are closed: they wait for nothing."""
        for round_ in [waiting for waiting in self._until if waiting <= floor]:
            del self._until[round_]

    def waits(self, round_: int, clock: int, now: float) -> bool:
        """Whether a round must not be merged yet in a swarm that is at round `clock`."""
        return round_ >= clock and now < self._until.get(round_, now)

    def until(self, round_: int) -> float | None:
        """When a round will have waited long enough; None if it does not wait."""
        return self._until.get(round_)
