"""The admin server's connections: how many there may be, and which of them give way to a new one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

CONNECTIONS_MAX = 64
"""Each holds a file open, and the node needs some for itself."""


class Connections:
    """What is known of those of one server."""

    def __init__(self) -> None:
        self._admitted: set[asyncio.Protocol] = set()
        self._answered: set[asyncio.Protocol] = set()

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """While one who may ask is answered."""
        self._admitted.add(request.protocol)
        self._answered.add(request.protocol)
        try:
            yield
        finally:
            self._answered.discard(request.protocol)

    def make_room(self, server: web.Server) -> None:
        """Close what is too many beside a new one, at once, whatever is still to be sent there.

        First those by which nobody has come who may ask, then idle ones, then those that are answered; of
        each the oldest. A connection that is refused, or silent, takes no place from those that are served.
        """
        self._admitted.intersection_update(server.connections)
        ranked = sorted(server.connections, key=lambda old: (old in self._admitted) + (old in self._answered))
        for old in ranked[: 1 - CONNECTIONS_MAX]:
            if old.transport is not None:
                old.transport.abort()
