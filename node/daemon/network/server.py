"""The server: one port, TLS, a WebSocket per peer, and plain HTTP for chunks and questions.

================================== ====================================================================
``GET /gossamer/1/link``           WebSocket: hello, then records and control, both ways
``GET /gossamer/1/manifest``       the manifest's canonical bytes; members only in an invited swarm
``GET /gossamer/1/chunk/{hash}``   a chunk; needs the session of a link
``PUT /gossamer/1/chunk/{hash}``   a chunk we asked the sender for; likewise
``GET /gossamer/1/status``         what the node says of itself, JSON; likewise
``PUT /gossamer/1/credential``     a grant or revocation, signed by an owner
================================== ====================================================================

Every accepted connection counts from its first byte, so it is a `Connection` before there is TLS or HTTP on
it. It is a *stranger's* until a handshake or the session of a link proves whose it is. Strangers have little
time and few bytes. When there are too many of them the oldest gives way, so that half-open connections do not
lock out nodes whose hello takes milliseconds. What never speaks the protocol, such as the probes of a load
balancer, costs its address nothing but these limits; only a hello that fails counts against it.
"""

import asyncio
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from math import ceil
from socket import AddressFamily
from typing import Any, cast

from aiohttp import web

from gossamer.node.address import WILDCARDS, check_plaintext, format_address, is_loopback, origin_of
from gossamer.node.daemon.network.access import Access
from gossamer.node.daemon.network.chunk_transfer import LINK, ChunkTransfer
from gossamer.node.daemon.network.links import (
    PREFIX,
    SESSION_HEADER,
    LinkTable,
    PeerLink,
)
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.rpc import RpcServer
from gossamer.node.daemon.network.sockets import (
    WRITE_BUFFER_BYTES,
    LocalNode,
    cut,
    families_of,
    http_log,
    listen,
    why_not,
)
from gossamer.protocol.access.handshake import HELLO_BYTES_MAX, NONCE_BYTES, ServerHandshake, refusal
from gossamer.protocol.access.rate_limits import Resource
from gossamer.protocol.errors import ConfigError, Offence, PeerError, RefusedError
from gossamer.protocol.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_LINK_MAX,
    MESSAGE_BYTES_MAX,
    STRANGER_BYTES_MAX,
    STRANGER_TIMEOUT_S,
    STRANGERS_MAX,
    STRANGERS_PER_ADDRESS_MAX,
    TLS_HANDSHAKE_TIMEOUT_S,
)

HANDSHAKE_TIMEOUT_S = 10.0

IDLE_TIMEOUT_S = 30.0
"""A connection without a request is closed after this."""

