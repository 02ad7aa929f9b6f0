"""A port of this machine, for whoever comes by either kind of address; and which addresses are its own."""

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

    At ``::`` those of IPv4 come in, too, which asyncio would leave out, and they alone where the machine has
    no IPv6.
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
    # asyncio passes over what it can have no socket for, and says nothing, or only that there is none.
    for family, *_ in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        socket.socket(family).close()  # says why
    raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))


def _bound_to_both(port: int) -> socket.socket | None:
    """A socket for IPv6 and IPv4, None where this machine cannot have one. Raises OSError."""
    if not socket.has_dualstack_ipv6():
        return None
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            return None
        raise


def why_not(error: OSError) -> str:
    """Why one cannot listen. asyncio has put words of its own in place of the system's."""
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else str(error.strerror)).lower()  # below 0: names not found


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
    """Whether a name is one of this machine's that leads nowhere else, as /etc/hosts often has its own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(is_loopback(str(address[0])) for *_, address in found)


_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""For documentation, and nobody's: the way there is the way to everywhere."""

_HERE = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def own_address(family: socket.AddressFamily, *, loopback: bool) -> str | None:
    """The address of a kind that this machine goes out from, or the loopback one; None if it has none.

    Nothing is sent to find it.
    """
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(((_HERE if loopback else _FAR_AWAY)[family], 9))
        return str(probe.getsockname()[0])
    return None


def sockets_at(host: str) -> Callable[[AddrInfoType], socket.socket]:
    """What makes sockets to dial with that begin at an address of ours, where what is dialled is of its kind.

    From it no way leads to the other kind. What is returned raises OSError, also once that address is gone.
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
    """Whether a numeric address was this machine's and is it no longer: it is on another network now, say."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL  # too many open files, say, tell nothing
    return False
