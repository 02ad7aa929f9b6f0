"""Held-out losses that this node's trainer has measured, for pages that are opened later."""

import math
from collections.abc import Iterable
from typing import Any

from gossamer.node.ipc.control import Report

EVALUATIONS_MAX = 2_000
"""How many are kept: 10,000 rounds with an evaluation every fifth round."""


class Evaluations:
    """The last held-out loss of each round; the oldest are dropped first."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._unsaved: dict[int, float] = {}
        self._version = -1
        """The version of Phi that the latest loss was measured on; reports repeat it."""

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Take over the losses that an earlier run kept, in order of round."""
        self._losses.update(losses)

    def look(self, report: Report | None) -> None:
        """Note a trainer's held-out loss, if it is new and a finite number.

        A trainer repeats to a restarted daemon what it told the one before.
        """
        if report is None or report.val_loss is None or report.evaluated_version == self._version:
            return
        self._version, round_ = report.evaluated_version, report.evaluated_round
        if not math.isfinite(report.val_loss) or self._losses.get(round_) == report.val_loss:
            return
        self._losses.pop(round_, None)
        self._losses[round_] = self._unsaved[round_] = report.val_loss
        if len(self._losses) > EVALUATIONS_MAX:
            del self._losses[next(iter(self._losses))]

    def take_unsaved(self) -> dict[int, float]:
        """The losses that are to be saved."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def not_saved(self, losses: dict[int, float]) -> None:
        """Note that losses taken by `take_unsaved` could not be saved. Those that came meanwhile are
        newer."""
        self._unsaved = {**losses, **self._unsaved}

    def to_json(self) -> dict[str, Any]:
        """For the page: the round and loss of each, and the version of Phi of the last one."""
        return {"version": self._version, "losses": [list(item) for item in self._losses.items()]}
