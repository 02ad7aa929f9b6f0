"""What goes wrong at a node of a local swarm, found by following its log.

A supervisor restarts a trainer however often it ends, as is right for a node far from its owner. Here a
person looks on, who is told each cause once, and does not wait for a trainer that makes no progress.
"""

import re
from contextlib import suppress
from pathlib import Path

from gossamer.node.service import says_it_ended

READ_MAX = 1 << 16
"""Bytes that are read at a time. If a log has grown by more, only its end is read."""

CAUSES_MAX = 100
"""How many different causes are reported for one node."""

ENDS_MAX = 3
"""A trainer that has ended this often in the same round will make no progress."""

LINE = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d (?P<level>\w+) +(?P<text>.+)")
"""A line as `gossamer.node.logs` writes it."""

_PAUSE = re.compile(r" in [0-9.]+ s$")


class Troubles:
    """Reads one node's log."""

    def __init__(self, log_path: Path) -> None:
        self._path = log_path
        self._at = 0
        self._begun = b""
        self._told: set[str] = set()
        self._round = 0
        self._ends = 0
        self._cause = ""

    def read(self, round_: int) -> list[str]:
        """New errors and warnings, each reported once; `round_` is the last that the node has published."""
        if round_ > self._round:
            self._round, self._ends = round_, 0
        fresh = []
        for line in self._lines():
            found = LINE.fullmatch(line)
            if found is None or found["level"] not in ("warning", "error", "critical"):
                continue
            text = _PAUSE.sub("", found["text"])
            if says_it_ended(text, "trainer"):
                self._ends += 1
                self._cause = self._cause or text
            elif found["level"] != "warning":
                self._cause = text
            if text not in self._told and len(self._told) < CAUSES_MAX:
                self._told.add(text)
                fresh.append(text)
        return fresh

    @property
    def hopeless(self) -> str:
        """Why its trainer keeps ending; empty while there is hope."""
        if self._ends < ENDS_MAX:
            return ""
        return f"{self._cause} (its trainer ended {self._ends} times in one round; see {self._path})"

    def _lines(self) -> list[str]:
        """The whole lines that have come since the last call."""
        grown = b""
        with suppress(OSError), open(self._path, "rb") as log:
            size = log.seek(0, 2)
            if size - self._at > READ_MAX:
                self._at, self._begun = size - READ_MAX, b""
            log.seek(self._at)
            grown = log.read(READ_MAX)
            self._at += len(grown)
        *whole, self._begun = (self._begun + grown).split(b"\n")
        self._begun = self._begun[-READ_MAX:]
        return [line.decode("utf-8", "replace") for line in whole]
