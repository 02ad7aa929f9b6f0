"""Whether a trainer still does steps: the time since its last one, against what its steps usually take."""

STRIDES = 3
"""How many strides a step may take: steps differ, and one after which a loop evaluates may take long."""

HALF_LIFE_S = 3600.0
"""How long the longest stride is remembered: a trainer that has evaluated will do so again."""


class Pulse:
    """The pulse of one trainer. Times are seconds of the local monotonic clock.

    A stride is the time between two reports with different numbers of steps. It may cover several steps.
    """

    def __init__(self) -> None:
        self._steps: int | None = None
        self._stepped_at: float | None = None
        """When the trainer last did a step, or came; None before any has come."""
        self._last_s = 0.0
        self._longest_s = 0.0
        """Lengths of its last stride, and of its longest one, which fades."""

    def begin(self, now: float) -> None:
        """A trainer has come, and has not reported any steps yet."""
        self._steps, self._stepped_at = None, now
        self._last_s = self._longest_s = 0.0

    def note(self, steps: int, now: float) -> None:
        """The trainer reports that it has done `steps` steps so far."""
        if steps == self._steps:
            return
        if self._steps is not None and self._stepped_at is not None:
            self._last_s = now - self._stepped_at
            faded = self._longest_s * 0.5 ** (self._last_s / HALF_LIFE_S)
            self._longest_s = max(self._last_s, faded)
        self._steps, self._stepped_at = steps, now

    @property
    def usual_s(self) -> float:
        """The time within which the trainer does another step, unless it evaluates."""
        return STRIDES * self._last_s

    def overdue_s(self, now: float) -> float:
        """How much later its next step is than any lately; negative while it is not late."""
        return 0.0 if self._stepped_at is None else now - self._stepped_at - STRIDES * self._longest_s
