"""How many files this process may open: each connection takes one, and the node needs some for itself."""

import errno
import logging
import resource
import time
from contextlib import suppress

from gossamer.node.seldom import Seldom
from gossamer.protocol.limits import CONNECTIONS_MAX

FILES_MIN = 1024
"""Open files for as many connections as come in, and for the node's own."""

OWN_FILES = 256
"""Of these, the node's own: databases, chunks, links that it has dialled, its pages."""

CONNECTIONS_MIN = 64
"""What a node needs, however few files it may open."""


def open_files_allowed() -> int:
    """Up to how many open files this process may have, if it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_MIN if hard < 0 else min(FILES_MIN, hard)  # infinity is negative


def connections_allowed() -> int:
    """How many connections there may be, so that none costs the node a file of its own."""
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, open_files_allowed() - OWN_FILES))


def ask_for_open_files() -> None:
    """Raise the limit, which is 256 on some systems, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < open_files_allowed():
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_allowed(), hard))


class SaidSeldom(logging.Filter):
    """For asyncio's log, which says with a traceback of every connection that no file is left for it, 1,000
    times a second. One line in minutes is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and "._start_serving(" in record.getMessage():
            return False  # asyncio would listen again, a second later, where the node has stopped meanwhile
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return True
        if not self._seldom.is_due("files", time.monotonic()):
            return False
        record.msg, record.args = f"connections wait: {error.strerror} (ulimit -n)", None
        record.exc_info = None
        return True
