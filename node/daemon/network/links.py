"""Links: one authenticated WebSocket to each peer, how they are dialled, and the table of those that are up.

A link carries messages both ways: out through a bounded queue, in to the core. Whoever has dialled also makes
the HTTP requests that belong to it (`chunk_transfer`), pinned to the certificate that the link has shown.
Accepted links come from `server`.
"""

import asyncio
import logging
import math
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import count
from socket import SHUT_RDWR
from typing import Any, NoReturn, TypeVar

import aiohttp
from aiohttp import web

from gossamer.node.address import network_group, origin_of, parse_address, unmapped
from gossamer.node.daemon.network.access import Access
from gossamer.node.daemon.network.address_book import OwnAddresses
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.sockets import (
    LocalNode,
    Resolver,
    client_context,
    fingerprint_of,
    sockets_at,
)
from gossamer.node.daemon.storage.records import RecordWriter
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.access.handshake import NONCE_BYTES, ClientHandshake
from gossamer.protocol.access.rate_limits import cost_of_message
from gossamer.protocol.errors import ConfigError, Offence, PeerError, RefusedError
from gossamer.protocol.identity import short
from gossamer.protocol.limits import (
    FETCH_TIMEOUT_S,
    MESSAGE_BYTES_MAX,
    PAUSE_MAX_S,
    PUTS_PER_LINK_MAX,
    SEND_QUEUE_BYTES_MAX,
)
from gossamer.protocol.messages import Message, NewDelta, Records, decode, encode
from gossamer.protocol.records import RecordKind

PREFIX = "/gossamer/1"
"""Of the paths that a node serves."""

SESSION_HEADER = "Gossamer-Session"
"""Hex of the session that a link's handshake agreed on: it tells which peer an HTTP request is from."""

DIAL_TIMEOUT_S = 20.0
"""For connecting to a peer, and for its part of the handshake."""

WRITE_TIMEOUT_S = 30.0
"""A peer that reads nothing for this long is cut off; it will be dialled again."""

CLOSING_TIMEOUT_S = 5.0
"""Messages queued on a link that was hung up go out within this time, or not at all. Such a link no longer
counts as one, so without this limit a peer that reads slowly could keep any number of them."""

CLOSE_TIMEOUT_S = 2.0
"""For the other side to confirm that the link is closed."""

WebSocket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
T = TypeVar("T")

log = logging.getLogger("gossamer.node")

_numbers = count(1)


@dataclass(slots=True)
class Traffic:
    """Bytes of one link, both of its WebSocket and of the chunks that belong to it."""

    sent: int = 0
    received: int = 0
    payload_sent: int = 0
    payload_received: int = 0
    charged: int = 0
    """The value of `sent` when the peer was last charged."""

    @property
    def counts(self) -> list[int]:
        """Control sent and received, payload sent and received."""
        return [self.sent, self.received, self.payload_sent, self.payload_received]


@dataclass(frozen=True, slots=True)
class Dialled:
    """How we reached a peer. HTTP requests go where the link went, pinned to the certificate shown there."""

    address: str
    base_url: str
    http: aiohttp.ClientSession
    ssl: aiohttp.Fingerprint | ssl.SSLContext | bool


class PeerUploads:
    """What goes out over one link, and how fast its peer reads it."""

    def __init__(self) -> None:
        self.sending = asyncio.Lock()
        """Held while a body waits for its place and goes out. Bodies go one after another, since the first
        of several chunks is of use before all have been sent."""
        self.puts = asyncio.Semaphore(PUTS_PER_LINK_MAX)
        self.asked = 0
        """Chunks that the peer has asked us to put and not yet received."""
        self.is_slow = False
        """Whether the peer is known to read slowly."""
        self.flow = self.flow_at = 0.0
        """Bytes per second that it has read, averaged over some seconds, as of a time."""
        self.free_at = -math.inf
        """When the last body to it ended."""
        self.filled = 0
        """Bytes that have filled its connections' buffers since these were empty, up to what they hold."""
        self.size = 0.0
        self.seconds = 0.0
        """Bytes and seconds of its bodies, the latest weighing most."""


