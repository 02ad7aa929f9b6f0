"""Exponential backoff: a peer that does not do what it was asked for is asked again later each time."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Backoff:
    """A peer is not asked until `until`, and twice as long the next time unless this wait is forgotten."""

    until: float
    wait: float
    kept: float
    """Seconds for which the wait is remembered after its end, if that is longer than the wait itself."""

    @classmethod
    def after(cls, before: Self | None, now: float, least: float, most: float, kept: float = 0.0) -> Self:
        """The wait after `before`, if any: `least` seconds, or twice the one before, at most `most`."""
        wait = least
        if before is not None and before.forgotten_at > now:
            wait = min(max(least, 2 * before.wait), most)
        return cls(now + wait, wait, kept)

    @property
    def forgotten_at(self) -> float:
        return self.until + max(self.wait, self.kept)
