"""One accepted connection, from its first byte to its end.

A guest stands between the socket and the HTTP server: it is a protocol around one of the server's own, and
starts TLS itself, so that a connection counts from its first byte.
"""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from socket import AddressFamily
from typing import Any, Protocol, cast

from aiohttp import web

from gossamer.node.address import origin_of
from gossamer.node.daemon.network.listening import connections_allowed, families_of, listen
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.tls import cut
from gossamer.protocol.limits import (
    CONNECTIONS_PER_LINK_MAX,
    REQUEST_TIMEOUT_S,
    STRANGER_BYTES_MAX,
    STRANGER_TIMEOUT_S,
    STRANGERS_MAX,
    STRANGERS_PER_ADDRESS_MAX,
    TLS_HANDSHAKE_TIMEOUT_S,
)

IDLE_TIMEOUT_S = 30.0
"""A connection without a request is closed after this."""

WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes that may wait in a connection's write buffer, over TLS too, where asyncio would let half a chunk
wait. A small buffer shows how fast a chunk goes out."""


class Host(Protocol):
    """The door, as its guests see it."""

    context: ssl.SSLContext | None
    """For TLS; None without."""
    scores: PeerScores
    counts: Counter[str]

    def serve(self) -> asyncio.Protocol:
        """One of the HTTP server's protocols."""
        ...

    def admit(self, guest: "Connection") -> bool: ...

    def left(self, guest: "Connection") -> None: ...

    def __contains__(self, guest: "Connection") -> bool: ...


class Gate:
    """A guest's transport as the HTTP server sees it: reading goes on only if the guest allows it too."""

    def __init__(self, transport: asyncio.Transport, guest: "Connection") -> None:
        self.guest = guest
        self._transport = transport
        self._wanted = True
        self._closed_until: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._wanted = False
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if self._closed_until is None:
            self._transport.resume_reading()

    def close_for(self, seconds: float) -> None:
        """Read nothing for a while, whatever the server wants."""
        if self._closed_until is not None:
            self._closed_until.cancel()
        self._transport.pause_reading()
        self._closed_until = asyncio.get_running_loop().call_later(seconds, self._open)

    def _open(self) -> None:
        self._closed_until = None
        if self._wanted and not self._transport.is_closing():
            self._transport.resume_reading()

    def forget(self) -> None:
        if self._closed_until is not None:
            self._closed_until.cancel()


