"""Whether a node trains, as far as its rows tell.

A live node need not be training: its script may evaluate, have finished or hang, or its machine may sleep.
Rows state inner steps and rounds. A node counts as idle once they have not changed for three times as long as
the change before took.
"""

from dataclasses import dataclass
from math import inf

from gossamer.protocol import limits


@dataclass(slots=True)
class Activity:
    """How far a node is, and when it last moved; times are the local clock's, seconds."""

    moved: float
    """When it last moved; at first, when it was first heard of."""
    at: tuple[int, int] = (0, 0)
    """Its inner steps, and its round."""
    stride_s: float = 0.0
    """How long the last move took; 0 before the first."""
    patience_s: float = limits.IDLE_MIN_S
    """How long the next move may take before the node seems idle."""

    def note(self, inner_steps: int, round_: int, now: float, *, was_away: bool = False) -> None:
        """Take in how far the node says it is. If it `was_away` (not heard of), the stride is unknown."""
        if (inner_steps, round_) != self.at:
            self.at = inner_steps, round_
            if not was_away and self.moved > -inf:
                self.stride_s = min(now - self.moved, limits.STRIDE_MAX_S)
                self.patience_s = max(limits.IDLE_MIN_S, limits.IDLE_STRIDES * self.stride_s)
            self.moved = now

    def forget(self) -> None:
        """Disregard what the node did before: it is idle until it moves again."""
        self.moved = -inf

    @property
    def has_moved(self) -> bool:
        """Whether the node has moved since it was first heard of."""
        return self.stride_s > 0.0

    def is_idle(self, now: float) -> bool:
        """Whether the node seems not to train."""
        return now - self.moved > self.patience_s
