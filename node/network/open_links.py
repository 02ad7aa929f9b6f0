"""The links that are up, by number: sending over them, hanging up, and their traffic so far."""

import logging
from collections.abc import Iterator, Mapping

from gossamer.node.network.link import PeerLink
from gossamer.protocol.messages import Message, encode

log = logging.getLogger("gossamer.node")


class OpenLinks(Mapping[int, PeerLink]):
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
