"""Listening on a port, for connections by either kind of address; and this machine's own addresses."""

import asyncio
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from aiohappyeyeballs import AddrInfoType
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError

from gossamer.protocol.limits import CONNECTIONS_MAX

# --- What aiohttp's servers log, of the network and of the admin server: errors of ours alone.

log = logging.getLogger("gossamer.server")


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


# --- How many files this process may open: every connection takes one, and the node needs some for itself.

FILES_MIN = 1024
"""Open files to ask for: for all connections that come in, and for the node itself."""

OWN_FILES = 256
"""Those of them for the node itself: databases, chunks, links that it has dialled, its pages."""

CONNECTIONS_MIN = 64
"""Connections that a node needs, however few files it may open."""


def ask_for_open_files() -> None:
    """Raise the limit on open files, which is 256 on some systems, as far as allowed and needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MIN if hard < 0 else min(FILES_MIN, hard)  # infinity is negative
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed() -> int:
    """How many connections there may be without taking files that the node needs for itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft < 0 else min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, soft - OWN_FILES))


class Resolver(AbstractResolver):
    """The system's own lookups, each in a thread of its own.

    If the name servers are out of reach, a lookup takes half a minute and more, and nothing ends it sooner.
    asyncio's few threads also write to disk and merge, and a process waits for them when it ends: a lookup
    must hold up neither. aiohttp looks a name up only once at a time, however many dial it.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of a name. Raises OSError."""
        answer: Future[list[ResolveResult]] = Future()
        answer.set_running_or_notify_cancel()  # nothing ends a lookup; its caller just stops waiting

        def look_up() -> None:
            try:
                answer.set_result(_addresses(host, port, family))
            except UnicodeError:
                answer.set_exception(OSError(errno.EINVAL, f"{host!r} is not a host name"))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return await asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Nothing is kept open."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """Raises OSError, or UnicodeError for what cannot be a name."""
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, numeric)[0],  # with its scope
            port=port,
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family
        )
    ]


async def listen(
    protocol: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int
) -> asyncio.Server:
    """Have a protocol made for every connection that comes in. Raises OSError.

    Listening at ``::`` also accepts IPv4 connections, which asyncio would leave out, and only those if the
    machine has no IPv6.
    """
    loop = asyncio.get_running_loop()
    if host == "::":
        try:
            both = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return await loop.create_server(protocol, sock=both, backlog=backlog)
        except (OSError, ValueError) as error:  # ValueError: there is no dual stack
            if isinstance(error, OSError) and error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
        host = "0.0.0.0"
    return await loop.create_server(protocol, host, port, reuse_address=True, backlog=backlog)


def why_not(error: OSError) -> str:
    """Why we cannot listen, in the system's words: asyncio replaces those by its own."""
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else str(error.strerror)).lower()  # negative: name not found


def families_of(server: asyncio.Server) -> frozenset[socket.AddressFamily]:
    """The kinds of address by which a server can be reached."""
    families = {listener.family for listener in server.sockets}
    if any(
        listener.family == socket.AF_INET6
        and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        and listener.getsockname()[0] == "::"
        for listener in server.sockets
    ):
        families.add(socket.AF_INET)
    return frozenset(map(socket.AddressFamily, families))


def family_of(host: str) -> socket.AddressFamily:
    """The kind of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_gone(host: str) -> bool:
    """Whether a numeric address is no longer this machine's, perhaps since it is on another network now."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL  # other errors, such as too many open files, tell nothing
    return False


def sockets_at(host: str) -> Callable[[AddrInfoType], socket.socket]:
    """A factory of sockets to dial with, bound to our address `host` if what is dialled is of the same kind:
    no route leads from it to the other kind. The factory raises OSError, also once `host` is gone."""
    ours, *_, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]

    def make(dialled: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = dialled
        made = socket.socket(family, kind, protocol)
        try:
            if family == ours:
                made.bind(where)
        except OSError:
            made.close()
            raise
        return made

    return make
