"""Bytes per second of every link, from its counters."""

from collections import deque
from collections.abc import Iterable

from gossamer.node.network.link import PeerLink, Traffic

SAMPLES = 6
"""How many looks, a second apart, a rate is measured over: steady to the eye, and still current."""


class Rates:
    """Reads the counters of links at intervals."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, int, int]]] = {}

    def look(self, links: Iterable[PeerLink], now: float) -> None:
        """Read the counters; links that are gone are forgotten."""
        kept = {}
        for link in links:
            samples = self._samples.get(link.number) or deque(maxlen=SAMPLES)
            samples.append((now, *_totals(link.traffic)))
            kept[link.number] = samples
        self._samples = kept

    def of(self, number: int) -> tuple[float, float]:
        """Bytes sent and received per second on a link, 0 if it is too new to tell."""
        samples = self._samples.get(number)
        if not samples or samples[-1][0] <= samples[0][0]:
            return 0.0, 0.0
        (begin, sent, received), (end, sent_now, received_now) = samples[0], samples[-1]
        return (sent_now - sent) / (end - begin), (received_now - received) / (end - begin)


def _totals(traffic: Traffic) -> tuple[int, int]:
    return traffic.sent + traffic.payload_sent, traffic.received + traffic.payload_received