BACKLOG = 128
"""Connections that the system keeps for us until we accept them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("gossamer.server")


class Connection(asyncio.Protocol):
    """One accepted connection, from its first byte to its end.

    It stands between the socket and one of the HTTP server's protocols, whose transport it is: that protocol
    reads on only if the connection allows it too.
    """

    def __init__(self, limiter: "ConnectionLimiter", new_http: Callable[[], asyncio.Protocol]) -> None:
        self._limiter = limiter
        self._new_http = new_http
        self._transport: asyncio.Transport | None = None
        self._http: asyncio.Protocol | None = None
        self._early = b""
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        """When a stranger's time is over."""
        self._tls: asyncio.Task[None] | None = None
        self._held_by: set[str] = set()
        """Why nothing is read now: HTTP wants no more (``http``), or the peer has spent its ``budget``."""
        self._pause: asyncio.TimerHandle | None = None
        self.origin: str | None = None
        self.node_id: bytes | None = None
        """The node id whose connection it is, once that is proven."""
        self.is_link = False
        """Whether it carries a link, and so ends with that link by itself."""

    # -- below: the socket's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.origin = origin_of(str(peer[0])) if peer else None
        if not self._limiter.admit(self):
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(STRANGER_TIMEOUT_S, self._cut_for, "timed_out")
        if self._limiter.tls is None:
            self._begin_http()
        else:
            self._transport.pause_reading()
            self._tls = asyncio.create_task(self._begin_tls(self._transport, self._limiter.tls))

    async def _begin_tls(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S
            )
        except OSError:
            self._cut_for("tls_failed")
            self._limiter.remove(self)
            return
        if secure is not None and self in self._limiter:
            secure.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
            self._transport = secure
            self._begin_http()

    def _begin_http(self) -> None:
        self._http = self._new_http()
        self._http.connection_made(cast(asyncio.BaseTransport, self))
        if self._early:
            self._http.data_received(self._early)
        self._early = b""

    def data_received(self, data: bytes) -> None:
        if self.node_id is None:
            self._received += len(data)
            if self._received > STRANGER_BYTES_MAX:
                self._cut_for("too_many_bytes")
                return
        if self._http is None:
            self._early += data
            return
        begun = time.thread_time()
        self._http.data_received(data)
        if self.is_link and self.node_id is not None:
            cost = {Resource.CPU: time.thread_time() - begun}  # whether or not it became a message
            pause = self._limiter.scores.charge(self.node_id, self.origin, cost)
            if pause > 0.0:
                self.pause_for(pause)

    def pause_writing(self) -> None:
        if self._http:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http:
            self._http.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._limiter.remove(self)
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        if self._http is not None:
            self._http.connection_lost(error)

    # -- above: the HTTP server's transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self, held_by: str = "http") -> None:
        assert self._transport is not None
        self._held_by.add(held_by)
        self._transport.pause_reading()

    def resume_reading(self, held_by: str = "http") -> None:
        assert self._transport is not None
        self._held_by.discard(held_by)
        if not self._held_by and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_for(self, seconds: float) -> None:
        """Read nothing for a while, whatever the HTTP server wants."""
        if self._pause is not None:
            self._pause.cancel()
        self.pause_reading("budget")
        self._pause = asyncio.get_running_loop().call_later(seconds, self.resume_reading, "budget")

    def abort(self) -> None:
        """End the connection at once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tls is not None:
            self._tls.cancel()
        if self._transport is not None:
            cut(self._transport)

    def _cut_for(self, cause: str) -> None:
        self._limiter.counts[cause] += 1
        self.abort()

    def proves(self, node_id: bytes, *, is_link: bool) -> None:
        """The connection is proven to be a member's."""
        self.node_id = node_id
        self.is_link = is_link
        if self._timer is not None:
            self._timer.cancel()


def connection_of(request: web.Request) -> Connection:
    """The connection on which a request came. Raises ConnectionResetError if it is gone."""
    if request.transport is None:
        raise ConnectionResetError("the connection is gone")
    return cast(Connection, request.transport)


