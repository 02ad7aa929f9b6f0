"""Waits that double: a peer that does not do what it was asked for is asked again later each time."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Backoff:
    """Not to be asked until then, and twice as late the next time, unless this one is forgotten by then."""

    until: float
    wait: float
    kept: float
    """Seconds for which it counts after its end, if that is more than it took."""

    @classmethod
    def after(cls, before: Self | None, now: float, least: float, most: float, kept: float = 0.0) -> Self:
        """What follows the one before, if any: `least` seconds, or twice that one's, `most` at most."""
        wait = least
        if before is not None and before.forgotten_at > now:
            wait = min(max(least, 2 * before.wait), most)
        return cls(now + wait, wait, kept)

    @property
    def forgotten_at(self) -> float:
        return self.until + max(self.wait, self.kept)

    def ended(self, now: float) -> Self:
        """This wait, over at once. The next one is twice as long all the same."""
        return replace(self, until=now)
