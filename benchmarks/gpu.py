"""As `waiting`, for a model on a GPU: how much a swarm slows down its inner steps, encoding included.

The loop has half of the cores, because torch runs backward passes in a thread of their own. Both daemons and
the other member have the other half. Inner steps are in bf16, of 16,384 rows. That is few: users who
accumulate gradients have more, and steps that are longer by as much.

The GPU works through its queue while the loop goes on, so a pause of `Peer.step` costs nothing by itself,
unless the GPU runs out of work. So the ratio is that of steps that were waited for to their end.
"""

import os
from typing import Any

import torch

from benchmarks.goals import Goal
from benchmarks.tables import Table
from benchmarks.waiting import ON_GPU, TURNS, measure


def why_not() -> str | None:
    """Why it cannot be measured here; None if it can."""
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure every size: one row per size."""
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    torch.set_num_threads(half)
    try:
        sizes = ON_GPU[:1] if quick else ON_GPU
        return [measure(s, 1 if quick else TURNS, {*cores[:half]}, {*cores[-half:]}) for s in sizes]
    finally:
        os.sched_setaffinity(0, cores)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Steps per second alone and busy, and pauses, by size."""
    lines = [
        (
            f"{row['parameters'] / 1e6:.0f} M",
            str(row["fragments"]),
            f"{row['steps']}",
            f"{row['rounds']}",
            f"{row['alone_steps_per_s']:.3g}/s",
            f"{row['busy_steps_per_s']:.3g}/s",
            f"{row['ratio']:.4f}",
            f"{row['pause_ms_median']:.2f} ms",
            f"{row['pause_ms_max']:.1f} ms",
        )
        for row in rows
    ]
    return [Table("inner steps on a GPU, and pauses of Peer.step", COLUMNS, lines)]


COLUMNS = (
    *("parameters", "fragments", "steps", "rounds", "alone", "busy", "busy / alone"),
    *("median pause", "longest"),
)

GOALS = (
    Goal(
        what="inner steps on a GPU with the network busy, against the loop alone, at the worst size",
        at_least=0.99,
        measured=lambda rows: min(row["ratio"] for row in rows),
        reason="a fragment of 6.3 M parameters was published at every third of these steps of 25 ms. A third"
        " of the loss is the GPU's, some 60 passes through memory, of which one kernel would take an eighth"
        " of the time; the rest is the wait at the end, and telling the GPU anew",
    ),
)
