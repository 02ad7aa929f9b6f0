"""Scale by members: what one node costs as its swarm grows.

Whole swarms of real protocol cores run in the simulator (`tests/sim`), calm, in virtual time. Processor time
is that of the cores alone, with every node checking every signature itself. Memory is the growth of the
process that holds all the nodes, their simulated disks, and messages on their way.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import plots
from benchmarks.growth import bends, in_fresh_process
from benchmarks.tables import Table
from gossamer.protocol.replica import Replica
from tests.sim import scenario
from tests.sim.world import World, no_collections

SIZES, QUICK = (4, 16, 64, 128, 256), (4, 8)
WARM_UP_S, LOOK_S = 15.0, 10.0
COSTS = {"control_bytes_per_s": "bytes", "cpu_share": "processor time", "memory_bytes": "memory"}


def run(*, quick: bool) -> list[dict[str, Any]]:
    """One row for each number of members."""
    return [in_fresh_process(row, count) for count in (QUICK if quick else SIZES)]


def row(count: int) -> dict[str, Any]:
    """A calm swarm of `count` members, measured for some seconds after it has formed."""
    resident = psutil.Process().memory_info().rss
    world = World(scenario.choose(seed=1, nodes=count, minutes=60.0, name="calm"))
    with world.remembered, no_collections():
        world._begin()
        world.loop.run(WARM_UP_S)
    sent = sum(world.audit.bytes_by_kind)
    with _core_seconds() as spent, no_collections():
        world.loop.run(WARM_UP_S + LOOK_S)
    of_all = count * LOOK_S
    return {
        "members": count,
        "known": min(len(node.core.roster.live()) for node in world.nodes),
        "control_bytes_per_s": (sum(world.audit.bytes_by_kind) - sent) / of_all,
        "cpu_share": spent[0] / of_all,
        "memory_bytes": (psutil.Process().memory_info().rss - resident) / count,
    }


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

    Replica.handle = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Replica.handle = handle  # type: ignore[method-assign]


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """A node's costs by number of members, and where they bend."""
    lines = [
        (
            str(row["members"]),
            f"{row['control_bytes_per_s'] / 1e3:,.1f} kB/s",
            f"{row['cpu_share']:.2%}",
            f"{row['memory_bytes'] / 2**20:,.2f} MiB",
        )
        for row in rows
    ]
    columns = ("members", "control sent", "its share of a core", "memory")
    return [Table(f"one node of a calm swarm; {bends(rows, 'members', COSTS)}", columns, lines)]


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """A node's costs over the number of members."""
    figure, (axes,) = plots.axes()
    sizes = [row["members"] for row in rows]
    for key, name in COSTS.items():
        axes.loglog(sizes, [row[key] / rows[0][key] for row in rows], "o-", label=name)
    in_proportion = [size / sizes[0] for size in sizes]
    axes.loglog(sizes, in_proportion, "--", color=plots.INK, linewidth=1, label="in proportion")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("members")
    axes.set_ylabel(f"of one node, times that of {sizes[0]}")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "members.svg")
