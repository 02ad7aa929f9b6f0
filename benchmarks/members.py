"""Scale by members: what one node costs as its swarm grows.

Whole swarms of real protocol cores run in the simulator (`tests/sim`), calm, in virtual time, over lines of
10 Mbit/s with 40 to 80 ms; the model is tiny. A swarm has known from the start on how many its members are,
which takes it two epochs otherwise: of more than 64, 64 contribute to a round (`pace.contributors`). Records
are followed once all have started. When all have renewed their member records, nodes are looked at for some
seconds, in which each checks every signature itself: processor time is that of the cores alone. At last, one
node's host loses its power.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil

from benchmarks import plots
from benchmarks.goals import Goal
from benchmarks.growth import in_fresh_process
from benchmarks.measure import best_of
from benchmarks.tables import Table
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import folds
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.members import Health
from gossamer.protocol.pace import BEGIN
from gossamer.protocol.payloads import Fragment
from gossamer.protocol.records import Delta, open_envelope, parse_member_record
from gossamer.protocol.replica import Replica
from gossamer.protocol.sampling import EVERY_ROUND
from tests.sim import fold, memo, scenario
from tests.sim.network import Path as Line
from tests.sim.node import Node
from tests.sim.world import World, no_collections

SIZES, QUICK = (16, 64, 256, 1024), (4, 8)
COMPARED, CONTRIBUTORS = 64, 64
STARTED_S = 45.0
"""By now all have started, and none looks any more for what it missed while it was away."""

SETTLED_S = 150.0
"""By now each of 1,024 members has renewed its record."""

LOOK_S, LOOK_SHORT_S = 30.0, 10.0
"""The latter with 1,024 members."""

DETECTED_MAX_S = 60.0
POLL_S = 0.5
ROUND_S = 20.0

COSTS = {
    "payload_bytes": "payloads",
    "merge_s": "merging",
    "control_bytes_per_s": "control",
    "cpu_share": "processor time",
    "memory_bytes": "memory",
    "spread_s": "spread",
}
"""What is compared with a swarm of 64, by name."""


def run(*, quick: bool) -> list[dict[str, Any]]:
    """One row for each number of members."""
    return [in_fresh_process(row, count) for count in (QUICK if quick else SIZES)]


def row(members: int) -> dict[str, Any]:
    """A calm swarm of so many members, once it has formed."""
    begun, resident = time.monotonic(), psutil.Process().memory_info().rss
    look = LOOK_SHORT_S if members > SIZES[-2] else LOOK_S
    turn = max(EVERY_ROUND, EVERY_ROUND * members // CONTRIBUTORS)
    with mock.patch.object(folds.pace, "BEGIN", BEGIN._replace(turns=(turn, turn))):
        merges = Merges()
        with mock.patch.object(memo, "MergeMemo", return_value=merges):
            world = World(_scenario(members))
        records = Records(world)
        with _calm(world):
            world._begin()
            world.loop.run(STARTED_S)
            records.watch()
            world.loop.run(SETTLED_S)
        sent = sum(world.audit.bytes_by_kind)
        with _core_seconds() as spent, no_collections():
            world.loop.run(world.loop.now + look)
        control = sum(world.audit.bytes_by_kind) - sent
        with _calm(world):
            memory = (psutil.Process().memory_info().rss - resident) / members
            spread = records.took()
            detected = _detected_s(world, world.nodes[members // 2])
    return {
        "members": members,
        "known": min(len(node.core.roster.live()) for node in world.nodes if node.running) + 1,
        "contributors": merges.median(lambda deltas, _: len(deltas)),
        "payload_bytes": merges.median(lambda _, payloads: sum(map(len, payloads))),
        "merge_s": merges.seconds(),
        "control_bytes_per_s": control / members / look,
        "cpu_share": spent[0] / members / look,
        "memory_bytes": memory + members * _record_bytes(world),
        "spread_s": median(spread),
        "spread_max_s": max(spread),
        "detected_s": detected,
        "virtual_s": world.loop.now,
        "took_s": time.monotonic() - begun,
    }


class Lines(dict[tuple[int, int], Line]):
    """A line from each host to each other, made when it is first used: there are a million."""

    def __missing__(self, pair: tuple[int, int]) -> Line:
        line = self[pair] = Line(0.04, 0.04, 1.25e6, 0.001)
        return line


def _scenario(members: int) -> scenario.Scenario:
    """A swarm of machines that are about as fast as each other."""
    with mock.patch.object(scenario, "_paths", return_value=Lines()):
        seed = next(
            seed
            for seed in count()
            for pace in (scenario.choose(seed, 2, 60.0, "calm").manifest.pace,)
            if 0.0 < pace.every_seconds < ROUND_S
        )
        found = scenario.choose(seed, members, 60.0, "calm")
    traits = (
        replace(
            one, trains=True, listens=True, step_s=0.9 + 0.2 * (index % 7) / 6, gather_s=0.2, sync_s=0.005
        )
        for index, one in enumerate(found.traits)
    )
    return replace(found, traits=tuple(traits))


@contextmanager
def _calm(world: World) -> Iterator[None]:
    """Nodes share what they find out about exact bytes."""
    with memo.remembered(world.stage.encode), no_collections():  # type: ignore[arg-type]
        yield


@contextmanager
def _core_seconds() -> Iterator[list[float]]:
    """Count the processor time that cores take while they handle events."""
    spent, handle = [0.0], Replica.handle

    def timed(self: Replica, event: Any, now: float) -> Any:
        begun = time.thread_time()
        try:
            return handle(self, event, now)
        finally:
            spent[0] += time.thread_time() - begun

    with mock.patch.object(Replica, "handle", timed):
        yield spent


class Records:
    """When each delta's record came to each node."""

    def __init__(self, world: World) -> None:
        self._loop = world.loop
        self._others = len(world.nodes) or world.scenario.nodes - 1
        self._born: dict[bytes, float] = {}
        self._came: dict[bytes, list[float]] = {}
        self._spoken, self._accepted = world.audit.spoken, world.audit.accepted
        world.audit.spoken = self.spoken  # type: ignore[method-assign]
        world.audit.accepted = self.accepted  # type: ignore[method-assign]
        self._is_watching = False

    def watch(self) -> None:
        """From now on."""
        self._is_watching = True

    def spoken(self, node: Node, delta: Delta) -> None:
        self._spoken(node, delta)
        if self._is_watching:
            self._born[delta.record_id] = self._loop.now

    def accepted(self, node: Node, delta: Delta) -> None:
        self._accepted(node, delta)
        if delta.record_id in self._born:
            self._came.setdefault(delta.record_id, []).append(self._loop.now)

    def took(self) -> list[float]:
        """Seconds until a record was on all nodes, of those that are old enough."""
        born = {key: at for key, at in self._born.items() if at < self._loop.now - STARTED_S / 3}
        return [
            self._came[key][-1] - at if len(self._came.get(key, ())) >= self._others else inf
            for key, at in born.items()
        ]


