"""Learning at equal tokens: Gossamer beside data-parallel AdamW, DiLoCo, NoLoCo and one worker alone.

All train the same model on the same data with the same inner optimizer, one worker after another in this
process. A full run takes hours of one core. Finished runs are kept in docs/benchmarks/learning.json, and
what is there is not trained again: remove the file to repeat everything.
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.learning.bytes_to_loss import TARGETS, bytes_until
from benchmarks.learning.cases import cases
from benchmarks.learning.curves import Curve, draw
from benchmarks.learning.sweep import Results
from benchmarks.learning.world import Point

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Train what is not in the results yet, or quickly everything at a size that teaches nothing.

    Prints a line as each run ends and the tables, draws the plots, and returns a row for every run.
    """
    torch.set_num_threads(1)
    results = Results(None if quick else FOLDER / "learning.json")
    rows = []
    for case in cases(quick=quick):
        for training in case.runs():
            outcome = results.of(training)
            row = {
                "group": case.group,
                "case": case.label,
                "seed": training.seed,
                "loss": outcome.loss,
                "curve": [list(point) for point in outcome.curve],
                "cpu_s": outcome.cpu_s,
            }
            rows.append(row)
            Console().print(f"{case.group}: {case.label}, seed {training.seed}: {outcome.loss:.3f}")
    show(rows)
    with tempfile.TemporaryDirectory() as aside:
        plot(rows, Path(aside) if quick else FOLDER)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table a group: the final loss, and bytes to some losses."""
    for group in dict.fromkeys(row["group"] for row in rows):
        table = Table(title=group, title_justify="left")
        table.add_column("method")
        for column in ("final loss", "seeds", "MB published a node", *(f"to {t}" for t in TARGETS)):
            table.add_column(column, justify="right")
        for label, same in _by_case(rows, group).items():
            losses = [row["loss"] for row in same]
            table.add_row(
                label,
                f"{sum(losses) / len(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                str(len(losses)),
                f"{same[0]['curve'][-1][1] / 1e6:.2f}",
                *(_megabytes([bytes_until(_points(row), t) for row in same]) for t in TARGETS),
            )
        Console(width=150).print(table)


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw loss over tokens and over bytes of the methods in a calm network, and loss in rough weather."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for group, name in zip(groups, ("learning", "learning-weather"), strict=False):
        curves = [_curve(label, same, 0, 1e-6) for label, same in _by_case(rows, group).items()]
        draw(curves, folder / f"{name}.svg", x_label="tokens of all workers, millions")
    curves = [
        _curve(label, same, 1, 1e-6)
        for label, same in _by_case(rows, groups[0]).items()
        if same[0]["curve"][-1][1]
    ]
    draw(curves, folder / "learning-bytes.svg", x_label="MB published by a node", is_log=True)


def _by_case(rows: list[dict[str, Any]], group: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["group"] == group:
            found.setdefault(row["case"], []).append(row)
    return found


def _points(row: dict[str, Any]) -> list[Point]:
    return [Point(*point) for point in row["curve"]]


def _megabytes(found: list[tuple[float, float] | None]) -> str:
    reached = [both[0] for both in found if both is not None]
    return f"{median(reached) / 1e6:.2f}" if len(reached) == len(found) else "-"


def _curve(label: str, rows: list[dict[str, Any]], column: int, unit: float) -> Curve:
    """All seeds' curves as one; the first point is the untrained model's and is left out."""
    by_point = list(zip(*(_points(row)[1:] for row in rows), strict=False))
    losses = [[point.loss for point in same] for same in by_point]
    return Curve(
        label,
        [unit * sum(point[column] for point in same) / len(same) for same in by_point],
        [min(same) for same in losses],
        [sum(same) / len(same) for same in losses],
        [max(same) for same in losses],
    )
