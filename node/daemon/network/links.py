"""One authenticated WebSocket to a peer: a bounded queue out, a stream of messages in."""

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from socket import SHUT_RDWR
from typing import Protocol

import aiohttp
from aiohttp import web

from gossamer.node.address import network_group, origin_of, unmapped
from gossamer.node.daemon.network.clocks import offset_of
from gossamer.protocol.limits import SEND_QUEUE_BYTES_MAX
from gossamer.protocol.messages import Message, encode
from gossamer.protocol.payloads.chunks import Chunk

WebSocket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse

WRITE_TIMEOUT_S = 30.0
"""A peer that reads nothing for this long is cut off; it will be dialled again."""

CLOSING_TIMEOUT_S = 5.0
"""Messages queued on a link that was hung up go out within this time, or not at all. Such a link no longer
counts as one, so without this limit a peer that reads slowly could keep any number of them."""

CLOSE_TIMEOUT_S = 2.0
"""For the other side to confirm that the link is closed."""

SESSION_HEADER = "Gossamer-Session"
"""Hex of the session that a link's handshake agreed on: it tells which peer an HTTP request is from."""


@dataclass(slots=True)
class Traffic:
    """Bytes of one link, both of its WebSocket and of the chunks that belong to it."""

    sent: int = 0
    received: int = 0
    payload_sent: int = 0
    payload_received: int = 0
    charged: int = 0
    """The value of `sent` when the peer was last charged."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """How we reached a peer. HTTP requests go where the link went, pinned to the certificate shown there."""

    address: str
    base_url: str
    http: aiohttp.ClientSession
    ssl: aiohttp.Fingerprint | ssl.SSLContext | bool


class PeerLink:
    """A link whose handshake is done."""

    def __init__(
        self,
        number: int,
        node_id: bytes,
        socket: WebSocket,
        session: bytes,
        *,
        credential: bytes = b"",
        dialled: Dialled | None = None,
    ) -> None:
        self.number = number
        self.node_id = node_id
        self.session = session
        self.credential = credential
        """The grant that the peer showed, if any."""
        self.dialled = dialled
        """None if the peer dialled us."""
        self.traffic = Traffic()
        self.serving = asyncio.Lock()
        """Held while a chunk waits for its turn and goes out, see `uplink`. Chunks go one after another,
        since the first of several is of use before all have been sent."""
        self.clock_offset_s: float | None = None
        """How far the peer's clock is ahead of ours, if it has told since ours was last set."""
        self.dropped = 0
        """Number of messages dropped because the peer reads too slowly."""
        self.throttled_s = 0.0
        """How long the link was left unread because the peer sends too much."""
        self._socket = socket
        self._connection = socket.get_extra_info("socket")
        peer = socket.get_extra_info("peername")
        self.origin = origin_of(str(peer[0])) if peer else None
        """The name under which the peer's address has its budget; None for this machine's own."""
        self.group = network_group(str(peer[0])) if peer else None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._news = asyncio.Event()
        self._closing = False
        self._deadline: asyncio.TimerHandle | None = None
        """When a link that was hung up is cut."""
        self._ending = asyncio.Event()

    @property
    def outbound(self) -> bool:
        return self.dialled is not None

    def note_date(self, date: str | None) -> None:
        """Note the peer's time, from the Date header of a request or answer that has just begun."""
        told = offset_of(date, time.time())
        if told is not None:
            self.clock_offset_s = told

    @property
    def address(self) -> str | None:
        """The address at which we dialled the peer, if we did."""
        return self.dialled.address if self.dialled else None

    @property
    def is_closing(self) -> bool:
        """Whether nothing but what is queued will be carried any more."""
        return self._closing

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
        self._news.set()

    def close_soon(self) -> None:
        """Close once the queue has gone out, within `CLOSING_TIMEOUT_S`."""
        if not self._closing:
            self._closing = True
            self._deadline = asyncio.get_running_loop().call_later(CLOSING_TIMEOUT_S, self._cut)
        self._news.set()
        self._ending.set()

    async def ended(self) -> None:
        """Wait until the link ends."""
        await self._ending.wait()

    async def rest(self, seconds: float) -> None:
        """Read nothing for `seconds`, or until the link ends: its peer sends more than it may."""
        self.throttled_s += seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def run(self, on_message: Callable[[bytes], Awaitable[None]]) -> None:
        """Carry messages both ways until either side closes; always ends with the socket closed."""
        writer = asyncio.create_task(self._write(), name=f"link-{self.number}-write")
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self.traffic.received += len(message.data)
                await on_message(message.data)
                await asyncio.sleep(0)  # others' turn: hundreds of messages may have come at once
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
            while self._queue or not self._closing:
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await self._socket.send_bytes(data)
                    self.traffic.sent += len(data)
                self._news.clear()
                if not self._closing:
                    await self._news.wait()
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


