"""The latest log lines, for people who watch a node by other means than its log."""

import logging
from collections import deque
from typing import NamedTuple

NOTICES_MAX = 500
TEXT_MAX = 500
"""The most characters of one notice."""

_LOGGER = logging.getLogger("gossamer")


class Notice(NamedTuple):
    """One line of the log."""

    number: int
    """Its number among all notices of this process."""
    time: float
    """Unix seconds."""
    level: str
    """"info", "warning" or "error"."""
    text: str

    def to_json(self) -> dict[str, str | float]:
        return {"time": round(self.time, 3), "level": self.level, "text": self.text}


class Notices(logging.Handler):
    """Keeps what is logged at `info` and above. Lines may come from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[Notice] = deque(maxlen=NOTICES_MAX)
        self.count = 0

    def begin(self) -> None:
        """Listen to the log of this process."""
        _LOGGER.addHandler(self)

    def end(self) -> None:
        _LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, under the handler's lock."""
        level = (
            "info"
            if record.levelno < logging.WARNING
            else "warning"
            if record.levelno < logging.ERROR
            else "error"
        )
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        self.count += 1
        self._kept.append(Notice(self.count, record.created, level, text[:TEXT_MAX]))

    def since(self, number: int) -> list[Notice]:
        """All that are kept after notice `number`, oldest first."""
        self.acquire()
        try:
            return [notice for notice in self._kept if notice.number > number]
        finally:
            self.release()
