"""Logging: one line an event, on standard error."""

import json
import logging
import sys
import time

INFO = "info"
LEVELS = ("debug", INFO, "warning", "error")


class _Line(logging.Formatter):
    """``12:34:56 warning  text``, with control characters made visible."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        line = f"{clock} {record.levelname.lower():8}{text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    """One JSON object a line: t (Unix seconds), level, logger, text."""

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


def handler(*, as_json: bool = False) -> logging.Handler:
    """Writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Line())
    return handler


def configure(*, level: str = INFO, debug: bool = False, as_json: bool = False) -> None:
    """Send this process's log to standard error, from a level on; all of it with `debug`."""
    shown = handler(as_json=as_json)
    shown.setLevel("DEBUG" if debug else level.upper())
    # The level is the handler's: what a node tells its page, from info on, does not depend on it.
    logging.basicConfig(level=min(shown.level, logging.INFO), handlers=[shown], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
