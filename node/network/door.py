"""The guard at the port: how many connections there may be, and what each may do before it has proven a key.

Every accepted connection is a *guest*, and a *stranger* until a handshake or the session of a link proves
whose it is. Strangers have little time and few bytes. When there are too many of them the oldest gives way,
so that half-open connections do not lock out nodes whose hello takes milliseconds.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from socket import AddressFamily
from typing import Any

from aiohttp import web

from gossamer.node.network.guest import Guest, guest_of
from gossamer.node.network.listening import families_of, listen
from gossamer.node.network.open_files import connections_allowed
from gossamer.node.network.policing import Policing
from gossamer.protocol.limits import (
    CONNECTIONS_PER_LINK_MAX,
    STRANGERS_MAX,
    STRANGERS_PER_ADDRESS_MAX,
)

BACKLOG = 128
"""Connections that the system keeps for us until we accept them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door:
    """Accepts connections for an HTTP server. `serve` makes one of its protocols, `context` is for TLS."""

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        policing: Policing,
    ) -> None:
        self.serve = serve
        self.context = context
        self.policing = policing
        self.counts: Counter[str] = Counter()
        """Connections since the start, and causes for refusing or cutting them, for the status."""
        self._guests: dict[Guest, None] = {}
        """All connections, oldest first."""
        self._turns = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self.families: frozenset[AddressFamily] = frozenset()
        """The kinds of address by which the server can be reached, once it is open."""

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address that was bound. Raises OSError."""
        self._server = await listen(lambda: Guest(self), host, port, BACKLOG)
        self.families = families_of(self._server)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    def close(self) -> None:
        """Stop listening, and end the connections of strangers."""
        if self._server is not None:
            self._server.close()
        for guest in self._strangers():
            guest.abort()

    # -- who may come in

    @property
    def connections(self) -> int:
        return len(self._guests)

    def describe(self) -> dict[str, int | dict[str, int]]:
        """How many connections are open, came, and were refused or cut since the start, and why."""
        causes = {cause: count for cause, count in sorted(self.counts.items()) if cause != "connections"}
        return {
            "open": len(self._guests),
            "strangers": len(self._strangers()),
            "connections": self.counts["connections"],
            "refused": sum(causes.values()),
            "causes": causes,
        }

    def __contains__(self, guest: Guest) -> bool:
        return guest in self._guests

    def admit(self, guest: Guest) -> bool:
        """Accept a new connection if it is allowed; strangers may have to give way. Returns whether it is."""
        self.counts["connections"] += 1
        refused = self._refuses(guest.origin)
        if refused is None and not self._make_room(guest.origin):
            refused = "no_room"
        if refused is not None:
            self.counts[refused] += 1
            return False
        self._guests[guest] = None
        return True

    def left(self, guest: Guest) -> None:
        self._guests.pop(guest, None)

    def dismiss(self, node_id: bytes) -> None:
        """A member's last link has ended: end its other connections too, whatever is under way on them."""
        for guest in [guest for guest in self._guests if guest.node_id == node_id and not guest.is_link]:
            guest.abort()

    def _refuses(self, origin: str | None) -> str | None:
        """Why an address is refused, None if it is not. A greylisted address is still accepted while a linked
        peer has it: others may be behind the same router."""
        if self.policing.is_greylisted(origin) and not any(
            guest.node_id is not None and guest.origin == origin for guest in self._guests
        ):
            return "greylisted"
        return None if self.policing.may_connect(origin) else "too_fast"

    def _make_room(self, origin: str | None) -> bool:
        """Make a stranger give way if there is no room: of the same address if that has too many, else of the
        address with the most. Returns whether one more connection fits."""
        strangers = self._strangers()
        same = [guest for guest in strangers if guest.origin == origin]
        if len(same) >= STRANGERS_PER_ADDRESS_MAX:
            self._gives_way(same[0])
        elif len(strangers) >= STRANGERS_MAX or len(self._guests) >= connections_allowed():
            if not strangers:
                return False
            busiest = Counter(guest.origin for guest in strangers).most_common(1)[0][0]
            self._gives_way(next(guest for guest in strangers if guest.origin == busiest))
        return True

    def _gives_way(self, guest: Guest) -> None:
        self.counts["gave_way"] += 1
        self.left(guest)
        guest.abort()

    def _strangers(self) -> list[Guest]:
        return [guest for guest in self._guests if guest.node_id is None]

    # -- what comes through it

    def attend(self, member_of: Callable[[web.Request], bytes | None]) -> Any:
        """The server's middleware. A request's session proves whose its connection is.

        `member_of` returns the node id of that session, None for a stranger's request.
        """

        @web.middleware
        async def attend(request: web.Request, handler: Handler) -> web.StreamResponse:
            guest = guest_of(request)
            node_id = member_of(request)
            if node_id is not None and guest.node_id is None:
                self._prove_by_session(guest, node_id)
            guest.request_begins()
            try:
                return await self._answer(request, handler, node_id)
            finally:
                guest.request_ends()

        return attend

    def _prove_by_session(self, guest: Guest, node_id: bytes) -> None:
        theirs = sum(other.node_id == node_id for other in self._guests)
        if theirs > CONNECTIONS_PER_LINK_MAX:  # the link's own is one
            self.counts["too_many_of_one_link"] += 1
            raise web.HTTPTooManyRequests(text="too many connections of one link")
        guest.proves(node_id, is_link=False)

    async def _answer(
        self, request: web.Request, handler: Handler, node_id: bytes | None
    ) -> web.StreamResponse:
        if node_id is None or "hash" not in request.match_info:  # members may ask freely for chunks only
            await asyncio.sleep(self.policing.asked(guest_of(request).origin))
            async with self._turns:  # one answer per turn of the event loop, however many ask at once
                await asyncio.sleep(0)
            return await handler(request)
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPConflict):
            await asyncio.sleep(self.policing.missed(node_id))
            raise
