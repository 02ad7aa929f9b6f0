"""Logging: one line an event, on standard error."""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

INFO = "info"
LEVELS = ("debug", INFO, "warning", "error")

Wording = Callable[[str], str]
"""What a line becomes for who reads it."""

LINES_MAX = 1000
"""Lines that wait to be written. Further ones are left out."""

FLUSH_S = 1.0
"""How long a process that ends waits for them."""


class _Line(logging.Formatter):
    """``12:34:56 warning  text``, with control characters made visible."""

    def __init__(self, wording: Wording) -> None:
        super().__init__()
        self._wording = wording

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():8}{_visible(self._wording(record.getMessage()))}"
        if not record.exc_info:
            return line
        traceback = self.formatException(record.exc_info)  # an exception may say what a peer has sent
        return "\n".join((line, *map(_visible, traceback.split("\n"))))


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Json(logging.Formatter):
    """One JSON object a line: t (Unix seconds), level, logger, text."""

    def __init__(self, wording: Wording) -> None:
        super().__init__()
        self._wording = wording

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": self._wording(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Aside(logging.Handler):
    """Has a thread write: a node must not stand still with a terminal that does (Ctrl-S), or a full pipe."""

    def __init__(self, writer: logging.Handler) -> None:
        super().__init__(writer.level)
        self._writer = writer
        self._pid = os.getpid()
        # Of all queues the one that a line may come to while another is put into it: garbage is collected
        # anywhere, and what it ends with may log.
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._write, name="log", daemon=True).start()
        except RuntimeError:  # the system has no thread left: lines are written where they are said
            self._pid = 0

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # a forked process has no such thread
            self._writer.handle(record)
            return
        try:
            record.msg, record.args = record.getMessage(), None  # as things are now
        except Exception:
            self.handleError(record)
        if self._waiting.qsize() < LINES_MAX:
            self._waiting.put(record)

    def flush(self) -> None:
        """Wait a moment for what is still to be written; `logging` calls it when the process ends."""
        if os.getpid() == self._pid:
            written = threading.Event()
            self._waiting.put(written)
            with suppress(KeyboardInterrupt):  # who is as impatient as that does without the rest
                written.wait(FLUSH_S)

    def _write(self) -> None:
        while True:
            match self._waiting.get():
                case threading.Event() as written:
                    written.set()
                case logging.LogRecord() as record:
                    self._writer.handle(record)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to standard error as it is then: what a cell's capture puts in its place is gone after it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def handler(*, as_json: bool = False, wording: Wording = str) -> logging.Handler:
    """Writes to standard error."""
    handler = _StandardError(sys.stderr)
    handler.setFormatter(_Json(wording) if as_json else _Line(wording))
    return handler


def level_of(logger: logging.Logger) -> str:
    """What has been set on a logger, as `configure` takes it; info if nothing has."""
    wanted = logger.level or logging.INFO
    return next(
        (level for level in LEVELS if wanted <= logging.getLevelNamesMapping()[level.upper()]), LEVELS[-1]
    )


def configure(
    *, level: str = INFO, debug: bool = False, as_json: bool = False, wording: Wording = str
) -> None:
    """Send this process's log to standard error, from a level on; all of it with `debug`."""
    shown = handler(as_json=as_json, wording=wording)
    shown.setLevel("DEBUG" if debug else level.upper())
    # The level is the handler's: what a node tells its page, from info on, does not depend on it.
    logging.basicConfig(level=min(shown.level, logging.INFO), handlers=[_Aside(shown)], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
