"""An event that keeps coming is logged once, and again only after minutes."""

import logging
import time
from collections.abc import Callable, Hashable
from math import inf

REPEAT_S = 300.0

CALM_S = 30.0
"""Trouble is over when it has not been met for this long. A single success is not enough: a disk with room
for one file may be full at the next."""


class Seldom:
    """Which events were logged lately."""

    def __init__(self) -> None:
        self._said: dict[Hashable, float] = {}

    def is_due(self, event: Hashable, now: float) -> bool:
        """Whether to log an event at time `now` (seconds of any clock): not if it was within REPEAT_S.

        If so, it counts as logged.
        """
        if now - self._said.get(event, -inf) < REPEAT_S:
            return False
        self._said = {other: at for other, at in self._said.items() if now - at < REPEAT_S} | {event: now}
        return True


class SeldomWarnings:
    """Warns of events, of each once in minutes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seldom = Seldom()

    def say(self, event: Hashable, now: float, text: str) -> None:
        if self._seldom.is_due(event, now):
            self._log.warning("%s", text)


class Trouble:
    """Logs what keeps something from being done that is tried every few seconds until it works."""

    def __init__(self, log: logging.Logger, over: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`over` is logged once the thing can be done again."""
        self._log = log
        self._over = over
        self._clock = clock
        self._seldom = Seldom()
        self._met_at: float | None = None
        self._text = ""

    @property
    def lasting(self) -> str:
        """Why the thing cannot be done; empty if it can, as far as is known, or nobody has tried lately."""
        lasts = self._met_at is not None and self._clock() - self._met_at <= CALM_S
        return self._text if lasts else ""

    def met(self, text: str, event: Hashable = None) -> None:
        """The thing could not be done: `text` says why. Troubles of one `event` (or text) are one trouble."""
        self._met_at, self._text = self._clock(), text
        if self._seldom.is_due(event or text, self._met_at):
            self._log.error("%s", text)

    def not_met(self) -> None:
        """The thing could be done."""
        if self._met_at is not None and self._clock() - self._met_at > CALM_S:
            self._met_at, self._seldom = None, Seldom()
            self._log.info("%s", self._over)
