"""Looking names up, in threads of their own.

If the name servers are out of reach, as in a partition, a lookup takes half a minute and more, and nothing
ends it sooner. asyncio's few threads also write to disk and merge, and a process waits for them when it ends:
a lookup must hold up neither.
"""

import asyncio
import errno
import socket
import threading
from concurrent.futures import Future

from aiohttp.abc import AbstractResolver, ResolveResult

from gossamer.node.address import is_ip

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
