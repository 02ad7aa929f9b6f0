"""Hosts in virtual time, each behind one access line of its own, which all its connections share.

Flows share a line as TCP connections do: those that wait take turns, a piece at a time. Between the lines
there is only latency. There is no loss and no slow start, and headers are counted as a share of the bytes
(TCP/IP and TLS: 4 % of full segments).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.loop import Loop

PIECE_BYTES = 16 * 1024
"""One TLS record: flows take turns of this size."""

HEADS = 1.04
"""Bytes on the line for each byte that a connection carries."""

Arrive = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Line:
    """The rate of a host's access line, the same both ways, and its latency."""

    bytes_per_s: float
    latency_s: float
    """Seconds from any host to any other."""


class Flow:
    """One direction of a connection between two hosts: bytes arrive in the order in which they are sent."""

    __slots__ = ("queue", "target")

    def __init__(self, target: "Host") -> None:
        self.target = target
        self.queue: deque[tuple[float, Arrive]] = deque()
        """Bytes left to send, each with what to call when they have arrived."""


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
        """A line hands pieces on in the order in which they came."""
        begun = max(self._loop.now, self._received_until)
        self._received_until = begun + piece / self._line.bytes_per_s
        if arrive is not None:
            self._loop.at(self._received_until, arrive)
