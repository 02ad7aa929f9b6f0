"""How long a delta takes to reach all nodes, and what that costs, against the best that the lines could do.

One node publishes a delta of 5 MB as sent (of a model of 21 M parameters, int4) while the others are idle;
then all publish one of half that size at once. Up to 16 nodes are real daemons on loopback: processors are
the bottleneck there, and only the bytes mean much. 64 and 256 nodes, and the same small numbers again, are
real protocol cores in virtual time, each behind a line of 100 Mbit/s both ways with 20 ms to any other (see
`access`).

No schedule over the same links can beat the bound on time. An author's line carries its payload at least
once, so its last byte leaves after `payload / rate`; and a byte passes over at least as many links as lie
between the author and a node, 20 ms each. So the farthest node has the whole payload after
`payload / rate + links * 20 ms` at the earliest (`bound_s`). When all publish at once, a node's line takes in
the payloads of all others, and the first byte takes 20 ms to arrive. The bound leaves out headers, and that a
node passes on a chunk only once all of it is there. The least that a node can receive is every payload once.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.access import Line
from benchmarks.daemons import Daemons
from benchmarks.goals import Goal
from benchmarks.plots import axes, save
from benchmarks.simulated import Swarm, packed_bytes
from benchmarks.tables import Table
from gossamer.protocol.codecs import CODECS
from tests.sim import memo

LINE = Line(bytes_per_s=100e6 / 8, latency_s=0.02)
PARAMETERS = 21_000_000
ROUND_PARAMETERS = 10_000_000
"""Size of the model with whose rounds control traffic is compared."""

START_S, SETTLE_S = 0.05, 25.0
"""Time between the starts of two nodes, and time for links and rosters to settle."""

GIVE_UP_S = 120.0
ROUND_S = 30.0
"""A default round (30 steps) at a step per second, with which control traffic is compared."""


def run(*, quick: bool) -> dict[str, Any]:
    """One author at a time, on daemons and simulated; then all at once, simulated."""
    parameters, of_rounds = (1_000_000, 1_000_000) if quick else (PARAMETERS, ROUND_PARAMETERS)
    return {
        "parameters": parameters,
        "packed_bytes": packed_bytes(payload_bytes(parameters)),
        "packed_bytes_of_rounds": packed_bytes(payload_bytes(of_rounds)),
        "line": {"bytes_per_s": LINE.bytes_per_s, "latency_s": LINE.latency_s},
        "daemons": [
            on_daemons(nodes, of_rounds, 2 if quick else 5) for nodes in ((4,) if quick else (4, 8, 16))
        ],
        "simulated": [
            simulated(nodes, parameters, 2 if quick or nodes > 64 else 5)
            for nodes in ((4, 8) if quick else (4, 8, 16, 64, 256))
        ],
        "rounds": [whole_round(nodes, of_rounds) for nodes in ((4,) if quick else (4, 8, 16, 64))],
    }


def payload_bytes(parameters: int) -> int:
    """Bytes of one int4 delta's payload, as stored."""
    return CODECS["int4"].section_bytes(parameters)


def bound_s(size: int, links: int) -> float:
    """The least time for `size` bytes to pass through one line and over `links` links in a row."""
    return size / LINE.bytes_per_s + links * LINE.latency_s


# -- real daemons


def on_daemons(nodes: int, parameters: int, times: int) -> dict[str, Any]:
    """Publish some deltas on daemons on loopback, one after another."""
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        return asyncio.run(_on_daemons(Path(folder), nodes, parameters, times))


async def _on_daemons(folder: Path, nodes: int, parameters: int, times: int) -> dict[str, Any]:
    async with Daemons(folder, parameters) as daemons:
        await daemons.grow(nodes)
        before = await daemons.traffic()
        spreads = [await daemons.publish(number % nodes) for number in range(times)]
        after = await daemons.traffic()
    payload = sum(after.payload) - sum(before.payload)
    control = sum(after.control) - sum(before.control)
    least = (nodes - 1) * sum(spread.packed_bytes for spread in spreads)
    return {
        "nodes": nodes,
        "seconds": [spread.seconds for spread in spreads],
        "received_over_least": payload / least,
        "control_over_payload": control / payload,
    }


# -- simulated


