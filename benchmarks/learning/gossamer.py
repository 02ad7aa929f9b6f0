"""Gossamer: the real outer loop, encoders, pace and Merge, on links that are late and nodes that fail.

Time is counted in inner steps of a worker of speed 1. Only the transport is missing: a record reaches all
others a few steps after it was published, or once a partition has healed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.learning.replica import History, Record, Replica
from benchmarks.learning.world import Averaged, Point, Worker, World
from benchmarks.rounds import retuned
from gossamer.bootstrap import manifests
from gossamer.models.task import named_tensors
from gossamer.models.text import ByteTextTask
from gossamer.node.trainer.genesis import parameters
from gossamer.node.trainer.outer import OuterLoop
from gossamer.node.trainer.peer import WARM_UP_STEPS
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import ONE, Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import Contribution, measure
from gossamer.protocol.pace import Pace, round_clock, turn_for
from gossamer.protocol.payloads import Payload, pack_chunk, payload_length, split_payload
from gossamer.protocol.sampling import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Properties of the network and the machines."""

    late: int = 4
    """Steps from one worker's publishing to the others' merging."""
    speeds: Sequence[float] = ()
    """The speed of each worker; all 1 if empty."""
    parted: Sequence[float] = (0.0, 0.0)
    """Begin and end, as shares of the run, of a split between the two halves of the workers."""
    deaths: float = 0.0
    """Probability that a worker dies in the time of a window. It loses its model, its optimizer, its place in
    the data and its residual, and starts again from the swarm's model one window later."""


@dataclass(slots=True)
class Node:
    """A worker, its outer loop and its replica."""

    worker: Worker
    outer: OuterLoop
    replica: Replica
    pace: Pace
    own_last: int
    """Its last round."""
    life: int = 0
    steps: int = 0
    """Inner steps of this life."""
    clock: int = 0
    """The round clock as it was last read."""
    since: int = 0
    """Inner steps since its last delta, or since the clock went past that."""
    credit: float = 0.0
    """The fraction of an inner step that a slow machine has done."""
    absent_until: int = 0


