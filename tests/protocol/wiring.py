"""Several `Replica` cores in one process: their effects are carried out in memory, in virtual time.

Everything follows from one seed: the same seed gives the same run, to the last effect. Messages are really
serialised to bytes. A `World` can lose, duplicate, reorder and delay them, cut the network into parts
(silently: links stay up and carry nothing, as with a cable pulled), freeze a node's event loop, and crash and
restart nodes.

It checks one thing by itself: after a Wake, a core never asks for another one at or before now.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.members import Health, NodeInfo
from gossamer.protocol.pace import Pace
from gossamer.protocol.payloads import encode_payload, split_payload
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica
from tests.protocol import builders

UNIX_OFFSET_S = builders.CREATED + 3600.0
"""Unix time minus the nodes' clocks: the swarm is over an hour old."""


@dataclass
class Weather:
    """What the network does to messages. Probabilities are per message."""

    loss: float = 0.0
    duplicates: float = 0.0
    reorders: bool = False
    delay: tuple[float, float] = (0.005, 0.05)


@dataclass
class Node:
    """A core, and what its adapter would keep: disk, links, and a record of what happened."""

    number: int
    identity: Identity
    address: str
    info: NodeInfo
    core: Replica
    disk: list[Delta] = field(default_factory=list)
    credentials: list[bytes] = field(default_factory=list)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Our link number -> (their node number, their link number)."""
    fetched: list[bytes] = field(default_factory=list)
    blames: list[fx.Blame] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Reasons that it was given, or gave itself, when a handshake was turned down."""
    expelled: str | None = None
    """The reason, once it has heard that it was revoked. It goes on nevertheless, as a liar would."""
    judged: list[tuple[float, int, Health]] = field(default_factory=list)
    running: bool = True
    trains: bool = False
    """Whether it has been caught up once."""
    frozen_until: float = 0.0
    slept: float = 0.0
    """How long its monotonic clock has stood still, seconds."""
    life: int = 0
    """Counts its starts, so that actions scheduled in an earlier life are dropped."""
    wake_at: float = float("inf")
    timer: int = 0

    def held(self) -> set[bytes]:
        """Ids of the valid deltas in the ledger whose payload is here."""
        ledger = self.core.ledger
        return {d.record_id for d in ledger if self.core.holds(d.record_id) and not ledger.is_void(d)}


