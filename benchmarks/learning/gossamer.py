"""Gossamer: the real outer loop, encoders, pace and Merge, with links that are late, parted or dead.

Time is counted in the inner steps of a worker of speed 1. Every worker is a replica: it holds the records
it has heard of, and its Phi is their fold, as in `gossamer.node.merger`. Only the transport is missing.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.learning.world import Point, Worker, World
from gossamer.bootstrap import manifests
from gossamer.models.task import named_tensors
from gossamer.node.outer import OuterLoop
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import ONE, Ints, check_healthy
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge import Contribution, measure, merge_round
from gossamer.protocol.pace import Pace, round_clock
from gossamer.protocol.payload import Payload, payload_bytes_max

Records = dict[int, frozenset[int]]
"""Who has published in each round, as far as is known."""


class Record(NamedTuple):
    """Who published in which round."""

    round: int
    author: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What goes wrong."""

    late: int = 4
    """Steps from one worker's publishing to the others' merging."""
    speeds: tuple[float, ...] = ()
    """Of each worker; all 1 if empty."""
    parted: tuple[float, float] = (0.0, 0.0)
    """From which part of the run to which the two halves of the workers hear nothing of each other."""
    deaths: float = 0.0
    """Probability that a worker dies in the time of a window. It loses everything, and begins anew from the
    swarm's model one window later."""


class History:
    """All deltas ever published, and what they merge to. Merge is a pure function, so replicas share it."""

    REMEMBERED = 8

    def __init__(self, manifest: Manifest) -> None:
        self.layout, self.outer = manifest.plan(), manifest.outer
        self._deltas: dict[Record, Contribution] = {}
        self._merged: OrderedDict[tuple[int, frozenset[int]], Ints] = OrderedDict()

    def add(self, record: Record, delta: Contribution) -> None:
        self._deltas[record] = delta

    def step_of(self, round_: int, authors: frozenset[int]) -> Ints | int:
        """Merge of a round's deltas by these authors, int32[fragment.numel]; 0 for none."""
        if not authors:
            return 0
        key = (round_, authors)
        if key not in self._merged:
            deltas = [self._deltas[Record(round_, author)] for author in authors]
            self._merged[key] = merge_round(deltas, self.layout.of_round(round_), self.outer)
        self._merged.move_to_end(key)
        while len(self._merged) > self.REMEMBERED:
            self._merged.popitem(last=False)
        return self._merged[key]


class Replica:
    """Phi as the fold of the records one worker knows."""

    def __init__(self, history: History, phi: Ints, records: Records) -> None:
        self._history, self.phi, self.known = history, phi.copy(), dict(records)
        self._merged = dict(records)

    def hear(self, record: Record) -> None:
        self.known[record.round] = self.known.get(record.round, frozenset()) | {record.author}

    def last_round(self, author: int) -> int:
        return max((round_ for round_, authors in self.known.items() if author in authors), default=0)

    def merge(self) -> dict[int, int]:
        """Fold in what is new; returns the fragments that changed, and the last round of each."""
        changed = sorted(r for r, authors in self.known.items() if self._merged.get(r) != authors)
        for round_ in changed:
            view = self._view(round_)
            view += self._history.step_of(round_, self._merged.get(round_, frozenset()))
            view -= self._history.step_of(round_, self.known[round_])
            self._merged[round_] = self.known[round_]
        if changed:
            check_healthy(self.phi, "Phi")
        count = len(self._history.layout.fragments)
        return {r % count: max(k for k in self.known if k % count == r % count) for r in changed}

    def _view(self, round_: int) -> Ints:
        fragment = self._history.layout.of_round(round_)
        return self.phi[fragment.offset : fragment.offset + fragment.numel]

    def fragment(self, index: int) -> Ints:
        return self._view(index)


@dataclass(slots=True)
class Node:
    """A worker, its outer loop and its replica."""

    worker: Worker
    outer: OuterLoop
    replica: Replica
    own_last: int = 0
    since: int = 0
    """Inner steps since its last delta."""
    credit: float = 0.0
    """Part of an inner step that a slow machine has done."""
    dead_until: int = 0
    lives: int = field(default=0)


