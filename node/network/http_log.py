"""What aiohttp's servers log, of the network and of the admin server: errors of ours alone."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger("gossamer.transport")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is ours: often a stranger merely does not speak HTTP, and that is
    not worth a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    theirs = HttpProcessingError | ConnectionError | web.RequestPayloadError
    # aiohttp refuses an unknown Expect header before any code of ours is asked, and cannot quote all of them.
    if not isinstance(error, theirs | UnicodeEncodeError):
        return True
    log.debug("a request that cannot be answered: %s", type(error).__name__)
    return False


http_log = logging.getLogger("gossamer.http")
http_log.addFilter(_is_ours)
