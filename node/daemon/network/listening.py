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

from gossamer.node.address import is_ip, is_loopback
from gossamer.node.logs import RateLimit
from gossamer.protocol.limits import CONNECTIONS_MAX

# --- What aiohttp's servers log, of the network and of the admin server: errors of ours alone.

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


# --- How many files this process may open: every connection takes one, and the node needs some for itself.

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


class NothingLeft(logging.Filter):
    """Filters asyncio's log, which reports with a traceback, 1,000 times a second, that no file or no memory
    is left for a connection. One line every few minutes is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = RateLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and "._start_serving(" in record.getMessage():
            return False  # asyncio would listen again, a second later, where the node has stopped meanwhile
        if not isinstance(error, OSError) or error.errno not in _NOTHING_LEFT:
            return True
        if not self._limit.allows(error.errno):
            return False
        hint = " (ulimit -n)" if error.errno == errno.EMFILE else ""
        record.msg, record.args = f"connections wait: {error.strerror}{hint}", None
        record.exc_info = None
        return True


# --- Looking names up, in threads of their own.
#
# If the name servers are out of reach, as in a partition, a lookup takes half a minute and more, and nothing
# ends it sooner. asyncio's few threads also write to disk and merge, and a process waits for them when it
# ends:
# a lookup must hold up neither.

_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class Resolver(AbstractResolver):
    """The system's own lookups. aiohttp looks a name up only once at a time, however many dial it."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a name. Raises OSError."""
        answer: Future[list[ResolveResult]] = Future()
        answer.set_running_or_notify_cancel()  # nothing ends a lookup; its caller just stops waiting

        def look_up() -> None:
            try:
                found = _addresses(host, port, family)
            except UnicodeError:
                answer.set_exception(OSError(errno.EINVAL, f"{host!r} is not a host name"))
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)

        try:
            threading.Thread(target=look_up, name="look-up", daemon=True).start()
        except RuntimeError:  # too many threads: it may pass
            raise OSError(errno.EAGAIN, "cannot start a thread to look it up") from None
        return await asyncio.wrap_future(answer)

    async def close(self) -> None:
        """Nothing is kept open."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """Addresses of a host. Raises OSError, or UnicodeError for what cannot be a name.

    Of a name's addresses, only those of a kind that this machine has; a numeric address is taken as it is.
    """
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    wanted = 0 if is_ip(host) else socket.AI_ADDRCONFIG
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, _AS_NUMBERS)[0],  # with its scope
            port=port,
            family=kind,
            proto=protocol,
            flags=numeric,
        )
        for kind, _, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family, flags=wanted
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
        if (listener := _bound_to_both(port)) is not None:
            return await loop.create_server(protocol, sock=listener, backlog=backlog)
        host = "0.0.0.0"
    try:
        server = await loop.create_server(protocol, host, port, reuse_address=True, backlog=backlog)
    except OSError as error:
        if error.errno is not None:
            raise
    else:
        if server.sockets:
            return server
        server.close()
    # asyncio skips addresses for which it can get no socket, and does not say why.
    for family, *_ in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        socket.socket(family).close()  # raises the reason
    raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))


def _bound_to_both(port: int) -> socket.socket | None:
    """A socket for both IPv6 and IPv4, None if this machine cannot have one. Raises OSError."""
    if not socket.has_dualstack_ipv6():
        return None
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return None
        raise


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


def names_loopback(host: str) -> bool:
    """Whether a name leads only to loopback, as a machine's own name often does by /etc/hosts."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(is_loopback(str(address[0])) for *_, address in found)


_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation, which nobody has: the route to them is the default route."""

_HERE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def own_address(family: socket.AddressFamily, *, loopback: bool) -> str | None:
    """The address, of a kind, by which this machine reaches others, or its loopback one; None if it has none.

    Nothing is sent to find out.
    """
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(((_HERE if loopback else _FAR_AWAY)[family], 9))
        return str(probe.getsockname()[0])
    return None


def sockets_at(host: str) -> Callable[[AddrInfoType], socket.socket]:
    """A factory of sockets to dial with, bound to our address `host` if what is dialled is of the same kind.

    From `host` no route leads to the other kind. The factory raises OSError, also once `host` is gone.
    """
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


def is_gone(host: str) -> bool:
    """Whether a numeric address is no longer this machine's, perhaps since it is on another network now."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL  # other errors, such as too many open files, tell nothing
    return False