class Swarm:
    """Nodes, and the records on their way between them."""

    def __init__(self, world: World, manifest: Manifest, phi: Ints, weather: Weather) -> None:
        self._world, self._manifest, self._weather = world, manifest, weather
        self._history = History(manifest)
        self._genesis = phi
        self.observer = Replica(self._history, phi, {})
        """Hears everything at once, and does not train: its Phi is the swarm's."""
        self._pace = Pace(manifest.pace, manifest.layout.fragments)
        self._random = np.random.default_rng((world.seed, 5))
        self._travelling: list[tuple[int, int, Record]] = []
        """When they arrive, to whom, what."""
        self.payload_bytes = 0
        self.deaths = 0
        self.tick = 0
        self._nodes = [self._node(number, 0) for number in range(world.scale.workers)]

    def _node(self, number: int, life: int) -> Node:
        """A node that begins with the swarm's model and nothing else."""
        worker = self._world.worker(number, life)
        outer = OuterLoop(dict(named_tensors(worker.model)), self._manifest)
        self.observer.merge()
        replica = Replica(self._history, self.observer.phi, self.observer.known)
        for fragment in self._history.layout.fragments:
            rounds = [r for r in replica.known if r % len(self._history.layout.fragments) == fragment.index]
            merged = max(rounds, default=outer.fragments[fragment.index].window.base)
            outer.apply(fragment.index, replica.fragment(fragment.index), merged, keep_progress=False)
        return Node(worker, outer, replica, own_last=replica.last_round(number), lives=life)

    def advance(self) -> None:
        """One inner step's time for everybody."""
        self.tick += 1
        for number in range(len(self._nodes)):
            if self._lives(number) and not self._dies(number):
                self._advance(number, self._nodes[number])

    def _lives(self, number: int) -> bool:
        node = self._nodes[number]
        if node.dead_until == self.tick:
            self._nodes[number] = self._node(number, node.lives + 1)
        return self._nodes[number].dead_until <= self.tick

    def _dies(self, number: int) -> bool:
        steps = self._world.scale.steps
        if not self._weather.deaths or self._random.random() >= self._weather.deaths / steps:
            return False
        self._nodes[number].dead_until = self.tick + steps
        self.deaths += 1
        return True

    def _advance(self, number: int, node: Node) -> None:
        node.credit += self._weather.speeds[number] if self._weather.speeds else 1.0
        if node.credit < 1.0:
            return
        node.credit -= 1.0
        self._take_in(number, node)
        loss = self._world.step(node.worker)
        node.outer.step(self._world.scale.batch_size * self._world.scale.context, loss)
        node.since += 1
        round_ = self._pace.due(node.own_last, self._clock(number, node), node.since, node.since)
        if round_ is not None:
            self._publish(number, node, round_)

    def _take_in(self, number: int, node: Node) -> None:
        """Hear what has arrived, merge it, and move the model along."""
        here = [record for due, to, record in self._travelling if to == number and due <= self.tick]
        self._travelling = [t for t in self._travelling if t[1] != number or t[0] > self.tick]
        for record in here:
            node.replica.hear(record)
        for index, merged_round in node.replica.merge().items():
            node.outer.apply(index, node.replica.fragment(index), merged_round)

    def _clock(self, number: int, node: Node) -> int:
        heard = [
            node.replica.last_round(other)
            for other in range(len(self._nodes))
            if other != number
            and self._nodes[other].dead_until <= self.tick
            and not self._apart(number, other)
        ]
        return round_clock([r for r in (*heard, node.own_last) if r > 0], members=len(heard) + 1)

    def _publish(self, number: int, node: Node, round_: int) -> None:
        fragment, codec = self._history.layout.of_round(round_), self._manifest.outer.codec
        room = memoryview(bytearray(payload_bytes_max(CODECS[codec], fragment)))
        length, window = node.outer.publish(fragment.index, round_, room)
        payload = Payload(codec, fragment, room[:length])
        norms, _ = measure(payload)
        record = Record(round_, number)
        delta = Contribution(
            author=bytes([number]) * 32,
            tokens=window.tokens,
            steps=window.steps,
            staleness=(round_ - window.base) // len(self._history.layout.fragments) - 1,
            norms=norms,
            tensor=payload.tensor,
        )
        self._history.add(record, delta)
        self.payload_bytes += length
        node.own_last, node.since = round_, 0
        for replica in (node.replica, self.observer):
            replica.hear(record)
        for other in range(len(self._nodes)):
            if other != number:
                self._travelling.append((self._arrival(number, other), other, record))

    def _arrival(self, one: int, other: int) -> int:
        healed = int(self._weather.parted[1] * self._ticks) if self._apart(one, other) else self.tick
        return healed + self._weather.late

    def _apart(self, one: int, other: int) -> bool:
        begin, end = self._weather.parted
        half = len(self._nodes) // 2
        return begin * self._ticks <= self.tick < end * self._ticks and (one < half) != (other < half)

    @property
    def _ticks(self) -> int:
        """How long the run takes if nobody is slow."""
        return self._world.scale.windows * self._world.scale.steps

    def parameters(self) -> list[Tensor]:
        """The swarm's model: Phi of all that was published, in the order of the model's tensors."""
        self.observer.merge()
        by_name = {}
        for fragment in self._history.layout.fragments:
            phi = torch.from_numpy(self.observer.fragment(fragment.index)).float() / ONE
            for slot in fragment.slots:
                by_name[slot.spec.name] = phi[slot.span].view(slot.spec.shape)
        return [by_name[spec.name] for spec in self._manifest.layout.tensors]


def train(
    world: World,
    *,
    codec: str = "int4",
    fragments: int = 1,
    averaging: str = "rda",
    outer: dict[str, float] | None = None,
    weather: dict[str, object] | None = None,
) -> Iterator[Point]:
    """`outer` is what differs from the defaults of `manifests`, `weather` from a calm network."""
    scale = world.scale
    manifest, phi = manifests.create(
        name="learning",
        task="text",
        options=scale.options(),
        codec=codec,
        every_steps=scale.steps,
        every_seconds=0.0,
        fragments=fragments,
        seed=world.seed,
        averaging=averaging,
    )
    manifest = manifest.model_copy(update={"outer": manifest.outer.model_copy(update=outer or {})})
    swarm = Swarm(world, manifest, phi, Weather(**(weather or {})))  # type: ignore[arg-type]
    while True:
        if world.is_due() or world.is_over:
            published = swarm.payload_bytes / scale.workers
            yield world.point(swarm.parameters(), published, published * (scale.workers - 1))
        if world.is_over:
            return
        swarm.advance()
