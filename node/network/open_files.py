"""How many files this process may open: every connection takes one, and the node needs some for itself."""

import errno
import logging
import resource
import time
from contextlib import suppress

from gossamer.node.seldom import Seldom
from gossamer.protocol.limits import CONNECTIONS_MAX

FILES_MIN = 1024
"""Open files to ask for: for all connections that come in, and for the node itself."""

OWN_FILES = 256
"""Those of them for the node itself: databases, chunks, links that it has dialled, its pages."""

CONNECTIONS_MIN = 64
"""Connections that a node needs, however few files it may open."""


def open_files_allowed() -> int:
    """How many open files this process may have if it asks, up to `FILES_MIN`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_MIN if hard < 0 else min(FILES_MIN, hard)  # infinity is negative


def connections_allowed() -> int:
    """How many connections there may be without taking files that the node needs for itself."""
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, open_files_allowed() - OWN_FILES))


def ask_for_open_files() -> None:
    """Raise the limit on open files, which is 256 on some systems, as far as allowed and needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < open_files_allowed():
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_allowed(), hard))


_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept after which asyncio tries again a second later."""


class SaidSeldom(logging.Filter):
    """Filters asyncio's log, which reports with a traceback, 1,000 times a second, that no file or no memory
    is left for a connection. One line every few minutes is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and "._start_serving(" in record.getMessage():
            return False  # asyncio would listen again, a second later, where the node has stopped meanwhile
        if not isinstance(error, OSError) or error.errno not in _NOTHING_LEFT:
            return True
        if not self._seldom.is_due(error.errno, time.monotonic()):
            return False
        hint = " (ulimit -n)" if error.errno == errno.EMFILE else ""
        record.msg, record.args = f"connections wait: {error.strerror}{hint}", None
        record.exc_info = None
        return True
