"""The network: hosts, paths with their own latency and bandwidth each way, and streams like TCP's.

The core gets messages through streams: ordered and whole, until the stream is closed. While a pair of hosts
is split, bytes wait at the sender. They go out with the first retransmission that succeeds, which after a
long silence may be long after the network has come back. A host without power answers nothing. One that is
back, or whose process died, resets the streams that it no longer knows.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gossamer.protocol.limits import SEND_QUEUE_BYTES_MAX
from tests.sim.loop import Loop
from tests.sim.weather import Weather

HANDSHAKE_TIMEOUT_S = 10.0
FRAME_BYTES = 60
"""Bytes of TLS, TCP and IP around each message."""

_RETRANSMIT_S, _RETRANSMIT_MAX_S = 0.2, 120.0
OPEN, FIN = 1, 2
Item = bytes | int


class Party(Protocol):
    """What the network must know about a node."""

    index: int
    powered: bool
    """Whether its host runs at all."""
    running: bool
    """Whether its process runs."""
    responsive: bool
    """Whether it runs and is not stopped."""
    life: int
    """How many times its process has started."""

    def deliver(self, life: int, action: Callable[..., None], *args: Any) -> None:
        """Do something in the node's process: later if it is stopped, never if that life is over."""
        ...

    def admits(self, other: "Party") -> bool:
        """Whether it lets another node in, as of the handshake."""
        ...

    def link_opened(self, end: "End", outbound: bool, address: str | None) -> None: ...

    def link_closed(self, end: "End") -> None: ...

    def dial_failed(self, address: str) -> None: ...

    def message(self, end: "End", data: bytes, damaged: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Path:
    """One direction between two hosts."""

    latency_s: float
    jitter_s: float
    bytes_per_s: float
    loss: float


class Pipe:
    """One direction of a stream."""

    __slots__ = ("_free_at", "_last", "_net", "_path", "_waiting", "lost", "pair", "since", "target")

    def __init__(self, net: "Network", source: int, target: "End") -> None:
        self._net = net
        self.pair = (source, target.party.index)
        self.target = target
        self._path = net.paths[self.pair]
        self._free_at = 0.0
        self._last = 0.0
        self._waiting: deque[Item] = deque()
        self.since = 0.0
        self.lost = False
        """Whether the sender lost power: what it had not sent is gone."""

    def send(self, item: Item) -> None:
        net, path = self._net, self._path
        random, weather, now = net.random, net.weather, net.loop.now
        start = self._free_at if self._free_at > now else now
        size = FRAME_BYTES
        if isinstance(item, bytes):
            size += len(item)
            if (start - now) * path.bytes_per_s + size > SEND_QUEUE_BYTES_MAX:
                net.dropped += 1
                return
        self._free_at = start = start + size / path.bytes_per_s
        time = start + (path.latency_s + path.jitter_s * random()) * weather.slowness
        loss = path.loss + weather.loss
        if loss and random() < loss:
            time += _RETRANSMIT_S * (1.0 + 3.0 * random())
        if weather.mischief is not None and isinstance(item, bytes):
            self._send_roughly(item, time)
            return
        self._last = time = max(time, self._last)
        net.loop.at(time, self._arrive, item, False)

    def _send_roughly(self, item: bytes, time: float) -> None:
        mischief, rng = self._net.weather.mischief, self._net.rng
        assert mischief is not None
        if rng.random() < mischief.drop or self.pair in self._net.weather.one_way:
            return
        if rng.random() >= mischief.swap:
            self._last = time = max(time, self._last)
        damaged = rng.random() < mischief.damage
        if damaged:
            place = rng.randrange(len(item))
            item = item[:place] + bytes([item[place] ^ (1 + rng.randrange(255))]) + item[place + 1 :]
        self._net.loop.at(time, self._arrive, item, damaged)
        if rng.random() < mischief.double:
            self._net.loop.at(time + rng.random(), self._arrive, item, damaged)

    def _arrive(self, item: Item, damaged: bool) -> None:
        target = self.target
        if target.is_open and not self._waiting and not self.lost and type(item) is bytes:
            party = target.party  # the usual case, in few steps
            if party.life == target.life and party.responsive and self.pair not in self._net.closed:
                party.message(target, item, damaged)
                return
        if self.lost:
            return
        if self._waiting or self.pair in self._net.closed:
            if not self._waiting:
                self.since = self._net.loop.now
                self._net.stalled[self] = None
            self._waiting.append(item)
            return
        self._hand_over(item, damaged)

    def retry(self) -> None:
        """The pair may be open again: waiting bytes go out with the next retransmission."""
        now, wait, time = self._net.loop.now, _RETRANSMIT_S, self.since
        while time < now:
            time += wait
            wait = min(2 * wait, _RETRANSMIT_MAX_S)
        self._net.loop.at(time, self._flush)

    def _flush(self) -> None:
        if self.pair in self._net.closed:
            return  # `Network.changed` calls `retry` again
        self._net.stalled.pop(self, None)
        while self._waiting:
            self._hand_over(self._waiting.popleft(), False)

    def _hand_over(self, item: Item, damaged: bool) -> None:
        target = self.target
        if item == OPEN:
            target.party.deliver(target.life, target.opened)
        elif item == FIN:
            target.party.deliver(target.life, target.closed_by_peer)
        elif target.is_open:
            target.party.deliver(target.life, target.take, item, damaged)
        elif not (target.party.running and target.party.life == target.life):
            self._net.loop.after(self._path.latency_s, target.reset_peer)
        # else: we closed in good order, and what the peer still sends is taken in and dropped


class End:
    """One end of a stream. `number` is the link's number on this side."""

    __slots__ = ("address", "is_open", "is_opening", "life", "number", "out", "party", "peer")

    def __init__(self, party: Party, address: str | None) -> None:
        self.party = party
        self.life = party.life
        self.address = address
        """The address that we dialled; None for the accepting end."""
        self.number = 0
        self.is_open = False
        self.is_opening = False
        self.out: Pipe
        self.peer: End

    def send(self, data: bytes) -> None:
        if self.is_open:
            self.out.send(data)

    def close(self) -> None:
        """Close from our side; bytes sent before go out first."""
        if self.is_open or self.is_opening:
            self.is_open = self.is_opening = False
            self.out.send(FIN)

    def cut(self) -> None:
        """Our host lost power."""
        self.is_open = self.is_opening = False
        self.out.lost = True

    def opened(self) -> None:
        """The handshake is complete: called at the dialler's end."""
        if self.is_opening:
            self.is_opening, self.is_open = False, True
            self.party.link_opened(self, True, self.address)

    def give_up(self) -> None:
        """The handshake took too long."""
        if self.is_opening and self.address is not None:
            self.close()
            self.party.dial_failed(self.address)

    def take(self, data: bytes, damaged: bool) -> None:
        if self.is_open:
            self.party.message(self, data, damaged)

    def closed_by_peer(self) -> None:
        if self.is_open:
            self.is_open = False
            self.party.link_closed(self)
        elif self.is_opening and self.address is not None:
            self.is_opening = False
            self.party.dial_failed(self.address)

    def reset_peer(self) -> None:
        """Our host resets a stream that it does not know, in answer to data for it."""
        self.peer.party.deliver(self.peer.life, self.peer.closed_by_peer)


class Network:
    """All paths and streams."""

    def __init__(self, loop: Loop, weather: Weather, paths: dict[tuple[int, int], Path], seed: str) -> None:
        self.loop = loop
        self.weather = weather
        self.paths = paths
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.parties: dict[str, Party] = {}
        """By address."""
        self.closed: frozenset[tuple[int, int]] = frozenset()
        """Pairs between which nothing moves now, including those with a host without power."""
        self.stalled: dict[Pipe, None] = {}
        self.dropped = 0
        """Messages that did not fit into a link's queue. There must be none: no link falls so far behind."""

    def changed(self) -> None:
        """The weather or a host's power changed."""
        off = {party.index for party in self.parties.values() if not party.powered}
        dark = {pair for pair in self.paths if pair[0] in off or pair[1] in off} if off else set()
        weather = self.weather
        self.closed = frozenset(dark) if weather.mischief is not None else weather.closed | dark
        for pipe in list(self.stalled):
            if pipe.pair not in self.closed:
                pipe.retry()

    def is_closed(self, a: int, b: int) -> bool:
        """Whether a new connection between two hosts would get nowhere."""
        return (a, b) in self.closed or (a, b) in self.weather.closed

    # -- dialling

    def dial(self, source: Party, address: str) -> None:
        """Connect and shake hands: ends in `link_opened` at both, or in `dial_failed`."""
        self._knock(source, source.life, address, self.loop.now, 1.0)

    def _knock(self, source: Party, life: int, address: str, begun: float, wait: float) -> None:
        target = self.parties.get(address)
        if target is None or self.is_closed(source.index, target.index):
            if self.loop.now + wait < begun + HANDSHAKE_TIMEOUT_S:
                self.loop.after(wait, self._knock, source, life, address, begun, 2 * wait)
            else:
                self.loop.at(begun + HANDSHAKE_TIMEOUT_S, source.deliver, life, source.dial_failed, address)
            return
        round_trip = self.paths[source.index, target.index].latency_s * 2
        if not target.running:
            self.loop.after(round_trip, source.deliver, life, source.dial_failed, address)
            return
        client = End(source, address)
        client.life = life
        client.is_opening = True
        server = End(target, None)
        client.peer, server.peer = server, client
        client.out, server.out = Pipe(self, source.index, server), Pipe(self, target.index, client)
        deadline = begun + HANDSHAKE_TIMEOUT_S
        self.loop.at(deadline, source.deliver, life, client.give_up)
        self.loop.after(round_trip, target.deliver, target.life, self._accept, server, deadline)

    def _accept(self, server: End, deadline: float) -> None:
        pair = (server.party.index, server.peer.party.index)
        if self.loop.now > deadline or self.is_closed(*pair) or not server.peer.is_opening:
            return
        if not (server.party.admits(server.peer.party) and server.peer.party.admits(server.party)):
            server.out.send(FIN)
            return
        server.is_open = True
        server.out.send(OPEN)
        server.party.link_opened(server, False, None)
