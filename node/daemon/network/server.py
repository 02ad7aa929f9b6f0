"""The network: one port, TLS, a WebSocket per peer, and plain HTTP for chunks.

================================== ====================================================================
``GET /gossamer/1/link``           WebSocket: hello, then records and control, both ways
``GET /gossamer/1/manifest``       the manifest's canonical bytes; members only in an invited swarm
``GET /gossamer/1/chunk/{hash}``   a chunk; needs the session of a link
``PUT /gossamer/1/chunk/{hash}``   a chunk we asked the sender for; likewise
``GET /gossamer/1/status``         what the node says of itself, JSON; likewise
``PUT /gossamer/1/credential``     a grant or revocation, signed by an owner
================================== ====================================================================

Nothing here judges content: apart from the hashes of chunks, bytes go to the `Receiver` as they came. The
`Admission` decides who may speak to us, and is asked before we tell anything. Chunks and questions have
modules of their own: this one listens, dials and shakes hands.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from gossamer.node.address import (
    WILDCARDS,
    check_plaintext,
    format_address,
    is_loopback,
    origin_of,
    parse_address,
)
from gossamer.node.daemon.network.address_book import OwnAddresses
from gossamer.node.daemon.network.chunk_transfer import ChunkRoutes, Transfers
from gossamer.node.daemon.network.connections import IDLE_TIMEOUT_S, ConnectionLimiter, guest_of
from gossamer.node.daemon.network.links import (
    SESSION_HEADER,
    Admission,
    Dialled,
    LinkTable,
    PeerLink,
    Receiver,
)
from gossamer.node.daemon.network.listening import Resolver, http_log, sockets_at, why_not
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.tls import Certificate, client_context, fingerprint_of, hang_up
from gossamer.node.daemon.storage.records import RecordWriter
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.access.handshake import (
    HELLO_BYTES_MAX,
    NONCE_BYTES,
    ClientHandshake,
    ServerHandshake,
    refusal,
)
from gossamer.protocol.access.rpc_auth import check_question, prove
from gossamer.protocol.errors import ConfigError, PeerError, RefusedError
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.limits import CREDENTIAL_BYTES_MAX, FETCH_TIMEOUT_S, MESSAGE_BYTES_MAX, PAUSE_MAX_S
from gossamer.protocol.messages import Records, decode, encode
from gossamer.protocol.records import RecordKind
from gossamer.protocol.replica import Replica

# --- RpcServer from outside any link: the manifest, the status, and owners' grants and revocations.
#
# In an invited swarm the asker signs the question. A node that answers proves that the channel is its own to
# any asker that sends a nonce. `client` is the other end.

BODY_TIMEOUT_S = 10.0
"""A credential is a few hundred bytes: a sender that takes longer is not waited for."""

ASK_HEADER = "Gossamer-Ask"
"""Hex of a signed question, see `protocol.admission.ask`."""

NONCE_HEADER = "Gossamer-Nonce"
PROOF_HEADER = "Gossamer-Proof"
"""Hex of 32 bytes from the asker, and of the proof which node answers."""

Status = Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]


class RpcServer:
    """Answers questions, or says why not. `status` takes a request's query and returns what becomes JSON."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        fingerprint: bytes,
        manifest: bytes,
        admission: Admission,
        status: Status,
    ) -> None:
        """`fingerprint` is that of our certificate, empty without TLS; `manifest` is in canonical bytes."""
        self._identity = identity
        self._swarm_id = swarm_id
        self._fingerprint = fingerprint
        self._manifest = manifest
        self._admission = admission
        self._status = status

    async def serve_manifest(self, request: web.Request) -> web.Response:
        self._vet(request)
        return web.Response(body=self._manifest, content_type="application/octet-stream")

    async def serve_status(self, request: web.Request) -> web.Response:
        self._vet(request)
        return web.json_response(await self._status(request.query))

    async def take_credential(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > CREDENTIAL_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(CREDENTIAL_BYTES_MAX, request.content_length or 0)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await request.read()
            if self._admission.is_stopping:
                raise web.HTTPServiceUnavailable(text="this node is stopping; use another one")
            self._admission.deliver(data)
        except (PeerError, OSError, TimeoutError, web.RequestPayloadError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(status=204)

    async def prove(self, request: web.Request, response: web.StreamResponse) -> None:
        """Prove to an asker that sends a nonce, with any request, that this channel is ours."""
        try:
            nonce = bytes.fromhex(request.headers.get(NONCE_HEADER, ""))
        except ValueError:
            return
        if len(nonce) == NONCE_BYTES:
            response.headers[PROOF_HEADER] = prove(self._identity, self._fingerprint, nonce).hex()

    def _vet(self, request: web.Request) -> None:
        """Raise HTTPForbidden, with a reason, unless the asker may be answered."""
        if self._admission.answers_anyone:
            return
        asked = request.headers.get(ASK_HEADER)
        if asked is None:
            raise web.HTTPForbidden(text="this swarm answers its members only")
        try:
            question = check_question(
                bytes.fromhex(asked), self._swarm_id, self._fingerprint, time.time(), request.path_qs
            )
            self._admission.vet_question(question.node_id, question.credential)
        except (PeerError, ValueError) as error:
            raise web.HTTPForbidden(text=str(error)) from None


# --- Links come up and go down, and the messages that they carry go to the core.


class Reception:
    """The transport's `Receiver`, for one daemon."""

    def __init__(
        self,
        links: LinkTable,
        transfers: Transfers,
        own_addresses: OwnAddresses,
        scores: PeerScores,
        writer: RecordWriter,
        dispatch: Callable[[ev.Event], list[fx.Effect]],
        stopping: asyncio.Event,
    ) -> None:
        """Once `stopping` is set, the core is not told of links that end: it would dial others."""
        self._links = links
        self._transfers = transfers
        self._own_addresses = own_addresses
        self._scores = scores
        self._writer = writer
        self._dispatch = dispatch
        self._stopping = stopping
        self._is_stuck = False
        """Whether a link has waited in vain for the disk to take records."""

    def link_up(self, link: PeerLink) -> None:
        self._links.add(link)
        if link.outbound:
            self._transfers.begin(link)
        self._own_addresses.learn(link)
        self._dispatch(
            ev.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )

    def link_down(self, link: PeerLink) -> None:
        self._links.remove(link)
        self._transfers.gone(link.number)
        if not self._stopping.is_set():
            self._dispatch(ev.LinkDown(link.number))

    async def message(self, link: PeerLink, data: bytes) -> None:
        """Give a message to the core. Returns once the sender may go on, so that its next message is read."""
        size = len(data)
        begun = time.thread_time()
        if self._writer.has_room:
            self._is_stuck = False
        elif (rest := _without_deltas(data)) is not data:
            parsing_s = time.thread_time() - begun
            data = data if await self._finds_room(link) else rest
            begun = time.thread_time() - parsing_s
        effects = self._dispatch(ev.Received(link.number, data))
        fresh = sum(isinstance(effect, fx.Store) for effect in effects)
        pause = self._scores.heard(link, size, time.thread_time() - begun, fresh)
        if pause > 0.0:
            await link.rest(pause)

    async def _finds_room(self, link: PeerLink) -> bool:
        """Whether the disk takes deltas now or soon; if not, anti-entropy brings them later.

        Rows, pings and all other messages do not wait for the disk.
        """
        if not self._is_stuck:
            ends = [asyncio.ensure_future(end) for end in (self._writer.room(), link.ended())]
            try:
                await asyncio.wait(ends, timeout=PAUSE_MAX_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
        self._is_stuck = not self._writer.has_room
        return not self._is_stuck


def _without_deltas(data: bytes) -> bytes:
    """A message without the deltas in it; the same bytes if there are none."""
    try:
        message = decode(data)
    except PeerError:
        return data  # the core says what is wrong with it
    if not isinstance(message, Records):
        return data
    others = tuple(entry for entry in message.entries if entry[0][0] != RecordKind.DELTA)
    return encode(Records(others)) if len(others) < len(message.entries) else data


HANDSHAKE_TIMEOUT_S = 10.0

PREFIX = "/gossamer/1"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LinkHandler = Callable[[PeerLink, web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("gossamer.transport")


async def _refuse_redirect(session: aiohttp.ClientSession, context: object, params: Any) -> NoReturn:
    """Refuse redirects: a peer that we dial must not make us send a request to something that only this
    machine can reach."""
    params.response.close()
    raise RefusedError("it redirects us to another address")


def _new_client(tls: ssl.SSLContext | bool, dials_from: str | None) -> aiohttp.ClientSession:
    """The HTTP client of one node, for links and for the requests that belong to them."""
    no_redirects = aiohttp.TraceConfig()
    no_redirects.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=64,
            ssl=tls,
            resolver=Resolver(),
            socket_factory=sockets_at(dials_from) if dials_from else None,
        ),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),  # a third of a request for a chunk
        timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S),
        trace_configs=[no_redirects],
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _dial_from(asked: str, bound: str) -> str | None:
    """The address to dial from, None for any: a node that listens on one address also dials from it.

    The usual loopback address, or another one that only a name led to, is not used: the system chooses it
    anyway for what it leads to, and it leads to no other machine.
    """
    is_usual = bound in (*WILDCARDS, "127.0.0.1", "::1")
    return None if is_usual or _is_misnamed(asked, bound) else bound


def _is_misnamed(asked: str, bound: str) -> bool:
    """Whether a name that seems meant for others leads to loopback, as /etc/hosts often has it."""
    return is_loopback(bound) and not is_loopback(asked)


class Server:
    """The server and client of one node."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        receiver: Receiver,
        admission: Admission,
        questions: RpcServer,
        chunk_routes: ChunkRoutes,
        certificate: Certificate | None,
        scores: PeerScores,
    ) -> None:
        """Without a certificate there is no TLS, and everything stays on loopback."""
        self._identity = identity
        self._swarm_id = swarm_id
        self._receiver = receiver
        self._admission = admission
        self._questions = questions
        self._chunk_routes = chunk_routes
        self._scores = scores
        self.door: ConnectionLimiter | None = None
        self.dials_from: str | None = None
        """The address of this machine from which addresses of its kind are dialled, None for any."""
        self._numbers = count(1)
        self._sessions: dict[bytes, PeerLink] = {}
        self._server_ssl = certificate.context if certificate else None
        self._client_ssl: ssl.SSLContext | bool = client_context() if certificate else False
        self._fingerprint = certificate.fingerprint if certificate else b""
        self._scheme = "https" if certificate else "http"
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None

    # -- life

    async def start(self, host: str, port: int, last: int = 0) -> int:
        """Listen, and return the port. Raises ConfigError if that is impossible.

        For port 0 the `last` port is used again if it is free, since others look for us there.
        """
        if not self._server_ssl:
            check_plaintext(host)
        self.door = ConnectionLimiter(self._protocol, self._server_ssl, self._scores)
        self._runner = web.AppRunner(
            self._application(self.door),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_TIMEOUT_S,
            tcp_keepalive=False,  # macOS refuses it, with an error, for a connection that has ended meanwhile
            logger=http_log,
            auto_decompress=False,
        )
        await self._runner.setup()
        try:
            bound_host, bound_port = await self._open(self.door, host, port, last)
        except OSError as error:
            await self._runner.cleanup()
            where = format_address(host, port)
            raise ConfigError(
                f"cannot listen on {where}: {why_not(error)}; choose another --listen"
            ) from None
        if _is_misnamed(host, bound_host):
            log.warning(
                "%s is %s, which only this machine can reach: listen on [::], or on an address that others"
                " can reach",
                host,
                bound_host,
            )
        self.dials_from = _dial_from(host, bound_host)
        self._client = _new_client(self._client_ssl, self.dials_from)
        return bound_port

    async def _open(self, door: ConnectionLimiter, host: str, port: int, last: int) -> tuple[str, int]:
        if not port and last:
            with suppress(OSError):
                return await door.open(host, last)
        return await door.open(host, port)

    def _application(self, door: ConnectionLimiter) -> web.Application:
        """All routes, behind the door."""
        app = web.Application(client_max_size=HELLO_BYTES_MAX, middlewares=[door.attend(self._member_of)])
        chunk = f"{PREFIX}/chunk/{{hash:[0-9a-f]{{64}}}}"
        app.router.add_get(f"{PREFIX}/link", self._serve_link)
        app.router.add_get(f"{PREFIX}/manifest", self._questions.serve_manifest)
        app.router.add_get(chunk, self._for_links(self._chunk_routes.serve))
        app.router.add_put(chunk, self._for_links(self._chunk_routes.take))
        app.router.add_get(f"{PREFIX}/status", self._questions.serve_status)
        app.router.add_put(f"{PREFIX}/credential", self._questions.take_credential)
        app.on_response_prepare.append(self._questions.prove)
        return app

    def _protocol(self) -> asyncio.Protocol:
        """One of the HTTP server's own protocols, for a new connection."""
        assert self._runner is not None
        assert self._runner.server is not None
        return self._runner.server()

    def close(self) -> None:
        """Accept no more connections, and end the links that others have dialled."""
        for link in list(self._sessions.values()):
            link.close_soon()
        if self.door is not None:
            self.door.close()

    async def stop(self) -> None:
        """Stop listening and close everything."""
        self.close()
        if self._client:
            await hang_up(self._client)
        if self._runner:
            await self._runner.cleanup()

    # -- dialling

    async def dial(self, address: str, expected: bytes | None, fingerprint: bytes = b"") -> None:
        """Connect, shake hands and carry the link until it ends.

        `expected` and `fingerprint` pin the node id and the certificate, if they are known. Raises OSError,
        TimeoutError, aiohttp.ClientError or PeerError if the link never came up.
        """
        assert self._client is not None
        base_url = f"{self._scheme}://{address}{PREFIX}"
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            socket = await self._client.ws_connect(
                f"{base_url}/link",
                ssl=aiohttp.Fingerprint(fingerprint) if fingerprint and self._server_ssl else True,
                compress=0,
                autoping=False,
                max_msg_size=MESSAGE_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                link = await self._introduce(socket, address, base_url, expected)
            if self._scores.is_greylisted(link.node_id):
                raise RefusedError(
                    f"{short(link.node_id)} answers there, and is turned away for misbehaviour"
                )
        except TypeError:  # the peer closed, or sent text, where bytes were due
            await socket.close()
            raise RefusedError("the peer ended the handshake") from None
        except BaseException:
            await socket.close()
            raise
        await self._carry(link)

    async def _introduce(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        address: str,
        base_url: str,
        expected: bytes | None,
    ) -> PeerLink:
        """Shake hands with a peer that we dialled. Raises PeerError, or TypeError if it sends no bytes."""
        assert self._client is not None
        tls = socket.get_extra_info("ssl_object")
        binding = fingerprint_of(tls.getpeercert(binary_form=True)) if tls else b""
        shake = ClientHandshake(
            self._identity,
            self._swarm_id,
            binding,
            os.urandom(NONCE_BYTES),
            expected,
            credential=self._admission.own_credential(),
            vet=self._admission.vet,
        )
        await socket.send_bytes(shake.hello(await socket.receive_bytes()))
        node_id, session = shake.finish(await socket.receive_bytes())
        pin = aiohttp.Fingerprint(binding) if binding else self._client_ssl
        return PeerLink(
            next(self._numbers),
            node_id,
            socket,
            session,
            credential=shake.peer_credential,
            dialled=Dialled(address, base_url, self._client, pin),
        )

    async def _carry(self, link: PeerLink) -> None:
        self._receiver.link_up(link)
        try:
            await link.run(lambda data: self._receiver.message(link, data))
        finally:
            self._receiver.link_down(link)

    # -- the server

    async def _serve_link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(
            compress=False, autoping=False, max_msg_size=MESSAGE_BYTES_MAX, timeout=2.0
        )
        await socket.prepare(request)
        link = await self._welcome(socket, request)
        if link is None:
            await socket.close()
            return socket
        self._sessions[link.session] = link
        try:
            await self._carry(link)
        finally:
            del self._sessions[link.session]
            if not any(other.node_id == link.node_id for other in self._sessions.values()):
                assert self.door is not None
                self.door.dismiss(link.node_id)
        return socket

    async def _welcome(self, socket: web.WebSocketResponse, request: web.Request) -> PeerLink | None:
        """Shake hands with a peer that dialled us; None if that failed."""
        session = os.urandom(32)
        shake = ServerHandshake(
            self._identity,
            self._swarm_id,
            self._fingerprint,
            os.urandom(NONCE_BYTES),
            session,
            credential=self._admission.own_credential(),
            vet=self._admission.vet,
        )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await socket.send_bytes(shake.challenge())
                node_id, welcome = shake.answer(await socket.receive_bytes())
                if (reason := self._scores.refusal(node_id)) is not None:
                    raise RefusedError(reason)
                guest_of(request).proves(node_id, is_link=True)
                await socket.send_bytes(welcome)
        except RefusedError as error:
            await socket.send_bytes(refusal(str(error)))
            return None
        except (PeerError, TypeError, OSError) as error:
            log.debug("handshake with %s failed: %s", request.remote, error)
            if isinstance(error, PeerError | TimeoutError):  # a peer that merely went away did nothing wrong
                stalled = isinstance(error, TimeoutError)
                self._scores.blame_address(
                    origin_of(request.remote or ""), "handshakes failed", stalled=stalled
                )
            return None
        return PeerLink(next(self._numbers), node_id, socket, session, credential=shake.peer_credential)

    def _for_links(self, handler: LinkHandler) -> Handler:
        """A route for linked peers: its handler is given the link that a request belongs to."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await handler(self._session_of(request), request)

        return handle

    def _member_of(self, request: web.Request) -> bytes | None:
        """The node id whose session a request carries, None for a stranger's request."""
        try:
            return self._session_of(request).node_id
        except web.HTTPForbidden:
            return None

    def _session_of(self, request: web.Request) -> PeerLink:
        """The link that a request belongs to. One that we hung up does not count, however slowly it
        closes."""
        try:
            link = self._sessions.get(bytes.fromhex(request.headers.get(SESSION_HEADER, "")))
        except ValueError:
            link = None
        if link is None or link.is_closing:
            raise web.HTTPForbidden(text="no such session")
        return link


# --- Carries out `Dial` effects, and tells the core of dials that failed.

log_dialling = logging.getLogger("gossamer.node")


class Dialler:
    """Dials peers, except those that are turned away."""

    def __init__(
        self,
        transport: Server,
        scores: PeerScores,
        core: Replica,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._transport = transport
        self._scores = scores
        self._core = core
        self._dispatch = dispatch

    async def dial(self, effect: fx.Dial) -> None:
        """Dial a peer and carry the link until it ends. The core is told if it never came up."""
        try:
            parse_address(effect.address)  # a peer may have made it up
            if not self._scores.is_greylisted(effect.node_id):
                await self._transport.dial(effect.address, effect.node_id, effect.fingerprint)
                return
        except ConfigError as error:
            log_dialling.debug("%s", error)
        except PeerError as error:
            self._scores.complain(f"{effect.address}:", str(error))
        except aiohttp.ServerFingerprintMismatch as error:
            if self._is_namesake(effect.address, error.got):
                log_dialling.debug(
                    "%s is also the address of another member, which answers there", effect.address
                )
            else:
                what = "shows a different certificate than its own row names"
                self._scores.complain(f"{effect.address}:", what)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log_dialling.debug("cannot reach %s: %s", effect.address, error)
        self._dispatch(ev.DialFailed(effect.address))

    def _is_namesake(self, address: str, fingerprint: bytes) -> bool:
        """Whether the certificate is that of another member that states the same address, or our own.

        Two members in two homes may have the same private address: each is reached by nodes in its own home.
        And the address of a member that listens on loopback leads every other node to itself.
        """
        rows = [member.record.body for member in self._core.roster.members()]
        theirs = any(address in row.addresses and row.fingerprint == fingerprint for row in rows)
        return theirs or fingerprint == self._core.own_record.fingerprint
