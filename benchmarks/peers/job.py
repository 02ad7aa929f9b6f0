"""What all contenders have in common: the model, its optimizer and data, and the pace of the steps.

Runs in either environment: of Gossamer it imports nothing but `models`. A contender's script is a plain loop
over `Job.batches`, with its system's own calls in it.

**A step is mostly waiting**, as on a host whose accelerator computes: a batch comes when a step's time is
over. Who is late by less than half a step makes up for that, and what is more is lost. So cores are not what
is measured, but how long a loop stands still.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.models.registry import build_task
from gossamer.models.task import Batch, DataStream, Task

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The options that a contender is started with, as JSON."""

    rank: int
    life: int
    """0, and one more whenever it was started again."""
    folder: str
    """A folder that all hosts see: by files in it the harness and they tell each other what to do."""
    host: str
    """This host's address."""
    coordinator: str
    """The address of the host where the lighthouse or bootstrap peer runs."""
    workers: int
    options: dict[str, Any]
    step_s: float
    mark: int
    """The step after which the model is kept, for the loss at equal tokens; 0 for none."""
    settings: dict[str, Any]
    """The contender's own."""


class Job:
    """One worker's part of the job."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.entry = Entry(**json.loads(sys.argv[1]))
        self._folder = Path(self.entry.folder)
        self._task: Task = build_task("text", self.entry.options, ())
        self.model: nn.Module = self._task.build_model(0)
        (self.optimizer,) = self._task.build_optimizer(self.model)
        self.steps = 0
        self._last: int | None = None
        self._log = self._path("steps").open("ab", buffering=0)

    def _path(self, what: str, suffix: str = "") -> Path:
        return self._folder / f"{what}{self.entry.rank}-{self.entry.life}{suffix}"

    def batches(self, *, ends_itself: bool = False) -> Iterator[Batch]:
        """Batches in time, from when all hosts are ready until the harness says that it is over.

        A loop that `ends_itself` does so by `ends_at`.
        """
        entry = self.entry
        seed = bytes([entry.rank, entry.life])
        batches = self._task.batches(DataStream(seed=0, node_id=seed))
        self.note("ready")
        while not (self._folder / "go").exists():
            time.sleep(POLL_S)
        due = time.monotonic()
        while ends_itself or not self.is_over:
            yield next(batches)
            self.steps += 1
            self._log.write(np.float64(time.monotonic()).tobytes())
            due = max(due + entry.step_s, time.monotonic() - entry.step_s / 2)
            time.sleep(max(0.0, due - time.monotonic()))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._task.loss(model, batch)

    def tokens(self, batch: Batch) -> int:
        return self._task.tokens(batch)

    @property
    def is_over(self) -> bool:
        """Whether the harness has said so."""
        return (self._folder / "stop").exists()

    def ends_at(self, progress: int, ahead: int) -> bool:
        """Whether all are to end here, where they must end together: `ahead` of where the first learnt of it.

        `progress` counts what they do in lock step.
        """
        path = self._folder / "last"
        if self._last is None and self.is_over:
            if self.entry.rank == 0:
                (self._folder / "last.new").write_text(str(progress + ahead))
                (self._folder / "last.new").replace(path)
            self._last = int(path.read_text()) if path.exists() else None
        return self._last is not None and progress >= self._last

    def note(self, what: str) -> None:
        """Tell the harness when something first happened: ready, joined."""
        path = self._path(what)
        if not path.exists():
            path.write_text(repr(time.monotonic()))

    @property
    def is_marked(self) -> bool:
        """Whether this is the step whose model is kept. Of the first worker only."""
        return self.entry.rank == 0 and self.steps + 1 == self.entry.mark

    def keep(self, model: nn.Module, name: str) -> None:
        """Keep the model for the harness: mark, or end."""
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).float().numpy()
        np.save(self._path(name, ".npy"), values)
