"""One accepted connection, from its first byte to its end.

A guest stands between the socket and the HTTP server: it is a protocol around one of the server's own, and
starts TLS itself, so that a connection counts from its first byte.
"""

import asyncio
import ssl
import time
from collections import Counter
from typing import Any, Protocol, cast

from aiohttp import web

from gossamer.node.address import origin_of
from gossamer.node.network.policing import Policing
from gossamer.node.network.tls import cut
from gossamer.protocol.limits import (
    REQUEST_TIMEOUT_S,
    STRANGER_BYTES_MAX,
    STRANGER_TIMEOUT_S,
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
    policing: Policing
    counts: Counter[str]

    def serve(self) -> asyncio.Protocol:
        """One of the HTTP server's protocols."""
        ...

    def admit(self, guest: "Guest") -> bool: ...

    def left(self, guest: "Guest") -> None: ...

    def __contains__(self, guest: "Guest") -> bool: ...


class Gate:
    """A guest's transport as the HTTP server sees it: reading goes on only if the guest allows it too."""

    def __init__(self, transport: asyncio.Transport, guest: "Guest") -> None:
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


class Guest(asyncio.Protocol):
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
                self._door.policing.blame_address(self.origin, "TLS handshakes failed", stalled=stalled)
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
            pause = self._door.policing.parsed(self.node_id, self.origin, cpu_s)
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


def guest_of(request: web.Request) -> Guest:
    """The connection on which a request came. Raises ConnectionResetError if it is gone."""
    gate = request.transport
    if gate is None:
        raise ConnectionResetError("the connection is gone")
    return cast(Gate, gate).guest