class PeerLink:
    """A link whose handshake is done."""

    def __init__(
        self,
        node_id: bytes,
        socket: WebSocket,
        session: bytes,
        *,
        credential: bytes = b"",
        dialled: Dialled | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.node_id = node_id
        self.session = session
        self.credential = credential
        """The grant that the peer showed, if any."""
        self.dialled = dialled
        """None if the peer dialled us."""
        self.traffic = Traffic()
        self.uploads = PeerUploads()
        self.clock_offset_s: float | None = None
        """How far the peer's clock is ahead of ours, if a chunk has shown it since ours was last set."""
        self.dropped = 0
        """Number of messages dropped because the peer reads too slowly."""
        self.throttled_s = 0.0
        """How long the link was left unread because the peer sends too much."""
        self._socket = socket
        self._connection = socket.get_extra_info("socket")
        host = str((socket.get_extra_info("peername") or ("",))[0])
        self.origin = origin_of(host)
        """The name under which the peer's address has its budget; None for this machine's own."""
        self.group = network_group(host)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._queued = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        """When a link that was hung up is cut."""
        self._ending = asyncio.Event()

    @property
    def outbound(self) -> bool:
        return self.dialled is not None

    @property
    def address(self) -> str | None:
        """The address at which we dialled the peer, if we did."""
        return self.dialled.address if self.dialled else None

    @property
    def is_closing(self) -> bool:
        """Whether nothing but what is queued will be carried any more."""
        return self._ending.is_set()

    def note_date(self, date: str | None) -> None:
        """Note the peer's time, from the Date header of a request or answer that has just begun (RFC 9110,
        6.6.1): to about a second, which is enough, since the protocol tolerates two minutes."""
        with suppress(ValueError, TypeError, OverflowError):
            self.clock_offset_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()

    def socket_name(self) -> tuple[str, int] | None:
        """The address of our end, None if the link is gone."""
        name = self._socket.get_extra_info("sockname")
        return (unmapped(str(name[0])), int(name[1])) if name else None

    def send(self, data: bytes) -> None:
        """Queue a message; drop it if the queue is full. Never waits."""
        if self._queued_bytes + len(data) > SEND_QUEUE_BYTES_MAX:
            self.dropped += 1
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._queued.set()

    def close_soon(self) -> None:
        """Close once the queue has gone out, within `CLOSING_TIMEOUT_S`."""
        if not self.is_closing:
            self._deadline = asyncio.get_running_loop().call_later(CLOSING_TIMEOUT_S, self._cut)
        self._ending.set()
        self._queued.set()

    async def while_up(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T | None:
        """The result of `work`; None if the link ends before, or the time: then `work` is cancelled."""
        task, ending = asyncio.create_task(work), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((task, ending), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            ending.cancel()

    async def run(self, on_message: Callable[["PeerLink", bytes], Coroutine[Any, Any, None]]) -> None:
        """Carry messages both ways until either side closes; always ends with the socket closed."""
        writer = asyncio.create_task(self._write(), name=f"link-{self.number}-write")
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self.traffic.received += len(message.data)
                await on_message(self, message.data)
                await asyncio.sleep(0)  # let others run: hundreds of messages may have come at once
        except (OSError, aiohttp.ClientError):
            pass  # the line broke, or TLS found flipped bits: either way the link is over
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self._close()
            if self._deadline is not None:
                self._deadline.cancel()

    async def _write(self) -> None:
        try:
            while self._queue or not self.is_closing:
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await self._socket.send_bytes(data)
                    self.traffic.sent += len(data)
                self._queued.clear()
                if not self.is_closing:
                    await self._queued.wait()
        except TimeoutError:
            self._cut()
        except (OSError, aiohttp.ClientError):
            pass
        await self._close()

    async def _close(self) -> None:
        self._ending.set()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close()
        except TimeoutError:
            self._cut()
        except (OSError, aiohttp.ClientError):
            pass

    def _cut(self) -> None:
        """Drop the connection and its buffers: closing would wait for a peer that reads nothing."""
        with suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(SHUT_RDWR)


class LinkTable(dict[int, PeerLink]):
    """The links that are up, by number. Each is carried here, and its messages are given to the core."""

    def __init__(
        self,
        scores: PeerScores,
        own_addresses: OwnAddresses,
        writer: RecordWriter,
        dispatch: Callable[[ev.Event], list[fx.Effect]],
    ) -> None:
        super().__init__()
        self.scores = scores
        self._own_addresses = own_addresses
        self._writer = writer
        self._dispatch = dispatch
        self._past_traffic = [0, 0, 0, 0]
        self._encoded: tuple[Message, bytes] | None = None
        self.dialled_by_others = 0
        """How often another node has reached us."""

    def send(self, number: int, message: Message) -> None:
        """Send over a link, if it is still up. A message to several links in a row is serialised once."""
        if number in self:
            if self._encoded is None or self._encoded[0] is not message:
                self._encoded = (message, encode(message))
            self[number].send(self._encoded[1])
            if isinstance(message, NewDelta):
                self[number].traffic.sent -= len(message.chunk)
                self[number].traffic.payload_sent += len(message.chunk)

    def hang_up(self, number: int, reason: str) -> None:
        """Close a link once its queue has gone out."""
        if number in self:
            log.debug("closing link %d: %s", number, reason)
            self[number].close_soon()

    def blame(self, node_id: bytes, reason: str, offence: Offence) -> None:
        """Note an offence of a peer; end its links if that was one too many."""
        if self.scores.blame(node_id, reason, offence):
            for link in self.values():
                if link.node_id == node_id:
                    link.close_soon()

    def forget_clocks(self) -> None:
        """Our clock was set: forget how far the clocks of our peers are from it."""
        for link in self.values():
            link.clock_offset_s = None

    def traffic(self) -> list[int]:
        """Bytes of all links so far: control sent and received, payload sent and received."""
        return _sums(self._past_traffic, *(link.traffic.counts for link in self.values()))

    async def carry(self, link: PeerLink) -> None:
        """Carry a link that has come up, until it ends."""
        self[link.number] = link
        self.dialled_by_others += not link.outbound
        self._own_addresses.learn(link.socket_name())
        self._dispatch(
            ev.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )
        try:
            await link.run(self._receive)
        finally:
            del self[link.number]
            self._past_traffic = _sums(self._past_traffic, link.traffic.counts)
            self._dispatch(ev.LinkDown(link.number))

    async def _receive(self, link: PeerLink, data: bytes) -> None:
        """Give a message to the core. Returns once the sender may go on, so that its next message is read.

        Deltas wait while too many records wait for the disk. If it stays so, or the disk takes nothing,
        anti-entropy brings them later. Member records, pings and all other messages do not wait.
        """
        size = len(data)
        if not self._writer.has_room and (rest := _without_deltas(data)) is not data:
            await link.while_up(self._writer.room(), PAUSE_MAX_S)
            data = data if self._writer.has_room else rest
        begun = time.thread_time()
        effects = self._dispatch(ev.Received(link.number, data))
        sent, link.traffic.charged = link.traffic.sent - link.traffic.charged, link.traffic.sent
        cost = cost_of_message(
            received=size,
            sent=sent,
            cpu_s=time.thread_time() - begun,
            fresh=sum(isinstance(effect, fx.Store) for effect in effects),
        )
        pause = self.scores.charge(link.node_id, link.origin, cost)
        if pause > 0.0:
            link.throttled_s += pause
            await link.while_up(asyncio.sleep(pause))


def _sums(*counts: list[int]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _without_deltas(data: bytes) -> bytes:
    """A message without the deltas in it; the same bytes if there are none."""
    try:
        message = decode(data)
    except PeerError:
        return data  # the core says what is wrong with it
    if isinstance(message, NewDelta):
        return encode(Records(()))
    if not isinstance(message, Records):
        return data
    others = tuple(entry for entry in message.entries if entry[0][0] != RecordKind.DELTA)
    return encode(Records(others)) if len(others) < len(message.entries) else data


class Dialler:
    """Dials peers, except those that are turned away, and carries the links that come up."""

    def __init__(
        self,
        local: LocalNode,
        access: Access,
        links: LinkTable,
        dispatch: Callable[[ev.Event], object],
    ) -> None:
        self._local = local
        self._access = access
        self._links = links
        self._dispatch = dispatch
        self._tls: ssl.SSLContext | bool = client_context() if local.certificate else False
        self._client: aiohttp.ClientSession | None = None

    def start(self, dials_from: str | None) -> None:
        """Make ready to dial, from an address of ours if one is named."""

        async def refuse(session: object, context: object, params: Any) -> NoReturn:
            params.response.close()
            raise RefusedError("it redirects us to another address")

        # A peer that we dial must not make us send a request to what only this machine can reach.
        no_redirects = aiohttp.TraceConfig()
        no_redirects.on_request_redirect.append(refuse)
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=64,
                ssl=self._tls,
                resolver=Resolver(),
                socket_factory=sockets_at(dials_from) if dials_from else None,
            ),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),  # a third of a chunk's request
            timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S),
            trace_configs=[no_redirects],
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def stop(self) -> None:
        """Close the links that were dialled, and all their connections."""
        if self._client is not None:
            assert self._client.connector is not None
            with suppress(AttributeError):  # as in `cut`, of a connection on which a peer has sent too much
                await self._client.connector.close(abort_ssl=True)  # else it waits for each peer

    async def dial(self, effect: fx.Dial) -> None:
        """Dial a peer and carry the link until it ends. The core is told if it never came up."""
        scores, link = self._links.scores, None
        try:
            parse_address(effect.address)  # a peer may have made it up
            if not scores.refused_for(effect.node_id):
                link = await self.connect(effect.address, effect.node_id, effect.fingerprint)
        except ConfigError as error:
            log.debug("%s", error)
        except PeerError as error:
            scores.complain(f"{effect.address}:", str(error))
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("cannot reach %s: %s", effect.address, error)
        if link is None:
            self._dispatch(ev.DialFailed(effect.address))
        else:
            await self._links.carry(link)

    async def connect(self, address: str, expected: bytes | None, fingerprint: bytes = b"") -> PeerLink:
        """Connect and shake hands.

        `expected` and `fingerprint` pin the node id and the certificate, if they are known. Raises OSError,
        TimeoutError, aiohttp.ClientError or PeerError if no link comes up.
        """
        assert self._client is not None
        base_url = f"{self._local.scheme}://{address}{PREFIX}"
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            try:
                socket = await self._client.ws_connect(
                    f"{base_url}/link",
                    ssl=aiohttp.Fingerprint(fingerprint) if fingerprint and self._local.certificate else True,
                    compress=0,
                    autoping=False,
                    max_msg_size=MESSAGE_BYTES_MAX,
                    timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                )
            except aiohttp.WSServerHandshakeError as error:
                wait_s = error.headers.get("Retry-After", "") if error.headers else ""
                if error.status == 429 and wait_s.isdecimal():
                    raise RefusedError(f"it turns our address away for another {wait_s} s") from None
                raise
            tls = socket.get_extra_info("ssl_object")
            binding = fingerprint_of(tls.getpeercert(binary_form=True)) if tls else b""
            shake = ClientHandshake(
                self._local.identity,
                self._local.swarm_id,
                binding,
                os.urandom(NONCE_BYTES),
                expected,
                credential=self._access.own_credential(),
                vet=self._access.vet,
            )
            try:
                await socket.send_bytes(shake.hello(await socket.receive_bytes()))
                node_id, session = shake.finish(await socket.receive_bytes())
                if self._links.scores.refused_for(node_id):
                    raise RefusedError(f"{short(node_id)} answers there, and is turned away for misbehaviour")
            except BaseException as error:
                await socket.close()
                if isinstance(error, TypeError):  # the peer closed, or sent text, where bytes were due
                    raise RefusedError("the peer ended the handshake") from None
                raise
        pin = aiohttp.Fingerprint(binding) if binding else self._tls
        dialled = Dialled(address, base_url, self._client, pin)
        return PeerLink(node_id, socket, session, credential=shake.peer_credential, dialled=dialled)
