"""A swarm of real protocol cores in virtual time, on hosts with lines of their own (see `access`).

Every decision is that of `gossamer.protocol.replica`, as in the daemon and in tests/sim. All that is not
sent is left out: payloads are sizes without bytes, nothing is merged, and disks take no time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from random import Random

from benchmarks.access import Flow, Host, Line
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.messages import Decline, encode
from gossamer.protocol.payloads import TensorSpec, payload_chunk_sizes
from gossamer.protocol.records import NO_RECORD, DeltaBody
from gossamer.protocol.replica import Replica
from tests.sim.loop import Loop
from tests.sim.memo import Encoder
from tests.sim.trace import Trace

PACKED = 0.48
"""An int4 payload's size on the line, as a share of its length: 0.45 to 0.50 in the learning benchmark."""

CREATED = 1_700_000_000
HEAD_BYTES = 220
"""Header of an HTTP request, and of its response: 228 and 205 bytes for a GET, with TLS."""

SYNC_S = 0.005
"""Time of a durable write of an own record."""

HANDSHAKE_ROUND_TRIPS = 4
"""Round trips for TCP, TLS 1.3, the WebSocket's upgrade, and the hello."""


def manifest_of(parameters: int) -> Manifest:
    """The manifest of a swarm with one fragment of this many parameters, and defaults otherwise."""
    values = {
        "swarm": {"name": "simulated", "created": CREATED},
        "task": {"name": "none"},
        "layout": {"tensors": [TensorSpec("w", (parameters // 1000, 1000), "rda")]},
        "genesis": {"digest": sha256(b"").hexdigest()},
    }
    return from_values(values, "the benchmark")


@dataclass(slots=True)
class End:
    """One end of a link."""

    node: "Node"
    number: int
    messages: Flow
    puts: Flow
    """Chunks put to a peer that asks go one after another."""
    peer: "End | None" = None


@dataclass(slots=True)
class Counters:
    """Bytes that one node has received."""

    payload: int = 0
    control: int = 0


class Node:
    """One core, and an adapter that carries out its effects."""

    def __init__(self, swarm: "Swarm", index: int, bootstrap: tuple[str, ...]) -> None:
        self.swarm = swarm
        self.index = index
        self.host = Host(swarm.loop, swarm.line)
        self.chunks: set[bytes] = set()
        self.received = Counters()
        self.held_at: dict[bytes, float] = {}
        self._lacking: set[bytes] = set()
        """When a delta's payload was complete here, by record id."""
        self.identity = Identity.from_seed(sha256(f"{swarm.seed}/key {index}".encode()).digest())
        self._ends: dict[int, End] = {}
        self._numbers = 0
        self.uploads = 0
        self._wake_due = float("inf")
        self.core = Replica(
            identity=self.identity,
            manifest=swarm.manifest,
            info=NodeInfo(name=f"n{index}", trains=True, incarnation=1, bootstrap=bootstrap),
            fits=lambda blob, size: blob in self.chunks or None,
            unix_offset_s=CREATED + 3600.0,
            rng=Random(f"{swarm.seed}/core {index}"),
        )

    def start(self) -> None:
        now = self.swarm.loop.now
        self._carry_out(self.core.restore([], [], now))
        self._carry_out(self.core.announce((str(self.index),)))
        self._set_timer()

    def dispatch(self, event: ev.Event) -> None:
        """Give the core an event, and carry out the effects that it returns."""
        self._carry_out(self.core.handle(event, self.swarm.loop.now))
        arrived = {record_id for record_id in self._lacking if self.core.holds(record_id)}
        self.held_at.update(dict.fromkeys(arrived, self.swarm.loop.now))
        self._lacking -= arrived
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.core.next_wake()
        if due < self._wake_due:
            self._wake_due = due
            self.swarm.loop.at(due, self._wake, due)

    def _wake(self, due: float) -> None:
        if due == self._wake_due:  # otherwise an earlier one has been set since
            self._wake_due = float("inf")
            self.dispatch(ev.Wake())

    def _carry_out(self, effects: Iterable[fx.Effect]) -> None:
        loop = self.swarm.loop
        for effect in effects:
            match effect:
                case fx.Send():
                    self._send(effect.link, self.swarm.encode(effect.message))
                case fx.Get():
                    self._get(effect)
                case fx.Put():
                    self._put(effect)
                case fx.Store():
                    self._lacking.add(effect.delta.record_id)
                    if effect.own:
                        chunks = effect.delta.body.chunks
                        chunk = bytes(self.swarm.sizes[chunks[0]]) if len(chunks) == 1 else b""
                        loop.after(SYNC_S, self.dispatch, ev.Stored(effect.delta, chunk))
                case fx.Keep():
                    self.received.control -= len(effect.data)
                    loop.after(0.0, self._arrived, effect.blob)
                case fx.Dial():
                    self.swarm.dial(self, effect.address)
                case fx.Hangup():
                    self._hang_up(effect.link)
                case fx.Adopt():
                    loop.after(0.0, self.dispatch, ev.Adopted(effect.claim))

    # -- links

    def link_to(self, peer: "Node") -> End:
        self._numbers += 1
        end = self._ends[self._numbers] = End(self, self._numbers, Flow(peer.host), Flow(peer.host))
        return end

    def links_to_farthest(self) -> int:
        """How many links lie between this node and the node that is farthest from it."""
        reached, border, distance = {self.index}, [self], 0
        while border := [peer for node in border for peer in node._peers() if peer.index not in reached]:
            reached.update(node.index for node in border)
            distance += 1
        return distance

    def _peers(self) -> list["Node"]:
        return [end.peer.node for end in self._ends.values() if end.peer is not None]

    def _send(self, link: int, data: bytes) -> None:
        end = self._ends.get(link)
        if end is not None and end.peer is not None:
            peer = end.peer
            self.host.send(end.messages, len(data), partial(peer.node.take_message, peer, data))

    def take_message(self, end: End, data: bytes) -> None:
        self.received.control += len(data)
        if end.number in self._ends:
            self.dispatch(ev.Received(end.number, data))

    def _hang_up(self, link: int) -> None:
        end = self._ends.pop(link, None)
        if end is not None and end.peer is not None:
            self.swarm.loop.after(0.0, self.dispatch, ev.LinkDown(link))
            peer = end.peer
            self.host.send(end.messages, 0, partial(peer.node.take_end, peer))

    def take_end(self, end: End) -> None:
        if self._ends.pop(end.number, None) is not None:
            self.dispatch(ev.LinkDown(end.number))

    # -- chunks: each on a connection of its own

    def publish(self, round_: int, payload_bytes: int) -> bytes:
        """Publish a delta; returns its last chunk's hash."""
        sizes = payload_chunk_sizes(payload_bytes)
        blobs = tuple(sha256(f"{self.index}/{round_}/{i}".encode()).digest() for i in range(len(sizes)))
        self.chunks.update(blobs)
        self.swarm.sizes.update(zip(blobs, map(packed_bytes, sizes), strict=True))
        self.dispatch(
            ev.Publish(
                DeltaBody(
                    round=round_,
                    base=round_ - 1,
                    tokens=1,
                    steps=1,
                    loss=1.0,
                    codec=self.swarm.manifest.outer.codecs[0].name,
                    payload_bytes=payload_bytes,
                    chunks=blobs,
                    previous=NO_RECORD,
                )
            )
        )
        return blobs[-1]

    def upload(self, flow: Flow, size: int, arrive: Callable[[], None]) -> None:
        def arrived() -> None:
            self.uploads -= 1
            arrive()

        self.uploads += 1
        self.host.send(flow, HEAD_BYTES + size, arrived)

    def has_room(self) -> bool:
        return self.uploads < limits.UPLOADS_MAX

    def _get(self, effect: fx.Get) -> None:
        end = self._ends.get(effect.link)
        if end is None or end.peer is None:
            return
        holder = end.peer.node

        def serve() -> None:
            holder.received.control += HEAD_BYTES
            if effect.blob in holder.chunks and holder.has_room():
                holder.upload(end.peer.puts, self.swarm.sizes[effect.blob], partial(got, True))
            else:
                holder.host.send(Flow(self.host), HEAD_BYTES, partial(got, False))

        def got(is_here: bool) -> None:
            self._got(effect, is_here)

        self.host.send(Flow(holder.host), HEAD_BYTES, serve)

    def _got(self, effect: fx.Get, is_here: bool) -> None:
        self.received.control += HEAD_BYTES
        if is_here:
            self._arrived(effect.blob)
        self.dispatch(ev.ChunkFailed(effect.link, effect.blob))  # as the daemon does, always

    def _put(self, effect: fx.Put) -> None:
        end = self._ends.get(effect.link)
        if end is None or end.peer is None:
            return
        if effect.blob not in self.chunks or not self.has_room():
            self._send(effect.link, encode(Decline(effect.blob)))
            return
        receiver = end.peer.node
        size = self.swarm.sizes[effect.blob]

        def take() -> None:
            receiver.received.control += HEAD_BYTES
            if receiver.core.fetcher.expected_size(effect.blob) is None:
                receiver.received.payload += size  # it came in vain
            else:
                receiver._arrived(effect.blob)

        self.upload(end.puts, size, take)

    def _arrived(self, blob: bytes) -> None:
        self.received.payload += self.swarm.sizes[blob]
        self.chunks.add(blob)
        self.dispatch(ev.ChunkArrived(blob))


def packed_bytes(size: int) -> int:
    """Bytes of a payload, or of a chunk of one, packed as it is sent."""
    return round(PACKED * size)


class Swarm:
    """All nodes, and the virtual time."""

    def __init__(self, nodes: int, line: Line, parameters: int, seed: int = 0) -> None:
        self.loop = Loop()
        self.line = line
        self.seed = seed
        self.manifest = manifest_of(parameters)
        self.encode = Encoder(Trace())
        self.sizes: dict[bytes, int] = {}
        """Size of every chunk, packed as it is sent, by hash."""
        self.nodes = [Node(self, i, ("0",) if i else ()) for i in range(nodes)]

    def dial(self, source: Node, address: str) -> None:
        self.loop.after(
            2 * HANDSHAKE_ROUND_TRIPS * self.line.latency_s,
            self._link,
            source,
            self.nodes[int(address)],
            address,
        )

    def _link(self, source: Node, target: Node, address: str) -> None:
        ours, theirs = source.link_to(target), target.link_to(source)
        ours.peer, theirs.peer = theirs, ours
        target.dispatch(ev.LinkUp(theirs.number, source.identity.node_id, False, None))
        source.dispatch(ev.LinkUp(ours.number, target.identity.node_id, True, address))

    def received(self) -> Counters:
        """Bytes that all nodes together have received."""
        counters = [node.received for node in self.nodes]
        return Counters(sum(c.payload for c in counters), sum(c.control for c in counters))

    def sent(self) -> list[float]:
        """Bytes that each node has sent over its line."""
        return [node.host.wire_sent for node in self.nodes]

    def run_until_all_hold(self, deltas: int, round_: int, give_up_s: float) -> float:
        """Go on until all nodes hold this many deltas of a round, with payloads; returns when they did.

        Raises TimeoutError.
        """
        deadline = self.loop.now + give_up_s
        while self.loop.now < deadline:
            self.loop.run(self.loop.now + 0.1)
            ids = [set(node.core.ledger.ids(round_)) & node.held_at.keys() for node in self.nodes]
            if all(len(held) >= deltas for held in ids):
                return max(node.held_at[i] for node, held in zip(self.nodes, ids, strict=True) for i in held)
        raise TimeoutError(f"not everywhere within {give_up_s:.0f} s of virtual time")
