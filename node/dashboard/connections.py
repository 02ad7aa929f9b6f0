"""The admin server's connections: how many there may be, and which of them give way to new ones."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

CONNECTIONS_MAX = 64
"""Each connection takes a file descriptor, and the node needs some for itself."""


class Connections:
    """What is known of one server's connections."""

    def __init__(self) -> None:
        self._admitted: set[asyncio.Protocol] = set()
        self._answered: set[asyncio.Protocol] = set()

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Inside, a request that was let in is being answered."""
        self._admitted.add(request.protocol)
        self._answered.add(request.protocol)
        try:
            yield
        finally:
            self._answered.discard(request.protocol)

    def make_room(self, server: web.Server) -> None:
        """Close connections that are too many beside a new one, at once, whatever is still to be sent there.

        Those on which no request was let in go first, then idle ones, then those being answered; the oldest
        of each kind first. So a connection that is refused or silent takes no place from those that are
        served.
        """
        self._admitted.intersection_update(server.connections)
        ranked = sorted(server.connections, key=lambda old: (old in self._admitted) + (old in self._answered))
        for old in ranked[: 1 - CONNECTIONS_MAX]:
            if old.transport is not None:
                old.transport.abort()
