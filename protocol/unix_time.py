"""Unix time, as far as this machine knows it: the only clock that two nodes have in common.

It jumps under a running node: a laptop wakes hours later while its monotonic clock stood still, and a machine
without a clock battery learns the date only when it has reached a time server.
"""

import numpy as np


def moment(unix_s: int) -> str:
    """Unix seconds as text that reads the same in every time zone: "2026-11-27 20:28 UTC"."""
    return str(np.datetime64(unix_s // 60, "m")).replace("T", " ") + " UTC"


def span(seconds: float) -> str:
    """A duration in the unit that a person would choose: "2.0 days", "5.5 hours", "12 min", "40 s"."""
    minutes, hours, days = round(seconds / 60), round(seconds / 3600, 1), round(seconds / 86_400, 1)
    if hours >= 24:
        return f"{days} days"
    if minutes >= 60:
        return f"{hours} hours"
    return f"{minutes} min" if seconds >= 60 else f"{round(seconds)} s"


class UnixTime:
    """Unix time from the node's monotonic clock. `offset_s` is Unix time minus that clock, as last set."""

    __slots__ = ("_greatest_s", "offset_s")

    def __init__(self, offset_s: float) -> None:
        self.offset_s = self._greatest_s = offset_s

    def set_offset(self, offset_s: float) -> float:
        """The machine's clock was set, or the machine slept. Returns how far Unix time jumped forward."""
        forward_s = offset_s - self.offset_s
        self.offset_s = offset_s
        self._greatest_s = max(self._greatest_s, offset_s)
        return forward_s

    def at(self, now: float) -> float:
        """Unix seconds at a moment of the monotonic clock."""
        return now + self.offset_s

    def latest(self, now: float) -> float:
        """Unix time by the most advanced setting so far: a clock set back makes no round impossible again."""
        return now + self._greatest_s