class ConnectionLimiter:
    """All accepted connections: how many there may be, and from where."""

    def __init__(self, tls: ssl.SSLContext | None, scores: PeerScores) -> None:
        self.tls = tls
        self.scores = scores
        self.counts: Counter[str] = Counter()
        """Connections since the start, and causes for refusing or cutting them, for the status."""
        self._open: dict[Connection, None] = {}
        """All connections, oldest first."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._open

    def describe(self) -> dict[str, int | dict[str, int]]:
        """How many connections are open, came, and were refused or cut since the start, and why."""
        causes = {cause: count for cause, count in sorted(self.counts.items()) if cause != "connections"}
        return {
            "open": len(self._open),
            "strangers": len(self.connections_of(None)),
            "connections": self.counts["connections"],
            "refused": sum(causes.values()),
            "causes": causes,
        }

    def connections_of(self, node_id: bytes | None) -> list[Connection]:
        """Those of a member; those of strangers for None."""
        return [connection for connection in self._open if connection.node_id == node_id]

    def admit(self, connection: Connection) -> bool:
        """Accept a new connection if it is allowed; a stranger may have to give way: of the same address if
        that has too many, else of the address with the most. Returns whether it is."""
        self.counts["connections"] += 1
        if not self.scores.may_connect(connection.origin):
            self.counts["too_fast"] += 1
            return False
        strangers = self.connections_of(None)
        same = [stranger for stranger in strangers if stranger.origin == connection.origin]
        if len(same) >= STRANGERS_PER_ADDRESS_MAX:
            self._gives_way(same[0])
        elif len(strangers) >= STRANGERS_MAX or len(self._open) >= CONNECTIONS_MAX:
            if not strangers:
                self.counts["no_room"] += 1
                return False
            busiest = Counter(stranger.origin for stranger in strangers).most_common(1)[0][0]
            self._gives_way(next(stranger for stranger in strangers if stranger.origin == busiest))
        self._open[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _gives_way(self, connection: Connection) -> None:
        self.counts["gave_way"] += 1
        self.remove(connection)
        connection.abort()


class Server:
    """Accepts connections, shakes hands, and routes requests to `ChunkTransfer` and `RpcServer`."""

    def __init__(
        self,
        local: LocalNode,
        links: LinkTable,
        access: Access,
        rpc: RpcServer,
        chunks: ChunkTransfer,
    ) -> None:
        self._local = local
        self._links = links
        self._access = access
        self._rpc = rpc
        self._chunks = chunks
        self.bound_to: str | None = None
        """The address of this machine to which `--listen` ties this node, None for any. It dials from there
        too: with several addresses, others and their firewalls know a node by one."""
        self.families: frozenset[AddressFamily] = frozenset()
        """The kinds of address by which this node can be reached, once it listens."""
        tls = local.certificate.context if local.certificate else None
        self.limiter = ConnectionLimiter(tls, links.scores)
        self._sessions: dict[bytes, PeerLink] = {}
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    # -- life

    async def start(self, host: str, port: int, last: int = 0) -> int:
        """Listen, and return the port. Raises ConfigError if that is impossible.

        For port 0 the `last` port is used again if it is free, since others look for us there.
        """
        if self._local.certificate is None:
            check_plaintext(host)
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_TIMEOUT_S,
            tcp_keepalive=False,  # macOS refuses it, with an error, for a connection that has ended meanwhile
            logger=http_log,
            auto_decompress=False,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        new = partial(Connection, self.limiter, self._runner.server)
        for attempt in (port,) if port or not last else (last, 0):
            try:
                self._listener = await listen(new, host, attempt, BACKLOG)
                break
            except OSError as error:
                problem = f"cannot listen on {format_address(host, port)}: {why_not(error)}"
        else:
            await self._runner.cleanup()
            raise ConfigError(f"{problem}; choose another --listen")
        self.families = families_of(self._listener)
        bound_host, bound_port = self._listener.sockets[0].getsockname()[:2]
        if is_loopback(bound_host) and not is_loopback(host):  # as /etc/hosts often has it
            log.warning("%s is %s, which only this machine can reach: listen on [::]", host, bound_host)
        elif bound_host not in (*WILDCARDS, "127.0.0.1", "::1"):
            self.bound_to = str(bound_host)
        return int(bound_port)

    def close(self) -> None:
        """Accept no more connections, and end those of strangers and the links that others have dialled."""
        for link in list(self._sessions.values()):
            link.close_soon()
        if self._listener is not None:
            self._listener.close()
        for connection in self.limiter.connections_of(None):
            connection.abort()

    async def stop(self) -> None:
        """Stop listening and close everything."""
        self.close()
        if self._runner:
            await self._runner.cleanup()

    # -- requests

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=HELLO_BYTES_MAX, middlewares=[self._middleware()])
        chunk = f"{PREFIX}/chunk/{{hash:[0-9a-f]{{64}}}}"
        app.router.add_get(f"{PREFIX}/link", self._serve_link)
        app.router.add_get(f"{PREFIX}/manifest", self._rpc.serve_manifest)
        app.router.add_get(chunk, self._chunks.serve)
        app.router.add_put(chunk, self._chunks.take)
        app.router.add_get(f"{PREFIX}/status", self._rpc.serve_status)
        app.router.add_put(f"{PREFIX}/credential", self._rpc.take_credential)
        app.on_response_prepare.append(self._rpc.prove)
        return app

    def _middleware(self) -> Any:
        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection, link = connection_of(request), self._link_of(request)
            if connection.node_id is None:
                self._prove_or_refuse(connection, link)
            scores, is_of_link = self._links.scores, "hash" in request.match_info
            if link is None or not is_of_link:  # members may ask freely for chunks only
                await asyncio.sleep(scores.charge_request(connection.origin))
                if is_of_link:
                    raise web.HTTPForbidden(text="no such session")
                return await handler(request)
            try:
                request[LINK] = link
                return await handler(request)
            except (web.HTTPNotFound, web.HTTPConflict):
                await asyncio.sleep(scores.charge_misses(link.node_id))
                raise

        return admit

    def _prove_or_refuse(self, connection: Connection, link: PeerLink | None) -> None:
        """A request's session proves whose its connection is. A stranger may be turned away."""
        if link is not None:
            if len(self.limiter.connections_of(link.node_id)) > CONNECTIONS_PER_LINK_MAX:  # the link's is one
                self.limiter.counts["too_many_of_one_link"] += 1
                raise web.HTTPTooManyRequests(text="too many connections of one link")
            connection.proves(link.node_id, is_link=False)
        elif seconds := self._links.scores.refused_for(connection.origin):
            self.limiter.counts["greylisted"] += 1
            wait = str(ceil(seconds))
            text = f"this address is turned away for misbehaviour, for another {wait} s"
            raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": wait, "Connection": "close"})

    def _link_of(self, request: web.Request) -> PeerLink | None:
        """The link whose session a request carries. One that we hung up does not count, however slowly it
        closes."""
        try:
            link = self._sessions.get(bytes.fromhex(request.headers.get(SESSION_HEADER, "")))
        except ValueError:
            return None
        return None if link is None or link.is_closing else link

    # -- accepted links

    async def _serve_link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(
            compress=False, autoping=False, max_msg_size=MESSAGE_BYTES_MAX, timeout=2.0
        )
        await socket.prepare(request)
        link = await self._shake_hands(socket, request)
        if link is None:
            await socket.close()
            return socket
        self._sessions[link.session] = link
        try:
            await self._links.carry(link)
        finally:
            del self._sessions[link.session]
            # With a member's last link end its other connections, whatever is under way on them.
            if not any(other.node_id == link.node_id for other in self._sessions.values()):
                for connection in self.limiter.connections_of(link.node_id):
                    if not connection.is_link:
                        connection.abort()
        return socket

    async def _shake_hands(self, socket: web.WebSocketResponse, request: web.Request) -> PeerLink | None:
        """Shake hands with a peer that dialled us; None if that failed."""
        scores, session, offence = self._links.scores, os.urandom(32), Offence.HANDSHAKE
        shake = ServerHandshake(
            self._local.identity,
            self._local.swarm_id,
            self._local.fingerprint,
            os.urandom(NONCE_BYTES),
            session,
            credential=self._access.own_credential(),
            vet=self._access.vet,
        )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await socket.send_bytes(shake.challenge())
                node_id, welcome = shake.answer(await socket.receive_bytes())
                if (reason := scores.refusal(node_id)) is not None:
                    raise RefusedError(reason)
                connection_of(request).proves(node_id, is_link=True)
                await socket.send_bytes(welcome)
            return PeerLink(node_id, socket, session, credential=shake.peer_credential)
        except RefusedError as error:
            await socket.send_bytes(refusal(str(error)))
            return None
        except TimeoutError:
            offence = Offence.STALLED
        except PeerError as error:
            log.debug("handshake with %s failed: %s", request.remote, error)
        except (TypeError, OSError):
            return None  # it merely went away, and did nothing wrong
        scores.blame_address(origin_of(request.remote or ""), offence)
        return None
