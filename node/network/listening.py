"""A port of this machine, for whoever comes by either kind of address; and which are still its own."""

import asyncio
import errno
import socket
from collections.abc import Callable


async def listen(
    protocol: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int
) -> asyncio.Server:
    """Have a protocol made for every connection that comes in. Raises OSError.

    At ``::`` those of IPv4 come in, too, which asyncio would leave out.
    """
    loop = asyncio.get_running_loop()
    if host == "::" and socket.has_dualstack_ipv6():
        listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        return await loop.create_server(protocol, sock=listener, backlog=backlog)
    return await loop.create_server(protocol, host, port, reuse_address=True, backlog=backlog)


def is_gone(host: str) -> bool:
    """Whether a numeric address was this machine's and is it no longer: it is on another network now, say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL  # too many open files, say, tell nothing
    return False
