"""Logging: one line per event, on standard error; what lasts is logged once, and again after minutes."""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from math import inf
from typing import TextIO

REPEAT_S = 300.0
"""What lasts, or happens again and again, is logged once in this time."""

CALM_S = 30.0
"""A fault is over when it has not occurred for this long. A single success is not enough: a disk with room
for one file may be full at the next."""

Clock = Callable[[], float]


class RateLimit:
    """Which events were logged lately, of which there are no more than `most`."""

    def __init__(self, clock: Clock = time.monotonic, most: float = inf) -> None:
        self._clock = clock
        self._most = most
        self._logged: dict[Hashable, float] = {}

    def allows(self, event: Hashable) -> bool:
        """Whether to log an event: not if it was logged within REPEAT_S. If so, it counts as logged."""
        now = self._clock()
        self._logged = {key: at for key, at in self._logged.items() if now - at < REPEAT_S}
        if event in self._logged or len(self._logged) >= self._most:
            return False
        self._logged[event] = now
        return True


class Fault:
    """Logs what keeps something from being done that is tried every few seconds until it works."""

    def __init__(self, log: logging.Logger, over: str, clock: Clock = time.monotonic) -> None:
        """`over` is logged once the thing can be done again."""
        self._log = log
        self._over = over
        self._clock = clock
        self._limit = RateLimit(clock=clock)
        self._failed_at: float | None = None
        self._text = ""

    @property
    def text(self) -> str:
        """Why the thing cannot be done; empty if it can, as far as is known, or nobody has tried lately."""
        lasts = self._failed_at is not None and self._clock() - self._failed_at <= CALM_S
        return self._text if lasts else ""

    def failed(self, text: str, event: Hashable = None) -> None:
        """The thing could not be done: `text` says why. Failures of one `event` (or text) are one fault."""
        self._failed_at, self._text = self._clock(), text
        if self._limit.allows(event or text):
            self._log.error("%s", text)

    def worked(self) -> None:
        """The thing could be done."""
        if self._failed_at is not None and self._clock() - self._failed_at > CALM_S:
            self._failed_at, self._limit = None, RateLimit(clock=self._clock)
            self._log.info("%s", self._over)


INFO = "info"
LEVELS = ("debug", INFO, "warning", "error")

LINES_MAX = 1000
"""How many lines may wait to be written. Further ones are dropped."""

FLUSH_S = 1.0
"""How long a process that ends waits for its last lines to be written."""


class _Line(logging.Formatter):
    """``12:34:56 warning  text``, with the date before it unless somebody sees it at once, on a terminal.

    Control characters are made visible: a text may quote what a peer has sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = _visible(record.getMessage())
        line = f"{self.formatTime(record, self.datefmt)} {record.levelname.lower():8}{text}"
        if not record.exc_info:
            return line
        return "\n".join((line, *map(_visible, self.formatException(record.exc_info).split("\n"))))


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Json(logging.Formatter):
    """One JSON object per line: t (Unix seconds), level, logger, text; traceback, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _InThread(logging.Handler):
    """Writes in a thread: a stopped terminal (Ctrl-S) or a full pipe must not stop the node."""

    def __init__(self, writer: logging.Handler) -> None:
        super().__init__(writer.level)
        self._writer = writer
        self._pid = os.getpid()
        # SimpleQueue, as its `put` is reentrant: garbage collection runs anywhere, and a finalizer may log.
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # a forked process has no such thread
            self._writer.handle(record)
            return
        try:
            record.msg, record.args = record.getMessage(), None  # format now: the arguments may change
        except Exception:
            self.handleError(record)
        if self._waiting.qsize() < LINES_MAX:
            self._waiting.put(record)

    def flush(self) -> None:
        """Wait a moment for lines still to be written; `logging` calls this when the process ends."""
        if os.getpid() == self._pid:
            written = threading.Event()
            self._waiting.put(written)
            with suppress(KeyboardInterrupt):  # Ctrl-C now gives up the remaining lines
                written.wait(FLUSH_S)

    def _write(self) -> None:
        while True:
            match self._waiting.get():
                case threading.Event() as written:
                    written.set()
                case logging.LogRecord() as record:
                    self._writer.handle(record)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current standard error: a notebook cell may replace it for as long as the cell runs."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def handler(*, as_json: bool = False) -> logging.Handler:
    """A handler that writes to standard error."""
    handler = _StandardError(sys.stderr)
    is_terminal = False
    with suppress(AttributeError, ValueError):  # a script may have closed it, or put its own object there
        is_terminal = sys.stderr.isatty()
    date = "%H:%M:%S" if is_terminal else "%Y-%m-%d %H:%M:%S"
    handler.setFormatter(_Json() if as_json else _Line(datefmt=date))
    return handler


def level_of(logger: logging.Logger) -> str:
    """A logger's own level, as `configure` takes it; info if none is set."""
    wanted = logger.level or logging.INFO
    return next((level for level in LEVELS if wanted <= getattr(logging, level.upper())), LEVELS[-1])


def configure(*, level: str = INFO, debug: bool = False, as_json: bool = False) -> None:
    """Send this process's log to standard error, from `level` up; all of it with `debug`."""
    shown = handler(as_json=as_json)
    shown.setLevel("DEBUG" if debug else level.upper())
    # The level is set on the handler: what the node's page shows, from info up, does not depend on it.
    logging.basicConfig(level=min(shown.level, logging.INFO), handlers=[_InThread(shown)], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.ERROR)  # it warns of what strangers send, each time
