"""The admin server: this machine's view of a node, over HTTP on a separate address.

``/`` is the page. ``/api/state`` is the node's `NodeStatus`, and ``/status`` what other nodes are told of it,
both JSON. ``/api/rounds`` is what happened from round ``?from=`` to ``&to=``, JSON: the newest of these, as
many as one answer holds. ``/api/events`` are server-sent events. ``/healthz`` answers 200 if the node is
healthy, else 503, with the reason as JSON; ``/readyz`` the same if it holds the swarm's current model;
``/livez`` 200 as long as its event loop runs. ``/metrics`` is for Prometheus.

It only shows, and changes nothing. It listens on loopback, and elsewhere only with a token. Where there is a
token, every request must give it, except for ``/livez`` and ``/readyz``. Pages of other origins get nothing:
no CORS header is ever sent, and a name that leads here by DNS rebinding is refused by its Host header (with
the token, any name will do).
"""

import asyncio
import hmac
import logging
import os
import re
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from gossamer.node.address import format_address, is_loopback, parse_address
from gossamer.node.daemon.dashboard.metrics import registry_of
from gossamer.node.daemon.dashboard.page import document, policy
from gossamer.node.daemon.dashboard.sse import Feed
from gossamer.node.daemon.monitoring.monitor import Monitor
from gossamer.node.daemon.monitoring.round_history import dump, dump_rounds
from gossamer.node.daemon.monitoring.status import to_json
from gossamer.node.daemon.network.sockets import http_log, listen, why_not
from gossamer.node.options import ADMIN_OFF
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.limits import ROUND_MAX
from gossamer.protocol.payloads import Layout

CONNECTIONS_MAX = 64
"""Each connection takes a file descriptor, and the node needs some for itself."""

BACKLOG = 8
"""How many connections are accepted at once, before their number is checked."""

PORT_FIRST, PORTS = 7780, 64
"""Where a node looks for a free port by default; after these, the system chooses one."""

TOKEN_VARIABLE = "GOSSAMER_ADMIN_TOKEN"
TOKEN_MIN = 16
COOKIE = "gossamer-admin"

PROBES = frozenset({"/livez", "/readyz"})
"""What a kubelet or a load balancer asks, by this machine's address and without a token."""

POLICY = "default-src 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers that keep a browser from doing harm with an answer."""

STATE_LINES = 50
"""Lines of the log that come with the state."""