def simulated(nodes: int, parameters: int, times: int) -> dict[str, Any]:
    """Publish some deltas in virtual time, one after another, by authors spread over the order of joining."""
    size = payload_bytes(parameters)
    travels = packed_bytes(size)
    seconds, bounds, payload = [], [], 0
    with memo.remembered():
        swarm = _settled(nodes, parameters)
        sent_before = swarm.sent()
        for number in range(times):
            author = swarm.nodes[(number * nodes // times + 1) % nodes]
            before = swarm.received()
            begun = swarm.loop.now
            bounds.append(bound_s(travels, author.links_to_farthest()))
            author.publish(number + 1, size)
            seconds.append(swarm.run_until_all_hold(1, number + 1, GIVE_UP_S) - begun)
            payload += swarm.received().payload - before.payload
        sent = [after - before for after, before in zip(swarm.sent(), sent_before, strict=True)]
    return {
        "nodes": nodes,
        "seconds": seconds,
        "bound_s": median(bounds),
        "received_over_least": payload / (times * (nodes - 1) * travels),
        "busiest_quarter": sum(sorted(sent)[-nodes // 4 :]) / sum(sent),
    }


def whole_round(nodes: int, parameters: int) -> dict[str, Any]:
    """All publish at the same moment, the worst case of a round."""
    size = payload_bytes(parameters)
    travels = packed_bytes(size)
    with memo.remembered():
        swarm = _settled(nodes, parameters)
        before, begun = swarm.received(), swarm.loop.now
        for node in swarm.nodes:
            node.publish(1, size)
        seconds = swarm.run_until_all_hold(nodes, 1, GIVE_UP_S * nodes) - begun
        swarm.loop.run(max(swarm.loop.now, begun + ROUND_S))
        received = swarm.received()
    payload = received.payload - before.payload
    return {
        "nodes": nodes,
        "seconds": seconds,
        "bound_s": bound_s((nodes - 1) * travels, 1),
        "received_over_least": payload / (nodes * (nodes - 1) * travels),
        "control_over_payload": (received.control - before.control) / payload,
    }


def _settled(nodes: int, parameters: int) -> Swarm:
    swarm = Swarm(nodes, LINE, parameters)
    for number, node in enumerate(swarm.nodes):
        swarm.loop.at(START_S * number, node.start)
    swarm.loop.run(START_S * nodes + SETTLE_S)
    return swarm


# -- what is shown


def tables(figures: dict[str, Any]) -> list[Table]:
    """Tables for daemons, for one author, and for all at once."""
    on_loopback = [
        (
            str(row["nodes"]),
            f"{median(row['seconds']):.2f} s",
            f"{row['control_over_payload']:.2%}",
        )
        for row in figures["daemons"]
    ]
    one = [
        (
            str(row["nodes"]),
            f"{row['bound_s']:.2f} s",
            f"{median(row['seconds']):.2f} s",
            f"{max(row['seconds']):.2f} s",
            f"{_over_bound(row):.2f}",
            f"{row['busiest_quarter']:.0%}",
        )
        for row in figures["simulated"]
    ]
    everybody = [
        (
            str(row["nodes"]),
            f"{row['bound_s']:.2f} s",
            f"{row['seconds']:.2f} s",
            f"{row['seconds'] / row['bound_s']:.2f}",
            f"{row['control_over_payload']:.2%}",
        )
        for row in figures["rounds"]
    ]
    size, of_rounds = (f"{figures[key] / 1e6:.1f} MB" for key in ("packed_bytes", "packed_bytes_of_rounds"))
    return [
        Table(
            f"daemons on loopback, one delta of {of_rounds}",
            ("nodes", "everywhere after", "control"),
            on_loopback,
        ),
        Table(
            f"simulated, 100 Mbit/s and 20 ms, one delta of {size}",
            ("nodes", "bound", "median", "slowest", "of the bound", "sent by the busiest quarter"),
            one,
        ),
        Table(
            f"simulated likewise, a delta of {of_rounds} from everybody at once",
            ("nodes", "bound", "everywhere after", "of the bound", "control"),
            everybody,
        ),
    ]


def _over_bound(row: dict[str, Any]) -> float:
    return float(median(row["seconds"]) / row["bound_s"])


def _worst(name: str, kinds: Sequence[str]) -> Any:
    return lambda figures: max(row[name] for kind in kinds for row in figures[kind])


GOALS = (
    Goal(
        what="payload bytes received, times the least (worst of all runs)",
        measured=_worst("received_over_least", ("daemons", "simulated", "rounds")),
        at_most=1.05,
    ),
    Goal(
        what="one delta everywhere, up to 16 nodes: time over the bound (median, worst number of nodes)",
        measured=lambda figures: max(_over_bound(row) for row in figures["simulated"] if row["nodes"] <= 16),
        at_most=2.0,
        reason="a node asks whoever offers a chunk first, however busy, and it goes through two or three",
    ),
    Goal(
        what="one delta everywhere, any number of nodes: time over the bound (median, worst number of nodes)",
        measured=lambda figures: max(_over_bound(row) for row in figures["simulated"]),
        at_most=2.0,
        reason=(
            "each chunk is told of and asked for at every hop, and what a node sends follows how many links"
            " it has: its line is busy that much longer than an even share would take"
        ),
    ),
    Goal(
        what="a delta from everybody at once: time over the bound (worst number of nodes)",
        measured=lambda figures: max(row["seconds"] / row["bound_s"] for row in figures["rounds"]),
        at_most=2.0,
    ),
    Goal(
        what="control traffic over payload, a round of 30 s (worst number of nodes)",
        measured=lambda figures: 100 * max(row["control_over_payload"] for row in figures["rounds"]),
        at_most=1.0,
        unit="%",
    ),
)


def plot(figures: dict[str, Any], folder: Path) -> None:
    """Time, as a multiple of the bound, over the number of nodes."""
    figure, (one, everybody) = axes(2)
    for axis, rows, title in (
        (one, figures["simulated"], "one delta"),
        (everybody, figures["rounds"], "a delta from everybody"),
    ):
        nodes = [row["nodes"] for row in rows]
        axis.plot(nodes, [median(_list(row["seconds"])) for row in rows], marker="o", label="measured")
        axis.plot(nodes, [row["bound_s"] for row in rows], linestyle="--", label="bound")
        axis.set(title=title, xlabel="nodes", ylabel="seconds until on all", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.legend()
    save(figure, folder / "spread.svg")


def _list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]