class Merges(memo.MergeMemo):
    """Merges rounds, and remembers what of."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds: dict[int, tuple[Any, ...]] = {}

    def __call__(
        self, deltas: tuple[Delta, ...], payloads: Sequence[bytes], fragment: Fragment, manifest: Manifest
    ) -> Ints:
        if deltas and len(deltas) >= len(self._rounds.get(deltas[0].round, ((),))[0]):
            self._rounds[deltas[0].round] = deltas, payloads, fragment, manifest
        return super().__call__(deltas, payloads, fragment, manifest)

    def _whole(self) -> list[tuple[Any, ...]]:
        """Rounds but the first, for which some were too late, and the newest two, which are not all here."""
        return [self._rounds[round_] for round_ in sorted(self._rounds)[1:-2]] or [*self._rounds.values()]

    def median(self, of: Callable[[Any, Any], float]) -> float:
        """Of the rounds that are here, all of them."""
        return median([of(deltas, payloads) for deltas, payloads, *_ in self._whole()])

    def seconds(self) -> float:
        """Processor time of merging a round once."""
        return median([best_of(lambda one=one: fold.merged(*one), 5) for one in self._whole()])  # type: ignore[misc]


def _record_bytes(world: World) -> float:
    """Memory that a member's record takes. In the simulator, nodes share them."""
    datas = [node.core.presence.data for node in world.nodes]
    tracemalloc.start()
    swarm_id = world.scenario.manifest.swarm_id
    records = [parse_member_record(open_envelope(bytes(bytearray(data)), swarm_id)) for data in datas]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(records)