COMPRESSED_INLINE_MAX = 1 << 16
"""Larger answers are compressed in a thread, so that the event loop goes on; in bytes."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("gossamer.admin")


def token_here() -> str:
    """The admin token in the environment, or empty. It is stripped: one from a file may end in a newline."""
    return os.environ.get(TOKEN_VARIABLE, "").strip()


class AdminServer:
    """Serves one daemon's pages."""

    def __init__(self, monitor: Monitor, layout: Layout, option: str, token: str = "") -> None:
        """`option` as in `NodeOptions.admin`. Raises ConfigError for an address that may not be used."""
        self._monitor = monitor
        self._layout = layout
        self.feed = Feed(monitor, layout)
        self._serialising = asyncio.Lock()
        """A full answer takes 0.2 s to serialise, so only one is serialised at a time."""
        self._token = token
        self._is_off = option == ADMIN_OFF
        self._address = parse_address(option, port_min=0) if option and not self._is_off else None
        self._host = self._address[0] if self._address else "127.0.0.1"
        self._registry = registry_of(monitor.read)
        self._page, self._page_policy = document(), policy()
        self._answered: set[asyncio.Protocol] = set()
        """The connections on which a request that may ask is being answered."""
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        if token and len(token) < TOKEN_MIN:
            raise ConfigError(f"{TOKEN_VARIABLE} is too short: use {TOKEN_MIN} characters or more")
        if not is_loopback(self._host) and not token:
            raise ConfigError(
                f"--admin {option} can be reached from other machines: set {TOKEN_VARIABLE} to a secret of"
                f" {TOKEN_MIN} characters or more, which every viewer must give, or use 127.0.0.1"
            )

    async def start(self, last: int = 0) -> str | None:
        """Listen and return the address, None if switched off. Raises ConfigError if it cannot listen.

        The port used `last` is preferred, so that open pages find us again.
        """
        if self._is_off:
            return None
        app = web.Application(client_max_size=1024, middlewares=[self._guard])
        app.on_response_prepare.append(_put_headers)
        for path, handler in (
            ("/", self._serve_page),
            ("/api/state", self._serve_state),
            ("/api/rounds", self._serve_rounds),
            ("/api/events", self.feed.serve),
            ("/status", self._serve_status),
            ("/healthz", self._serve_health),
            ("/livez", self._serve_live),
            ("/readyz", self._serve_ready),
            ("/metrics", self._serve_metrics),
        ):
            app.router.add_get(path, handler, allow_head=path != "/api/events")  # its answer has no end
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=30.0,
            tcp_keepalive=False,  # as the transport has it
            logger=http_log,
        )
        await self._runner.setup()
        port = await self._listen(self._runner, last)
        address = format_address(self._host, port)
        log.info("watch this node at http://%s/", address)
        return address

    async def _listen(self, runner: web.AppRunner, last: int) -> int:
        ports = (last or PORT_FIRST, *range(PORT_FIRST, PORT_FIRST + PORTS), 0)
        for port in (self._address[1],) if self._address else ports:
            try:
                self._server = await listen(lambda: self._protocol(runner), self._host, port, BACKLOG)
                return int(self._server.sockets[0].getsockname()[1])
            except OSError as error:
                where, problem = format_address(self._host, port), why_not(error)
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {where}: {problem}; choose another --admin, or --admin off")

    def _protocol(self, runner: web.AppRunner) -> asyncio.Protocol:
        """A protocol of the HTTP server, for a new connection.

        Connections that are too many beside it are closed at once: the oldest of those on which no request is
        being answered, and then of the others. So one that is refused, silent or idle takes no place from
        those that are served.
        """
        assert runner.server is not None
        ranked = sorted(runner.server.connections, key=self._answered.__contains__)
        for old in ranked[: 1 - CONNECTIONS_MAX]:
            if old.transport is not None:
                old.transport.abort()
        return runner.server()

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- who may ask

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that may not ask, and close their connections."""
        try:
            self._check(request)
        except web.HTTPException as refusal:
            refusal.force_close()
            raise
        self._answered.add(request.protocol)
        try:
            response = await handler(request)
        finally:
            self._answered.discard(request.protocol)
        if self._token and request.query.get("token") and not response.prepared:
            # So that a page opened with ?token= can load what it needs.
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
        return response

    def _check(self, request: web.Request) -> None:
        """Raise unless the request may ask: it gives the token or, without one, means this machine."""
        # Another site's page could read nothing, but would take a listener's place.
        origin = request.headers.get("Origin")
        is_foreign = origin is not None and origin.partition("://")[2] != request.headers.get("Host")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if request.path != "/" and (is_foreign or site not in ("none", "same-origin")):
            raise web.HTTPForbidden(text="requests from other sites are refused")
        if request.path in PROBES:
            return
        if self._token and not self._gives_token(request):
            raise web.HTTPUnauthorized(
                text="give the token: ?token=..., or Authorization: Bearer ...",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not self._token and not is_loopback(_host_of(request.headers.get("Host", ""))):
            raise web.HTTPMisdirectedRequest(text="that host is not here: use 127.0.0.1 or localhost")

    def _gives_token(self, request: web.Request) -> bool:
        """Whether the request gives the token: as bearer, in the query, or by a cookie of ours."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = (
            bearer.strip() if scheme.lower() == "bearer" else "",
            request.query.get("token", ""),
            request.query.get("token", "").replace(" ", "+"),  # a "+" that was typed arrives as a space
            request.cookies.get(self._cookie, ""),
        )
        token = self._token.encode()
        return any(hmac.compare_digest(text.encode("utf-8", "surrogateescape"), token) for text in given)

    @property
    def _cookie(self) -> str:
        """The cookie's name, different for each node: cookies ignore ports, and a machine may run several."""
        return f"{COOKIE}-{self._monitor.latest.node_id[:8]}"

    # -- what is answered

    async def _serve_page(self, request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._page_policy}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _serve_state(self, request: web.Request) -> web.Response:
        lines = [line.to_json() for line in self._monitor.log.since(0)[-STATE_LINES:]]
        return _json(dump(to_json(self._monitor.latest) | {"log": lines}))

    async def _serve_rounds(self, request: web.Request) -> web.Response:
        first, last = _round_in(request, "from", 0), _round_in(request, "to", ROUND_MAX)
        history = self._monitor.history
        async with self._serialising:
            rounds, oldest = history.newest(first, last), history.oldest()
            response = _json(await asyncio.to_thread(dump_rounds, rounds, oldest, self._layout))
        response.enable_compression()  # 0.05 s for a full answer, in a thread
        return response

    async def _serve_status(self, request: web.Request) -> web.Response:
        return web.json_response(await self._monitor.answer(request.query))

    async def _serve_health(self, request: web.Request) -> web.Response:
        healthy, reason = self._monitor.is_healthy()
        return _json(dump({"healthy": healthy, "reason": reason}), status=200 if healthy else 503)

    async def _serve_live(self, request: web.Request) -> web.Response:
        return _json(dump({"live": True}))

    async def _serve_ready(self, request: web.Request) -> web.Response:
        ready, reason = self._monitor.is_ready()
        return _json(dump({"ready": ready, "reason": reason}), status=200 if ready else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):  # it fails on malformed versions
            encode, content_type = choose_encoder("")
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


async def _put_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update({**HEADERS, **response.headers})


def _round_in(request: web.Request, name: str, default: int) -> int:
    """A round given in the query."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise web.HTTPBadRequest(text=f"{name} must be the number of a round")
    return int(text)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(
        body=body, status=status, content_type="application/json", zlib_executor_size=COMPRESSED_INLINE_MAX
    )


def _host_of(header: str) -> str:
    """The host in a Host header, without port and brackets."""
    host = header.rsplit(":", 1)[0] if re.search(r":[0-9]*$", header) and not header.endswith("]") else header
    return host.strip("[]").rstrip(".").lower()
