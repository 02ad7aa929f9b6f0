"""Whether a trainer still does steps: since when none has come, against how long they usually take."""

STRIDES = 3
"""Steps differ in how long they take, and one after which a loop evaluates may take long."""

HALF_LIFE_S = 3600.0
"""How long the longest of its strides is remembered: a trainer that evaluates will do so again."""


class Pulse:
    """Of one trainer. Times are seconds of the local monotonic clock.

    A stride is what lies between two reports with different numbers of steps; there may have been several
    steps between them.
    """

    def __init__(self) -> None:
        self._steps: int | None = None
        self._stepped_at: float | None = None
        """When it last did a step, or came; None before any has come."""
        self._last_s = 0.0
        self._longest_s = 0.0
        """Of its strides, fading."""

    def begin(self, now: float) -> None:
        """A trainer is here, and has told of no step."""
        self._steps, self._stepped_at = None, now
        self._last_s = self._longest_s = 0.0

    def note(self, steps: int, now: float) -> None:
        """The trainer reports that it has done so many steps."""
        if steps == self._steps:
            return
        if self._steps is not None and self._stepped_at is not None:
            self._last_s = now - self._stepped_at
            faded = self._longest_s * 0.5 ** (self._last_s / HALF_LIFE_S)
            self._longest_s = max(self._last_s, faded)
        self._steps, self._stepped_at = steps, now

    @property
    def usual_s(self) -> float:
        """Within this time it does another step, unless it evaluates."""
        return STRIDES * self._last_s

    def overdue_s(self, now: float) -> float:
        """By how much its next step is later than any was lately; negative while it is not."""
        return 0.0 if self._stepped_at is None else now - self._stepped_at - STRIDES * self._longest_s
