"""The links that are up, by number: what they carry goes to the core, and new ones are dialled for it."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import aiohttp

from gossamer.node.address import parse_address
from gossamer.node.network.link import PeerLink
from gossamer.protocol import effects as fx
from gossamer.protocol.errors import ConfigError, PeerError
from gossamer.protocol.messages import Message, encode

if TYPE_CHECKING:
    from gossamer.node.daemon import Daemon

log = logging.getLogger("gossamer.node")


class OpenLinks(Mapping[int, PeerLink]):
    """The transport's `Receiver`, for one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._links: dict[int, PeerLink] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        """For each link that we dialled: puts what its peer asks for."""
        self._past_traffic = [0, 0, 0, 0]
        self._encoded: tuple[Message, bytes] | None = None

    def __getitem__(self, number: int) -> PeerLink:
        return self._links[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    # -- coming and going

    def link_up(self, link: PeerLink) -> None:
        daemon = self._daemon
        self._links[link.number] = link
        daemon.watching.link_up(link)
        if link.outbound:
            self._serving[link.number] = daemon.spawn(daemon.transfers.serve_asked(link))
        daemon.carry_out(daemon.acquaintances.learn_address(link))
        daemon.dispatch(
            fx.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )

    def link_down(self, link: PeerLink) -> None:
        self._links.pop(link.number, None)
        self._past_traffic = _sum(self._past_traffic, link)
        if link.number in self._serving:
            self._serving.pop(link.number).cancel()
        if not self._daemon.stopping:
            self._daemon.dispatch(fx.LinkDown(link.number))

    async def dial(self, effect: fx.Dial) -> None:
        """Dial a peer and carry the link until it ends; the core is told if it never came up."""
        daemon = self._daemon
        try:
            parse_address(effect.address)  # it may be a peer's word
            if not daemon.policing.is_greylisted(effect.node_id):
                await daemon.transport.dial(effect.address, effect.node_id, effect.fingerprint)
                return
        except ConfigError as error:
            log.debug("%s", error)
        except PeerError as error:
            daemon.policing.complain(f"{effect.address}:", str(error))
        except aiohttp.ServerFingerprintMismatch:
            daemon.policing.complain(f"{effect.address}:", "shows another certificate than its own row names")
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("cannot reach %s: %s", effect.address, error)
        daemon.dispatch(fx.DialFailed(effect.address))

    def hang_up(self, number: int, reason: str) -> None:
        """Close a link once its queue has gone out; chunks that its peer asked for go no more."""
        if number in self._links:
            log.debug("closing link %d: %s", number, reason)
            self._links[number].close_soon()
        if number in self._serving:  # it may have asked for chunks before
            self._serving[number].cancel()

    def turn_away(self, node_id: bytes) -> None:
        """A peer misbehaved too often: end its link."""
        for link in self._links.values():
            if link.node_id == node_id:
                link.close_soon()

    # -- what they carry

    def send(self, number: int, message: Message) -> None:
        """Send over a link, if it is still up. What goes to several in a row is serialised once."""
        if number not in self._links:
            return
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        self._links[number].send(self._encoded[1])

    async def message(self, link: PeerLink, data: bytes) -> None:
        begun = time.thread_time()
        effects = self._daemon.dispatch(fx.Received(link.number, data))
        fresh = sum(isinstance(effect, fx.Store) for effect in effects)
        pause = self._daemon.policing.heard(link, len(data), time.thread_time() - begun, fresh)
        await self._daemon.writer.room()
        if pause > 0.0:
            await link.rest(pause)

    def expected_size(self, blob: bytes) -> int | None:
        return self._daemon.core.fetcher.expected_size(blob)

    async def read_chunk(self, blob: bytes) -> bytes | None:
        self._daemon.shelf.touch(blob)
        return await self._daemon.transfers.read(blob)

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        return await self._daemon.transfers.store(blob, data)

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        self._daemon.dispatch(fx.ChunkFailed(link.number, blob))

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
