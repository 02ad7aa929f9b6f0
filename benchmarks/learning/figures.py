"""Figures of the runs: mean losses, and the bytes that were published to reach them.

A row is one run: its group and case, its seed, its name among all runs (`Run.key`: while a case has that key,
the row is its result), and its curve as columns of equal length.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from benchmarks.learning.cases import Case
from benchmarks.learning.sweep import Outcome, Run
from benchmarks.learning.world import Point

Rows = list[dict[str, Any]]


def row_of(case: Case, run: Run, outcome: Outcome) -> dict[str, Any]:
    """A run in the form in which it is recorded."""
    averaged = [round(point.averaged, 4) for point in outcome.curve]
    return {
        "group": case.group,
        "case": case.label,
        "seed": run.seed,
        "run": run.key,
        "tokens": [point.tokens for point in outcome.curve],
        "published": [round(point.published) for point in outcome.curve],
        "sent": [round(point.sent) for point in outcome.curve],
        "loss": [round(point.loss, 4) for point in outcome.curve],
        **({"averaged": averaged} if isfinite(averaged[-1]) else {}),
        "cpu_s": round(outcome.cpu_s),
        "processor": outcome.processor,
    }


def outcome_of(row: dict[str, Any]) -> Outcome:
    """The outcome of a recorded row's run."""
    columns = [row["tokens"], row["published"], row["sent"], row["loss"]]
    columns += [row["averaged"]] if "averaged" in row else []
    return Outcome([Point(*point) for point in zip(*columns, strict=True)], row["cpu_s"], row["processor"])


def by_case(rows: Rows, group: str) -> dict[str, Rows]:
    """A group's rows by case, in the order in which they were run."""
    found: dict[str, Rows] = {}
    for row in rows:
        if row["group"] == group:
            found.setdefault(row["case"], []).append(row)
    return found


def final_losses(rows: Rows, column: str = "loss") -> list[float]:
    """Each seed's final loss; that of the averaged model is in another column, if the run had one."""
    return [row[column][-1] for row in rows if column in row]


def final_loss(rows: Rows) -> float:
    """The final loss, averaged over seeds."""
    return sum(final_losses(rows)) / len(rows)


def best_loss(rows: Rows) -> float:
    """The same of the averaged model, if that is lower."""
    means = final_losses(rows, "averaged")
    return min(final_loss(rows), sum(means) / len(means)) if means else final_loss(rows)


def same_seeds(some: Rows, others: Rows) -> tuple[Rows, Rows]:
    """The rows of both with seeds that both have, which can be compared."""
    seeds = {row["seed"] for row in some} & {row["seed"] for row in others}
    return [r for r in some if r["seed"] in seeds], [r for r in others if r["seed"] in seeds]


def loss_ratio(some: Rows, others: Rows) -> float:
    """The final loss of some rows, as a multiple of that of others with the same seeds."""
    some, others = same_seeds(some, others)
    return final_loss(some) / final_loss(others)


def bytes_until(row: dict[str, Any], target: float) -> float | None:
    """Bytes that a node had published when the loss first was at or below `target`; None if it never was.

    Loss and bytes are interpolated linearly between two points of the curve.
    """
    for (before, after), (start, end) in zip(pairwise(row["loss"]), pairwise(row["published"]), strict=True):
        if after <= target:
            part = min(1.0, (before - target) / (before - after)) if before > target else 0.0
            return float(start + part * (end - start))
    return None


def mean_bytes_until(rows: Rows, target: float) -> float | None:
    """The mean over seeds; None if any of them never reached the target."""
    found = [bytes_until(row, target) for row in rows]
    reached = [some for some in found if some is not None]
    return sum(reached) / len(reached) if reached and len(reached) == len(found) else None


def bytes_ratio(some: Rows, others: Rows, target: float) -> float:
    """How many times fewer bytes some published than others to the same loss; 0 if they never reached it."""
    some, others = same_seeds(some, others)
    few, many = mean_bytes_until(some, target), mean_bytes_until(others, target)
    return many / few if few and many else 0.0


def mean_curve(rows: Rows, column: str, loss: str = "loss") -> tuple[list[float], list[float]]:
    """A column and a loss, averaged over seeds point by point, without the untrained model's point."""
    return _mean([row[column][1:] for row in rows]), _mean([row[loss][1:] for row in rows])


def _mean(lists: Sequence[Sequence[float]]) -> list[float]:
    return [sum(same) / len(same) for same in zip(*lists, strict=False)]