class Swarm:
    """Nodes, and the records on their way between them."""

    def __init__(self, world: World, manifest: Manifest, phi: Ints, weather: Weather) -> None:
        self._world, self._manifest, self._weather = world, manifest, weather
        self._history = History(manifest)
        self._turn = turn_for(world.scale.workers, manifest.pace)
        self._random = np.random.default_rng((world.seed, 5))
        self.travelling: list[tuple[int, int, Record]] = []
        """Records on their way: arrival time, receiver, record."""
        self._tick = 0
        self.observer = Replica(self._history, phi)
        """A replica that hears everything at once and does not train: its Phi is the swarm's."""
        self._averaged, self._rounds = Averaged(phi), 0
        self.published = 0
        """Bytes of all payloads, packed as they are sent."""
        self.deaths = 0
        self.nodes = [self._begin(number) for number in range(world.scale.workers)]

    def _begin(self, number: int, life: int = 0) -> Node:
        """A node that has the swarm's model and nothing else."""
        worker = self._world.worker(number, life)
        outer = OuterLoop(dict(named_tensors(worker.model)), self._manifest)
        self.observer.merge()
        replica = self.observer.copy()
        for index in range(len(outer.fragments)):
            outer.apply(index, replica.view(index), replica.merged_round(index), keep_progress=False)
        pace = Pace(self._manifest.pace, len(self._history.layout.fragments), bytes([number]) * 32)
        return Node(worker, outer, replica, pace, replica.last_round(number), life)

    def advance(self) -> None:
        """Advance time by one inner step, for all nodes."""
        self._tick += 1
        for number, node in enumerate(self.nodes):
            if node.absent_until == self._tick:
                self.nodes[number] = self._begin(number, node.life + 1)
        for node in self.nodes:
            if node.absent_until <= self._tick and not self._dies(node):
                self._work(node)
        window, fragments = self._world.scale.steps, len(self._history.layout.fragments)
        if (rounds := self._tick * fragments // window) > self._rounds:
            self.observer.merge()
            self._averaged.add(rounds, self.observer.phi)
            self._rounds = rounds

    def _dies(self, node: Node) -> bool:
        window = self._world.scale.steps
        if not self._weather.deaths or self._random.random() >= self._weather.deaths / window:
            return False
        node.absent_until = self._tick + window
        self.deaths += 1
        return True

    def _work(self, node: Node) -> None:
        """Apply what has arrived; make one inner step, if the machine is that far; publish what is due."""
        node.credit += self._weather.speeds[node.worker.number] if self._weather.speeds else 1.0
        if node.credit < 1.0:
            return
        node.credit -= 1.0
        self._apply(node)
        node.steps += 1
        # A fresh optimizer is warmed up if the model is already well trained (`Standing.lr_scale`).
        warm_up = min(1.0, node.steps / WARM_UP_STEPS) if node.life else 1.0
        loss = self._world.step(node.worker, warm_up=warm_up)
        node.outer.step(self._world.scale.step_tokens, loss)
        clock = self._clock(node)
        if node.clock < clock and node.own_last < clock:
            node.clock, node.since = clock, 0
        node.since += 1
        round_ = node.pace.due(node.own_last, clock, node.since, float(node.since), turn=self._turn)
        if round_ is not None:
            self._publish(node, round_)

    def _apply(self, node: Node) -> None:
        """Merge what has arrived, and apply it to the model."""
        for due, to, record in self.travelling:
            if to == node.worker.number and due <= self._tick:
                node.replica.hear(record)
        self.travelling = [t for t in self.travelling if t[1] != node.worker.number or t[0] > self._tick]
        for index in sorted(node.replica.merge()):
            node.outer.apply(index, node.replica.view(index), node.replica.merged_round(index))

    def _clock(self, node: Node) -> int:
        """The round clock as the node reads it off the nodes that it takes for alive."""
        heard = [
            (node.replica.last_round(other.worker.number), other.pace.node_id)
            for other in self.nodes
            if other is not node and other.absent_until <= self._tick and not self._are_apart(node, other)
        ]
        latest = (one for one in (*heard, (node.own_last, node.pace.node_id)) if one[0] > 0)
        return round_clock(latest, len(heard) + 1, self._turn)

    def _publish(self, node: Node, round_: int) -> None:
        fragment, codec = self._history.layout.of_round(round_), self._manifest.outer.codecs[0].name
        room = memoryview(bytearray(payload_length(CODECS[codec], fragment)))
        length, window = node.outer.publish(fragment.index, round_, room, turn=self._turn)
        payload = Payload(codec, fragment, room[:length])
        record = Record(round_, node.worker.number)
        delta = Contribution(
            author=node.pace.node_id,
            tokens=window.tokens,
            steps=window.steps,
            staleness=share((round_ - window.base) // len(self._history.layout.fragments) - 1, self._turn),
            norms=measure(payload).norms,
            tensor=payload.section,
        )
        self._history.add(record, delta)
        self.published += sum(len(pack_chunk(bytes(c)) or c) for c in split_payload(room[:length]))
        node.own_last, node.since = round_, 0
        self.observer.hear(record)
        node.replica.hear(record)
        for other in self.nodes:
            if other is not node:
                self.travelling.append((self._arrival(node, other), other.worker.number, record))

    def _arrival(self, one: Node, other: Node) -> int:
        leaves = self._part_of_run(self._weather.parted[1]) if self._are_apart(one, other) else self._tick
        return leaves + self._weather.late

    def _are_apart(self, one: Node, other: Node) -> bool:
        begin, end = (self._part_of_run(part) for part in self._weather.parted)
        sides = {node.worker.number < len(self.nodes) // 2 for node in (one, other)}
        return begin <= self._tick < end and len(sides) > 1

    def _part_of_run(self, part: float) -> int:
        return int(part * self._world.scale.windows * self._world.scale.steps)

    def parameters(self) -> list[Tensor]:
        """The swarm's model: Phi of all records published, in the order of the model's tensors."""
        self.observer.merge()
        return self._tensors(self.observer.phi)

    def averaged(self) -> list[Tensor]:
        """The swarm's averaged model, likewise."""
        return self._tensors(self._averaged.mean())

    def _tensors(self, phi: Ints) -> list[Tensor]:
        by_name = {
            spec.name: torch.from_numpy(values).float().view(spec.shape) / ONE
            for spec, values in self._history.layout.tensors(phi)
        }
        return [by_name[spec.name] for spec in self._manifest.layout.tensors]


def genesis(
    world: World,
    *,
    codec: str = "int4",
    fragments: int = 1,
    averaging: str = "rda",
    outer: dict[str, float] | None = None,
    contributors: int = 64,
) -> tuple[Manifest, Ints]:
    """A swarm's manifest and Phi_0; `outer` has the settings that differ from those of new manifests."""
    settings: dict[str, Any] = {"codec": codec, "every_steps": world.scale.steps, "fragments": fragments}
    if type(world.task) is ByteTextTask:
        manifest, phi = manifests.create(
            name="learning",
            task="text",
            options=world.scale.options(),
            every_seconds=0.0,
            seed=world.seed,
            averaging=averaging,
            **settings,
        )
    else:  # no task of the product's
        model = world.task.build_model(world.seed)
        manifest = manifests.describe(model, name="learning", averaging=averaging, **settings)
        phi = parameters(model, manifest.plan())
    pace = manifest.pace.model_copy(update={"contributors": contributors})
    return retuned(manifest.model_copy(update={"pace": pace}), outer or {}), phi


def found(world: World, *, weather: dict[str, Any] | None = None, **settings: Any) -> Swarm:
    """A swarm; `weather` states what differs from calm, other settings are as for `genesis`."""
    return Swarm(world, *genesis(world, **settings), Weather(**(weather or {})))


def train(world: World, **settings: Any) -> Iterator[Point]:
    """Train a swarm, with `settings` as for `found`."""
    swarm = found(world, **settings)
    workers = world.scale.workers
    while True:
        if world.is_due() or world.is_over:
            published = swarm.published / workers
            sent = published * (workers - 1)
            yield world.point(swarm.parameters(), published, sent, swarm.averaged())
        if world.is_over:
            return
        swarm.advance()
