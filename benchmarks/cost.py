"""What a round costs: processor time of one node's daemon, beyond what it takes while nobody trains.

Real daemons on loopback, with TLS as on the internet. A puppet beside each publishes noise for it in every
round, so each daemon spends what it does for a real trainer: it signs, stores, announces, sends, fetches,
checks and merges. Rounds are spaced so that the machine is never full.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.daemons import Daemons
from benchmarks.goals import Goal
from benchmarks.tables import Table

SIZES = (400_000, 4_000_000, 40_000_000)
MEMBERS = (2, 8)
DELTAS_MAX = 100_000_000
"""Parameters times members: above, a round of all its nodes takes two cores minutes."""
ROUNDS = 40
"""Divided by the members: each round has as many deltas."""
IDLE_S = 6.0


def run(*, quick: bool) -> list[dict[str, Any]]:
    """One row for each size and number of members."""
    sizes, members = ((100_000,), (2,)) if quick else (SIZES, MEMBERS)
    return [
        asyncio.run(row(parameters, count, 3 if quick else max(4, ROUNDS // count)))
        for parameters in sizes
        for count in members
        if parameters * count <= DELTAS_MAX
    ]


async def row(parameters: int, members: int, rounds: int) -> dict[str, Any]:
    """A swarm of daemons: seconds of processor time a round and node, and the share of a core while idle."""
    # A node's work grows with the deltas of a round, and all nodes share this machine's cores.
    step_s = 0.1 * members * max(1.0, members / 8) * max(1.0, parameters / 4e6)
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        async with Daemons(Path(folder), parameters) as daemons:
            await daemons.grow(members)
            before = daemons.processor_seconds()
            await asyncio.sleep(IDLE_S)
            idle = [(b - a) / IDLE_S for a, b in zip(before, daemons.processor_seconds(), strict=True)]
            await daemons.train(2, step_s)
            before = daemons.processor_seconds()
            seconds = await daemons.train(rounds, step_s)
            spent = [b - a for a, b in zip(before, daemons.processor_seconds(), strict=True)]
    beyond = [total - share * seconds for total, share in zip(spent, idle, strict=True)]
    return {
        "parameters": parameters,
        "members": members,
        "rounds": rounds,
        "seconds": seconds,
        "idle_share": mean(idle),
        "round_s": mean(beyond) / rounds,
    }


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Processor time by size and members."""
    lines = [
        (
            f"{row['parameters'] / 1e6:g} M",
            str(row["members"]),
            f"{1000 * row['round_s']:,.1f} ms",
            f"{1000 * row['round_s'] / row['members']:,.2f} ms",
            f"{row['idle_share']:.2%}",
        )
        for row in rows
    ]
    columns = ("parameters", "members", "a round", "a delta of it", "a core's share while idle")
    return [Table("processor time of one daemon, `int4`, one fragment", columns, lines)]


def _smallest(rows: list[dict[str, Any]]) -> float:
    return 1000 * float(rows[0]["round_s"])


GOALS = (
    Goal(
        what="processor time of a daemon for a round of two members with 0.4 M parameters",
        at_most=13,
        unit="ms",
        measured=_smallest,
        reason="half is measuring and merging two deltas, a sixth packing and writing chunks and records, and"
        " most of the rest events, messages and TLS",
    ),
)