class World:
    """The nodes and the network between them."""

    def __init__(
        self, seed: int, manifest: Manifest = builders.SMALL, weather: Weather | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.manifest = manifest
        self.weather = weather or Weather()
        self.now = 100.0
        self.nodes: dict[int, Node] = {}
        self.messages = 0
        self.by_kind: dict[str, int] = {}
        self.transcript = sha256()
        self.sends_along = False
        """Whether payloads may go along with their records."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._link_numbers = 0
        self._side: dict[int, int] = {}
        self._last_delivery: dict[int, float] = {}
        self._up_at: dict[int, float] = {}

    # -- nodes

    def add(
        self,
        number: int,
        bootstrap: Iterable[int] = (),
        *,
        trains: bool = True,
        dialable: bool = True,
        key_of: int | None = None,
        incarnation: int = 1000,
        credentials: Iterable[bytes] = (),
        unix_offset_s: float = UNIX_OFFSET_S,
    ) -> Node:
        """Start node `number`, which knows the addresses of the nodes `bootstrap`.

        `key_of`: another node, of which it is a copy. `credentials` are the grants and revocations that it
        has on its disk.
        """
        identity = builders.identity(number if key_of is None else key_of)
        info = NodeInfo(
            name=f"n{number}",
            trains=trains,
            incarnation=incarnation,
            bootstrap=tuple(f"host{n}:7700" for n in bootstrap),
        )
        blobs: dict[bytes, bytes] = {}
        address = f"host{number}:7700"
        node = Node(
            number,
            identity,
            address if dialable else "",
            info,
            self._core(identity, info, blobs, unix_offset_s),
            blobs=blobs,
            credentials=list(credentials),
        )
        self.nodes[number] = node
        self._begin(node)
        return node

    def _core(
        self,
        identity: Identity,
        info: NodeInfo,
        blobs: dict[bytes, bytes],
        unix_offset_s: float = UNIX_OFFSET_S,
    ) -> Replica:
        return Replica(
            identity=identity,
            manifest=self.manifest,
            info=info,
            fits=lambda blob, size: len(blobs[blob]) == size if blob in blobs else None,
            unix_offset_s=unix_offset_s,
            rng=random.Random(self.rng.getrandbits(64)),
        )

    def _begin(self, node: Node) -> None:
        held = [d.record_id for d in node.disk if all(blob in node.blobs for blob in d.body.chunks)]
        effects = node.core.restore(node.disk, held, self.now, credentials=node.credentials)
        self._carry_out(node, effects)
        self._carry_out(node, node.core.announce((node.address,) if node.address else ()))
        self._set_timer(node)

    def crash(self, node: Node, *, silently: bool = False) -> None:
        """Stop a node at once. `silently`: the others' links stay open, as when a machine loses power."""
        node.running = False
        node.life += 1
        for number in list(node.links):
            if not silently:
                self._close(node, number)
        if silently:
            node.links.clear()

    def restart(self, node: Node, *, keep_disk: bool = True, backup: list[Delta] | None = None) -> None:
        """Start a crashed node again, from its disk, its key alone, or a `backup` of its records."""
        node.running = True
        node.life += 1
        node.timer += 1
        if not keep_disk:
            node.disk.clear()
            node.blobs.clear()
        if backup is not None:
            node.disk[:] = backup
        node.trains = False
        node.info = NodeInfo(
            name=node.info.name,
            trains=node.info.trains,
            incarnation=node.info.incarnation + 1000,
            bootstrap=node.info.bootstrap,
        )
        node.core = self._core(node.identity, node.info, node.blobs)
        self._begin(node)

    def freeze(self, node: Node, seconds: float) -> None:
        """Block a node's event loop for a while: it sees nothing, and everything at once afterwards."""
        node.frozen_until = self.now + seconds

    def sleep(self, node: Node, seconds: float, *, suspended: bool) -> None:
        """Stop a node and its trainer for a while. `suspended`: its monotonic clock stands still too."""
        self.freeze(node, seconds)
        if suspended:
            self.after(seconds, lambda: self._wake_up(node, seconds))

    def _wake_up(self, node: Node, seconds: float) -> None:
        node.slept += seconds
        node.wake_at = float("inf")
        self.handle(node, ev.TimeSet(UNIX_OFFSET_S + node.slept))

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.running]

    # -- the network

    def partition(self, *sides: Iterable[int]) -> None:
        """Let messages pass only within each side. Nodes not named form one more side together."""
        self._side = {number: side for side, numbers in enumerate(sides) for number in numbers}

    def heal(self) -> None:
        self._side = {}

    def reachable(self, a: Node, b: Node) -> bool:
        return self._side.get(a.number, -1) == self._side.get(b.number, -1)

    def connect(self, a: Node, b: Node) -> None:
        """Make a link, as if `a` had dialled."""
        self._dial(a, fx.Dial(b.address, None))

    def inject(self, node: Node, link: int, data: bytes) -> list[fx.Effect]:
        """Give a node bytes as if they had come over one of its links."""
        return self.handle(node, ev.Received(link, data))

    # -- training

    def publish(self, node: Node, round_: int | None = None, **changes: object) -> None:
        """Make a node publish a delta, for its next round unless `round_` is given."""
        core = node.core
        round_ = core.own_last + 1 if round_ is None else round_
        fragment = core.layout.of_round(round_)
        payload = encode_payload("int8", fragment, builders.random_tensors(self.numpy, fragment, 1000))
        for chunk in split_payload(payload):
            node.blobs[sha256(chunk).digest()] = bytes(chunk)
        body = builders.body_of(payload, "int8", round_, len(core.layout.fragments), **changes)
        self.handle(node, ev.Publish(body))

    def train(self, node: Node, step_s: float, until: float) -> None:
        """Make a node do an inner step every `step_s` seconds, and publish when the pace says so."""
        pace = Pace(self.manifest.pace, len(node.core.layout.fragments))
        life = node.life
        steps, since = 0, self.now

        def step() -> None:
            nonlocal steps, since
            if not node.running or node.life != life or self.now >= until:
                return
            if node.frozen_until > self.now:
                self.after(node.frozen_until - self.now, step)
                return
            node.trains = node.trains or node.core.caught_up  # as in the daemon: once is enough
            if node.trains:
                steps += 1
                due = pace.due(node.core.own_last, node.core.clock_to_publish_by, steps, self.now - since)
                if due is not None:
                    self.publish(node, due)
                    steps, since = 0, self.now
            self.after(step_s, step)

        self.after(step_s, step)

    # -- time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass; stops early once `until` holds. Returns the seconds that passed."""
        start, end = self.now, self.now + seconds
        ask_at = start
        while self._queue and self._queue[0][0] <= end:
            if until is not None and self._queue[0][0] > ask_at:
                if until():
                    return self.now - start
                ask_at = self._queue[0][0] + 0.05
            self.now, _, action = heapq.heappop(self._queue)
            action()
        if until is None or not until():
            self.now = end
        return self.now - start

    def _set_timer(self, node: Node) -> None:
        wake_at = node.core.next_wake()
        if wake_at == node.wake_at:
            return
        node.wake_at = wake_at
        node.timer += 1
        timer, life = node.timer, node.life
        rounding = 1e-6 if node.slept else 0.0
        due = wake_at + node.slept + rounding
        self.after(max(0.0, due - self.now), lambda: self._wake(node, timer, life))

    def _wake(self, node: Node, timer: int, life: int) -> None:
        if not node.running or node.timer != timer or node.life != life:
            return
        if node.frozen_until > self.now:
            self.after(node.frozen_until - self.now, lambda: self._wake(node, timer, life))
            return
        node.wake_at = float("inf")
        self.handle(node, ev.Wake())
        awake = self.now - node.slept
        assert node.core.next_wake() > awake, "the core asks for a wake that is due already, for ever"

    # -- events and effects

    def handle(self, node: Node, event: ev.Event) -> list[fx.Effect]:
        """Give a core an event now, and carry out the effects that it returns."""
        before = {m.record.node_id: m.health for m in node.core.roster.members()}
        effects = node.core.handle(event, self.now - node.slept)
        for member in node.core.roster.members():
            if before.get(member.record.node_id) is not member.health:
                node.judged.append((self.now, self.number_of(member.record.node_id), member.health))
        self.transcript.update(f"{self.now} {node.number} {effects!r}".encode())
        self._carry_out(node, effects)
        self._set_timer(node)
        return effects

    def number_of(self, node_id: bytes) -> int:
        """The number of a node; -1 if it is not of this world."""
        return next((n.number for n in self.nodes.values() if n.identity.node_id == node_id), -1)

    def _later(self, node: Node, event: ev.Event, seconds: float) -> None:
        life = node.life

        def deliver() -> None:
            if not node.running or node.life != life:
                return
            if node.frozen_until > self.now:
                self._later(node, event, node.frozen_until - self.now)
            else:
                self.handle(node, event)

        self.after(seconds, deliver)

    def _delay(self) -> float:
        return self.rng.uniform(*self.weather.delay)

    def _carry_out(self, node: Node, effects: Iterable[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send():
                    self._send(node, effect.link, msg.encode(effect.message))
                    kind = type(effect.message).__name__
                    self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
                case fx.Dial():
                    self._dial(node, effect)
                case fx.Hangup():
                    self._close(node, effect.link)
                case fx.Store():
                    node.disk.append(effect.delta)
                    if effect.own:
                        chunks = effect.delta.body.chunks
                        chunk = node.blobs[chunks[0]] if self.sends_along and len(chunks) == 1 else b""
                        self._later(node, ev.Stored(effect.delta, chunk), 0.001)
                case fx.StoreCredential():
                    node.credentials.append(effect.data)
                case fx.Expelled():
                    node.expelled = effect.reason
                case fx.Keep():
                    assert sha256(effect.data).digest() == effect.blob
                    node.blobs[effect.blob] = effect.data
                    self._later(node, ev.ChunkArrived(effect.blob), 0.001)
                case fx.Get():
                    self._get(node, effect)
                case fx.Put():
                    self._put(node, effect)
                case fx.Fetched():
                    node.fetched.append(effect.key)
                case fx.Blame():
                    node.blames.append(effect)
                case fx.Notice():
                    node.notices.append(f"{effect.culprit} {effect.text}".lstrip())

    def _send(self, node: Node, link: int, data: bytes) -> None:
        self.messages += 1
        if link not in node.links:
            return
        number, their_link = node.links[link]
        other = self.nodes[number]
        copies = 1 + (self.rng.random() < self.weather.duplicates)
        for _ in range(copies):
            if self.rng.random() < self.weather.loss or not self.reachable(node, other):
                continue
            at = max(self.now + self._delay(), self._up_at.get(link, 0.0))
            if not self.weather.reorders:
                at = max(at, self._last_delivery.get(link, 0.0))
                self._last_delivery[link] = at
            self._later(other, ev.Received(their_link, data), at - self.now)

    def _dial(self, node: Node, effect: fx.Dial) -> None:
        other = next((n for n in self.running() if n.address == effect.address), None)
        meant = other is not None and effect.node_id in (None, other.identity.node_id)
        if other is None or not meant or other.frozen_until > self.now or not self.reachable(node, other):
            self._later(node, ev.DialFailed(effect.address), 1.0)
            return
        self._link_numbers += 2
        ours, theirs = self._link_numbers, self._link_numbers + 1
        life, their_life = node.life, other.life

        def connected() -> None:
            if node.life == life and other.life == their_life and self.reachable(node, other):
                if not self._both_vet(node, other):
                    self._later(node, ev.DialFailed(effect.address), 0.0)
                    return
                shown = {n.number: self._credential(n) for n in (node, other)}
                node.links[ours] = (other.number, theirs)
                other.links[theirs] = (node.number, ours)
                # The accepting end comes first, and no message overtakes the handshake.
                up = ev.LinkUp(theirs, node.identity.node_id, False, None, shown[node.number])
                self._later(other, up, 0.0)
                wait = self._delay()
                self._up_at[theirs] = self.now + wait
                up = ev.LinkUp(ours, other.identity.node_id, True, effect.address, shown[other.number])
                self._later(node, up, wait)

        self.after(self._delay(), connected)

    def _credential(self, node: Node) -> bytes:
        """The credential that a node shows in handshakes."""
        return node.core.access.credential_of(node.identity.node_id, self.now)

    def _both_vet(self, dialler: Node, listener: Node) -> bool:
        """Do what both ends of a handshake do before any message."""
        try:
            for judge, other in ((listener, dialler), (dialler, listener)):
                judge.core.access.vet(other.identity.node_id, self._credential(other), self.now)
        except RefusedError as error:
            dialler.refused.append(str(error))
            return False
        return True

    def _close(self, node: Node, link: int) -> None:
        """End a link: both ends learn of it after all messages under way have arrived."""
        if link not in node.links:
            return
        number, their_link = node.links[link]
        other = self.nodes[number]
        wait = 2 * self.weather.delay[1]

        def closed() -> None:
            node.links.pop(link, None)
            self._later(node, ev.LinkDown(link), 0.0)
            if self.reachable(node, other) and other.links.pop(their_link, None):
                self._later(other, ev.LinkDown(their_link), 0.0)

        self.after(wait, closed)

    def _get(self, node: Node, effect: fx.Get) -> None:
        other = self.nodes[node.links[effect.link][0]] if effect.link in node.links else None
        self._transfer(
            other, node, effect.blob, effect.size, lambda: self._failed(node, effect.link, effect.blob)
        )

    def _failed(self, node: Node, link: int, blob: bytes) -> None:
        self._later(node, ev.ChunkFailed(link, blob), 0.0)

    def _put(self, node: Node, effect: fx.Put) -> None:
        if effect.link not in node.links:
            return
        other = self.nodes[node.links[effect.link][0]]
        decline = msg.encode(msg.Decline(effect.blob))
        size = other.core.fetcher.expected_size(effect.blob)
        self._transfer(node, other, effect.blob, size, lambda: self._send(node, effect.link, decline))

    def _transfer(
        self, source: Node | None, target: Node, blob: bytes, size: int | None, fail: Callable[[], None]
    ) -> None:
        """Copy a chunk, with the checks of the daemon's transport: it exists, and size and hash are right."""
        passes = source is not None and source.running and self.reachable(source, target)
        if source is not None and not passes:
            self.after(5.0, fail)
            return
        data = source.blobs.get(blob) if source is not None else None
        if data is None or size is None or len(data) > size or self.rng.random() < self.weather.loss:
            self.after(self._delay(), fail)
            return
        life = target.life

        def arrived() -> None:
            if target.running and target.life == life:
                target.blobs[blob] = data
                self._later(target, ev.ChunkArrived(blob), 0.0)

        self.after(self._delay(), arrived)

    # -- what tests ask

    def members(self) -> list[Node]:
        """Running nodes that have not been revoked."""
        return [node for node in self.running() if node.expelled is None]

    def roots(self) -> set[bytes]:
        """The ledger roots of all members: only one if they agree."""
        return {node.core.ledger.digests.root for node in self.members()}

    def agree(self) -> bool:
        """Whether all members have the same access list, the same ledger and every payload of it."""
        complete = all(
            node.core.holds(d.record_id) or node.core.ledger.is_void(d)
            for node in self.members()
            for d in node.core.ledger
        )
        acls = {node.core.acl.digest for node in self.members()}
        return len(self.roots()) == 1 and len(acls) == 1 and complete