class Connection(asyncio.Protocol):
    """One connection, from its first byte to its end."""

    def __init__(self, door: Host) -> None:
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._gate: Gate | None = None
        self._server: asyncio.Protocol | None = None
        self._early: list[bytes] = []
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self._securing: asyncio.Task[None] | None = None
        self._stranger_until = 0.0
        self.origin: str | None = None
        self.node_id: bytes | None = None
        """The node id whose connection it is, once that is proven."""
        self.is_link = False
        """Whether it carries a link, and so ends with that link by itself."""

    # -- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.origin = origin_of(str(peer[0])) if peer else None
        if not self._door.admit(self):
            self._transport.abort()
            return
        self._stranger_until = asyncio.get_running_loop().time() + STRANGER_TIMEOUT_S
        self._close_in(REQUEST_TIMEOUT_S)
        if self._door.context is None:
            self._enter(self._transport)
        else:
            self._transport.pause_reading()
            self._securing = asyncio.create_task(self._secure(self._transport, self._door.context))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            self._securing = None
            self._door.counts["tls_failed"] += 1
            if not isinstance(error, ConnectionResetError):  # a peer that merely went away did nothing wrong
                stalled = isinstance(error, ConnectionAbortedError)  # asyncio raises it for its timeout
                self._door.scores.blame_address(self.origin, "TLS handshakes failed", stalled=stalled)
            self.abort()
            self._door.left(self)
            return
        self._securing = None
        if secure is not None and self in self._door:
            secure.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            self._transport = secure
            self._enter(secure)

    def _enter(self, transport: asyncio.Transport) -> None:
        """Hand the connection to the HTTP server."""
        self._gate = Gate(transport, self)
        self._server = self._door.serve()
        self._server.connection_made(cast(asyncio.BaseTransport, self._gate))
        early, self._early = self._early, []
        for data in early:
            self._server.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.node_id is None:
            self._received += len(data)
            if self._received > STRANGER_BYTES_MAX:
                self._door.counts["too_many_bytes"] += 1
                self.abort()
                return
        if self._server is None:
            self._early.append(data)
            return
        begun = time.thread_time()
        self._server.data_received(data)
        if self.is_link and self.node_id is not None and self._gate is not None:
            cpu_s = time.thread_time() - begun
            pause = self._door.scores.parsed(self.node_id, self.origin, cpu_s)
            if pause > 0.0:
                self._gate.close_for(pause)

    def eof_received(self) -> bool | None:
        return self._server.eof_received() if self._server else None

    def pause_writing(self) -> None:
        if self._server:
            self._server.pause_writing()

    def resume_writing(self) -> None:
        if self._server:
            self._server.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._door.left(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._gate is not None:
            self._gate.forget()
        if self._server is not None:
            self._server.connection_lost(error)

    def abort(self) -> None:
        """End the connection at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._securing is not None:
            self._securing.cancel()
        if self._transport is not None:
            cut(self._transport)

    # -- its time

    def request_begins(self) -> None:
        """A whole request is here. A stranger has what is left of its time for the answer, a member any
        time."""
        if self.node_id is None:
            self._close_in(self._stranger_until - asyncio.get_running_loop().time())
        elif self._timer is not None:
            self._timer.cancel()

    def request_ends(self) -> None:
        """A request has been answered, and the next one may come."""
        self._close_in(IDLE_TIMEOUT_S + REQUEST_TIMEOUT_S)

    def _close_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self not in self._door:
            return
        when = loop.time() + seconds
        if self.node_id is None:
            when = min(when, self._stranger_until)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._time_is_over)

    def _time_is_over(self) -> None:
        self._door.counts["timed_out"] += 1
        self.abort()

    def proves(self, node_id: bytes, *, is_link: bool) -> None:
        """The connection is proven to be a member's."""
        self.node_id = node_id
        self.is_link = is_link
        if self._timer is not None:
            self._timer.cancel()


def guest_of(request: web.Request) -> Connection:
    """The connection on which a request came. Raises ConnectionResetError if it is gone."""
    gate = request.transport
    if gate is None:
        raise ConnectionResetError("the connection is gone")
    return cast(Gate, gate).guest


# --- The guard at the port: how many connections there may be, and what each may do before it has proven a
# key.
#
# Every accepted connection is a *guest*, and a *stranger* until a handshake or the session of a link proves
# whose it is. Strangers have little time and few bytes. When there are too many of them the oldest gives way,
# so that half-open connections do not lock out nodes whose hello takes milliseconds.

BACKLOG = 128
"""Connections that the system keeps for us until we accept them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConnectionLimiter:
    """Accepts connections for an HTTP server. `serve` makes one of its protocols, `context` is for TLS."""

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        scores: PeerScores,
    ) -> None:
        self.serve = serve
        self.context = context
        self.scores = scores
        self.counts: Counter[str] = Counter()
        """Connections since the start, and causes for refusing or cutting them, for the status."""
        self._guests: dict[Connection, None] = {}
        """All connections, oldest first."""
        self._turns = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self.families: frozenset[AddressFamily] = frozenset()
        """The kinds of address by which the server can be reached, once it is open."""

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address that was bound. Raises OSError."""
        self._server = await listen(lambda: Connection(self), host, port, BACKLOG)
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

    def __contains__(self, guest: Connection) -> bool:
        return guest in self._guests

    def admit(self, guest: Connection) -> bool:
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

    def left(self, guest: Connection) -> None:
        self._guests.pop(guest, None)

    def dismiss(self, node_id: bytes) -> None:
        """A member's last link has ended: end its other connections too, whatever is under way on them."""
        for guest in [guest for guest in self._guests if guest.node_id == node_id and not guest.is_link]:
            guest.abort()

    def _refuses(self, origin: str | None) -> str | None:
        """Why an address is refused, None if it is not. A greylisted address is still accepted while a linked
        peer has it: others may be behind the same router."""
        if self.scores.is_greylisted(origin) and not any(
            guest.node_id is not None and guest.origin == origin for guest in self._guests
        ):
            return "greylisted"
        return None if self.scores.may_connect(origin) else "too_fast"

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

    def _gives_way(self, guest: Connection) -> None:
        self.counts["gave_way"] += 1
        self.left(guest)
        guest.abort()

    def _strangers(self) -> list[Connection]:
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

    def _prove_by_session(self, guest: Connection, node_id: bytes) -> None:
        theirs = sum(other.node_id == node_id for other in self._guests)
        if theirs > CONNECTIONS_PER_LINK_MAX:  # the link's own is one
            self.counts["too_many_of_one_link"] += 1
            raise web.HTTPTooManyRequests(text="too many connections of one link")
        guest.proves(node_id, is_link=False)

    async def _answer(
        self, request: web.Request, handler: Handler, node_id: bytes | None
    ) -> web.StreamResponse:
        if node_id is None or "hash" not in request.match_info:  # members may ask freely for chunks only
            await asyncio.sleep(self.scores.asked(guest_of(request).origin))
            async with self._turns:  # one answer per turn of the event loop, however many ask at once
                await asyncio.sleep(0)
            return await handler(request)
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPConflict):
            await asyncio.sleep(self.scores.missed(node_id))
            raise