# --- What the transport asks of the node that it works for: three interfaces, without implementation.


class Receiver(Protocol):
    """Takes links as they come and go, and the messages that they carry."""

    def link_up(self, link: PeerLink) -> None: ...

    def link_down(self, link: PeerLink) -> None: ...

    async def message(self, link: PeerLink, data: bytes) -> None: ...


class Chunks(Protocol):
    """Gives chunks to linked peers, and takes those that we want from them."""

    def expected_size(self, blob: bytes) -> int | None:
        """The largest size of a chunk that we want now, None for any other."""
        ...

    async def can_keep(self) -> bool:
        """Whether a chunk that comes now could be stored. If none can, the answer takes a moment."""
        ...

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        """A wanted chunk has come, and its hash is right. Returns whether it could be stored."""
        ...

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        """A peer did not bring a chunk, or brought a wrong one: there is no need to wait for it."""
        ...

    def holds(self, blob: bytes) -> bool:
        """Whether a chunk is here, as far as is known without reading it."""
        ...

    async def read_chunk(self, blob: bytes) -> Chunk | None: ...


class Admission(Protocol):
    """Decides who may link to us and who may ask us questions."""

    @property
    def answers_anyone(self) -> bool:
        """Whether strangers may ask for the manifest and the status."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether what is delivered now might not be kept."""
        ...

    def own_credential(self) -> bytes:
        """The credential that we show to others to be let in."""
        ...

    def vet(self, node_id: bytes, credential: bytes) -> None:
        """Check that a node may link to us. Raises RefusedError."""
        ...

    def vet_question(self, node_id: bytes, credential: bytes) -> None:
        """Check that a node may ask how we are doing. Raises RefusedError."""
        ...

    def deliver(self, credential: bytes) -> None:
        """Take in a grant or revocation from anybody. Raises PeerError if no owner has signed it."""
        ...


# --- The links that are up, by number: sending over them, hanging up, and their traffic so far.

log = logging.getLogger("gossamer.node")


class LinkTable(Mapping[int, PeerLink]):
    """A table of links. `Reception` adds them as they come up, and removes them."""

    def __init__(self) -> None:
        self._links: dict[int, PeerLink] = {}
        self._past_traffic = [0, 0, 0, 0]
        self._encoded: tuple[Message, bytes] | None = None
        self.dialled_by_others = 0
        """How often another node has reached us."""

    def __getitem__(self, number: int) -> PeerLink:
        return self._links[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: PeerLink) -> None:
        """A link has come up."""
        self._links[link.number] = link
        self.dialled_by_others += not link.outbound

    def remove(self, link: PeerLink) -> None:
        """A link has ended."""
        self._links.pop(link.number, None)
        self._past_traffic = _sum(self._past_traffic, link)

    def send(self, number: int, message: Message) -> None:
        """Send over a link, if it is still up. A message to several links in a row is serialised once."""
        if number not in self._links:
            return
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        self._links[number].send(self._encoded[1])

    def hang_up(self, number: int, reason: str) -> None:
        """Close a link once its queue has gone out."""
        if number in self._links:
            log.debug("closing link %d: %s", number, reason)
            self._links[number].close_soon()

    def turn_away(self, node_id: bytes) -> None:
        """A peer misbehaved too often: end its links."""
        for link in self._links.values():
            if link.node_id == node_id:
                link.close_soon()

    def forget_clocks(self) -> None:
        """Our clock was set: forget how far the clocks of our peers are from it."""
        for link in self._links.values():
            link.clock_offset_s = None

    def traffic(self) -> list[int]:
        """Bytes of all links so far: control sent and received, payload sent and received."""
        total = self._past_traffic
        for link in self._links.values():
            total = _sum(total, link)
        return total


def _sum(total: list[int], link: PeerLink) -> list[int]:
    traffic = link.traffic
    counts = (traffic.sent, traffic.received, traffic.payload_sent, traffic.payload_received)
    return [past + now for past, now in zip(total, counts, strict=True)]
