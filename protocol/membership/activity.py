"""Whether a node trains, as far as its rows tell.

A live node need not train: its script evaluates, has finished or hangs, its machine sleeps. Rows tell of
inner steps and rounds; a node that has not moved for three times as long as it last took counts as idle.
"""

from dataclasses import dataclass
from math import inf

from gossamer.protocol import limits


@dataclass(slots=True)
class Activity:
    """How far a node is, and when it last moved; times are the local clock's, seconds."""

    moved: float
    """When there was last something new of it; when it was first heard of, to begin with."""
    at: tuple[int, int] = (0, 0)
    """Its inner steps, and its round."""
    stride_s: float = 0.0
    """How long it took the last time, 0 before it has moved."""
    patience_s: float = limits.IDLE_MIN_S
    """How long it may take the next time before it seems idle."""

    def note(self, inner_steps: int, round_: int, now: float, *, was_away: bool = False) -> None:
        """Take in how far it says it is. If it `was_away`, not heard of, nobody knows how long that took."""
        if (inner_steps, round_) != self.at:
            self.at = inner_steps, round_
            if not was_away and self.moved > -inf:
                self.stride_s = min(now - self.moved, limits.STRIDE_MAX_S)
                self.patience_s = max(limits.IDLE_MIN_S, limits.IDLE_STRIDES * self.stride_s)
            self.moved = now

    def forget(self) -> None:
        """What it did says nothing of now any more: it is idle until it moves again."""
        self.moved = -inf

    @property
    def has_moved(self) -> bool:
        """Whether it has, since it was first heard of."""
        return self.stride_s > 0.0

    def is_idle(self, now: float) -> bool:
        """Whether it seems not to train."""
        return now - self.moved > self.patience_s