def _detected_s(world: World, victim: Node) -> float:
    """How long it takes until all other nodes know that one has lost its power; infinite if too long."""
    world.cut_power(victim)
    node_id, begun = victim.traits.identity.node_id, world.loop.now
    others = [node for node in world.nodes if node is not victim]
    while world.loop.now < begun + DETECTED_MAX_S:
        world.loop.run(world.loop.now + POLL_S)
        found = [node.core.roster.get(node_id) for node in others]
        if all(member is None or member.health is Health.DOWN for member in found):
            return world.loop.now - begun
    return inf


def _ratio(rows: list[dict[str, Any]], key: str) -> float:
    """Of the largest swarm to that of 64."""
    at = {row["members"]: row[key] for row in rows}
    return float(at[max(at)] / at.get(COMPARED, at[min(at)]))


GOALS = (
    Goal(
        what="payloads a round with 1,024 members, of those with 64",
        measured=lambda rows: _ratio(rows, "payload_bytes"),
        at_most=1.1,
    ),
    Goal(
        what="time to merge a round with 1,024 members, of that with 64",
        measured=lambda rows: _ratio(rows, "merge_s"),
        at_most=1.1,
        reason="by chance 69 members contributed to the round in the middle, where 64 do on average; each"
        " payload takes 6 % longer, in a process that holds 1,024 nodes",
    ),
    Goal(
        what="control traffic of a node of 1,024, of that of one of 64",
        measured=lambda rows: _ratio(rows, "control_bytes_per_s"),
        at_most=1.5,
    ),
    Goal(
        what="processor time of a node of 1,024, of that of one of 64",
        measured=lambda rows: _ratio(rows, "cpu_share"),
        at_most=1.5,
        reason="a third of what is added is the round clock, which looks at all members once a second; the"
        " rest is spread over all events, in a process whose 1,024 nodes share one cache",
    ),
    Goal(
        what="memory of a node of 1,024, of that of one of 64",
        measured=lambda rows: _ratio(rows, "memory_bytes"),
        at_most=4.0,
    ),
    Goal(
        what="a host's loss is known to all 1,024",
        measured=lambda rows: rows[-1]["detected_s"],
        at_most=40.0,
        unit="s",
    ),
    Goal(
        what="a record is on all of 1,024 nodes, of the time with 64",
        measured=lambda rows: _ratio(rows, "spread_s"),
        at_most=3.0,
        reason="it goes through more nodes on its way, at each of which offers of payloads are gathered for"
        " 50 ms. It takes a second; before all links heard of payloads it took 13 s",
    ),
)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """A node's costs by number of members, and as ratios to a swarm of 64."""
    lines = [
        (
            f"{row['members']:,}",
            f"{row['contributors']:.0f}",
            f"{row['payload_bytes'] / 1e3:,.1f} kB",
            f"{row['merge_s'] * 1e3:,.1f} ms",
            f"{row['control_bytes_per_s'] / 1e3:,.1f} kB/s",
            f"{row['cpu_share']:.2%}",
            f"{row['memory_bytes'] / 2**20:,.2f} MiB",
            f"{row['spread_s']:.2f} s",
            f"{row['detected_s']:.1f} s",
        )
        for row in rows
    ]
    columns = (
        *("members", "contribute", "payloads a round", "merge", "control sent", "share of a core", "memory"),
        *("a record on all", "a loss known to all"),
    )
    base = next((row for row in rows if row["members"] == COMPARED), rows[0])
    ratios = [
        (f"{row['members']:,}", *(f"{row[key] / base[key]:.2f}" for key in COSTS))
        for row in rows
        if row != base
    ]
    lasted = ", ".join(f"{row['took_s'] / 60:.1f}" for row in rows)
    return [
        Table("one node of a calm swarm", columns, lines),
        Table(f"times one of {base['members']}", ("members", *COSTS.values()), ratios),
        Table(
            f"simulated, and what that took: {lasted} minutes",
            ("members", *(f"{row['members']:,}" for row in rows)),
            [("virtual seconds", *(f"{row['virtual_s']:.0f}" for row in rows))],
        ),
    ]


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """A node's costs over the number of members."""
    figure, (axes,) = plots.axes()
    sizes = [row["members"] for row in rows]
    base = next((row for row in rows if row["members"] == COMPARED), rows[0])
    for key, name in COSTS.items():
        axes.loglog(sizes, [row[key] / base[key] for row in rows], "o-", label=name)
    in_proportion = [size / base["members"] for size in sizes]
    axes.loglog(sizes, in_proportion, "--", color=plots.INK, linewidth=1, label="in proportion")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("members")
    axes.set_ylabel(f"of one node, times that of {base['members']}")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "members.svg")
