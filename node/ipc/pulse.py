"""Whether a trainer still does steps: since when none has come, against how long they usually take."""

STRIDES = 3
"""Steps differ in how long they take, and one after which a loop evaluates may take long."""


class Pulse:
    """Of one trainer. Times are seconds of the local monotonic clock."""

    def __init__(self) -> None:
        self._steps: int | None = None
        self._stepped_at: float | None = None
        """When it last did a step, or came; None before any has come."""
        self._stride_s = 0.0
        """Between the last two reports with more steps than before: two steps may well have been."""

    def begin(self, now: float) -> None:
        """A trainer is here, and has told of no step."""
        self._steps, self._stepped_at, self._stride_s = None, now, 0.0

    def note(self, steps: int, now: float) -> None:
        """It reports that it has done so many."""
        if steps == self._steps:
            return
        if self._steps is not None and self._stepped_at is not None:
            self._stride_s = now - self._stepped_at
        self._steps, self._stepped_at = steps, now

    @property
    def usual_s(self) -> float:
        """Within this time a trainer of this speed has done a step."""
        return STRIDES * self._stride_s

    def overdue_s(self, now: float) -> float:
        """By how much its next step is later than usual; negative while it is not."""
        return 0.0 if self._stepped_at is None else now - self._stepped_at - self.usual_s
