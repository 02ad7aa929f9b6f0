"""Looking names up, in threads of their own.

Where the name servers are out of reach, as in a partition, a lookup takes half a minute and more, and
nothing ends it sooner. asyncio's few threads are those that write to disk and merge, and a process that ends
waits for them: neither may be held up by somebody's name.
"""

import asyncio
import socket
import threading
from contextlib import suppress

from aiohttp.abc import AbstractResolver, ResolveResult

_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class Resolver(AbstractResolver):
    """The system's own lookups. aiohttp asks for a name once at a time, however many dial it."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a name. Raises OSError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[ResolveResult]] = loop.create_future()

        def settle(found: list[ResolveResult], error: OSError | None) -> None:
            if answer.done():  # nobody waits for it any more
                return
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)

        def look_up() -> None:
            found: list[ResolveResult] = []
            failed = None
            try:
                found = _addresses(host, port, family)
            except OSError as error:
                failed = error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, found, failed)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return await answer

    async def close(self) -> None:
        """Nothing is kept open."""


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
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
            host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
        )
    ]
