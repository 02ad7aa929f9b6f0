"""Hosts in virtual time, each behind one line of its own: what it sends and what it receives share that line.

A line is served as TCP connections share one: the flows that wait take turns, a piece at a time. Between the
lines nothing is in the way but the latency. There is no loss and no slow start, and heads are counted as a
share of the bytes (TCP/IP and TLS: 4 % of full segments).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.loop import Loop

PIECE_BYTES = 16 * 1024
"""One TLS record. Flows take turns of this size."""

HEADS = 1.04
"""Bytes on the line for each byte that a connection carries."""

Arrive = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Line:
    """What a host's access line carries, the same both ways."""

    bytes_per_s: float
    latency_s: float
    """From any host to any other."""


class Flow:
    """One connection's way from a host to another: what is sent on it arrives in this order."""

    __slots__ = ("queue", "target")

    def __init__(self, target: "Host") -> None:
        self.target = target
        self.queue: deque[tuple[float, Arrive]] = deque()
        """Bytes left to send, and what to do when they have arrived."""


class Host:
    """Both directions of one line."""

    def __init__(self, loop: Loop, line: Line) -> None:
        self._loop = loop
        self._line = line
        self._waiting: deque[Flow] = deque()
        self._is_sending = False
        self._received_until = 0.0
        self.wire_sent = 0.0

    def send(self, flow: Flow, size: int, arrive: Arrive) -> None:
        """Queue some bytes on a flow."""
        if not flow.queue:
            self._waiting.append(flow)
        flow.queue.append((size * HEADS, arrive))
        if not self._is_sending:
            self._send_next()

    def _send_next(self) -> None:
        self._is_sending = bool(self._waiting)
        if not self._waiting:
            return
        flow = self._waiting.popleft()
        left, arrive = flow.queue.popleft()
        piece = min(left, PIECE_BYTES)
        if left > piece:
            flow.queue.appendleft((left - piece, arrive))
        if flow.queue:
            self._waiting.append(flow)
        self.wire_sent += piece
        self._loop.after(
            piece / self._line.bytes_per_s, self._sent, flow.target, piece, arrive if left <= piece else None
        )

    def _sent(self, target: "Host", piece: float, arrive: Arrive | None) -> None:
        self._loop.after(self._line.latency_s, target._receive, piece, arrive)
        self._send_next()

    def _receive(self, piece: float, arrive: Arrive | None) -> None:
        """A line hands on what it received in the order in which it came."""
        begun = max(self._loop.now, self._received_until)
        self._received_until = begun + piece / self._line.bytes_per_s
        if arrive is not None:
            self._loop.at(self._received_until, arrive)
