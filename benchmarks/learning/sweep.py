"""Runs configurations one after another and keeps the results, so that an interrupted sweep can go on."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.learning import alone, data_parallel, diloco, gossamer, noloco, processes
from benchmarks.learning.world import Point, Scale, World
from gossamer.protocol.errors import DivergedError

METHODS = {
    "data-parallel": data_parallel.train,
    "diloco": diloco.train,
    "noloco": noloco.train,
    "alone": alone.train,
    "gossamer": gossamer.train,
    "processes": processes.train,
}

DIVERGED = 99.0
"""The loss recorded for a run that left the range of fixed point; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One method with its settings, in one world. Nothing else influences the outcome."""

    method: str
    settings: dict[str, Any]
    scale: Scale
    seed: int

    @property
    def key(self) -> str:
        """The name of this run among all others, by which a sweep resumes."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    curve: list[Point]
    cpu_s: float
    processor: str
    """The processor that trained it: bits and seconds depend on that."""

    @property
    def loss(self) -> float:
        """The final loss."""
        return self.curve[-1].loss


class Results:
    """Finished runs: those in a JSON file, if there is one, and those recorded before."""

    def __init__(self, file: Path | None = None, recorded: Mapping[str, Outcome] | None = None) -> None:
        """`recorded` is by `Run.key`; runs in the file take precedence."""
        self._file, self._recorded = file, recorded or {}
        self._rows: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}

    def of(self, run: Run) -> Outcome:
        """The outcome of a run, which is trained if that is not known."""
        if run.key not in self._rows:
            if run.key in self._recorded:
                return self._recorded[run.key]
            self._note(run, train(run))
        row = self._rows[run.key]
        return Outcome([Point(*point) for point in row["curve"]], row["cpu_s"], row["processor"])

    def _note(self, run: Run, outcome: Outcome) -> None:
        self._rows[run.key] = {
            "cpu_s": round(outcome.cpu_s, 1),
            "processor": outcome.processor,
            "curve": [
                [p.tokens, round(p.published), round(p.sent), round(p.loss, 4), round(p.averaged, 4)]
                for p in outcome.curve
            ],
        }
        if self._file:
            rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in self._rows.items())
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text("{\n" + ",\n".join(rows) + "\n}\n")
            part.replace(self._file)


def train(run: Run) -> Outcome:
    """Train from the beginning to the end."""
    begun = time.process_time()
    points = METHODS[run.method](World(run.scale, run.seed), **run.settings)
    curve = list(_until_diverged(points))
    return Outcome(curve, time.process_time() - begun, machine.processor())


def _until_diverged(points: Iterator[Point]) -> Iterator[Point]:
    last = Point(0, 0.0, 0.0, inf)
    try:
        for last in points:
            yield last
    except DivergedError:
        yield last._replace(loss=DIVERGED)
