"""What was to be reached, and whether it was."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on one figure, set before it was measured. Exactly one of `at_least` and `at_most` is given."""

    what: str
    measured: Callable[[Any], float]
    """Computes the figure, in `unit`, from what `run` returned."""
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    reason: str = ""
    """Why the goal is missed: written by hand, and shown only if it is."""

    def is_met(self, figures: Any) -> bool:
        """Whether the figure keeps the bound."""
        found = self.measured(figures)
        if self.at_least is not None:
            return found >= self.at_least
        assert self.at_most is not None
        return found <= self.at_most

    def bound_text(self) -> str:
        """The bound in words: ``at least 300 M/s``."""
        if self.at_least is not None:
            return f"at least {amount(self.at_least, self.unit)}"
        assert self.at_most is not None
        return f"at most {amount(self.at_most, self.unit)}"

    def measured_text(self, figures: Any) -> str:
        """The figure in words."""
        return amount(self.measured(figures), self.unit)


def amount(value: float, unit: str = "") -> str:
    """A figure with three significant digits (four below one of 1: ``0.9985``) and its unit."""
    if not isfinite(value):
        text = str(value)
    elif abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.4g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{text} {unit}".strip()
