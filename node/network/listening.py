"""Listening on a port, for connections by either kind of address; and this machine's own addresses."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from aiohappyeyeballs import AddrInfoType

from gossamer.node.address import is_loopback


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
