"""Held-out losses that this node's trainer has measured, for pages that are opened later."""

import math
from collections.abc import Iterable
from typing import Any

from gossamer.node.ipc.control import Report

EVALUATIONS_MAX = 2_000
"""The latest ones: 10,000 rounds with one at every fifth."""


class Evaluations:
    """The last held-out loss of each round, oldest dropped first."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._unsaved: dict[int, float] = {}
        self._version = -1
        """Which Phi the latest was measured on; reports repeat it."""

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Take over what an earlier run kept, in order of round."""
        self._losses.update(losses)

    def look(self, report: Report | None) -> None:
        """Note what a trainer reports, if it is news and a number.

        To the daemon that comes after another one a trainer repeats what it told that.
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
        """What is to be written down."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def not_saved(self, losses: dict[int, float]) -> None:
        """Losses that were taken to be saved could not be written; what came meanwhile is newer."""
        self._unsaved = {**losses, **self._unsaved}

    def to_json(self) -> dict[str, Any]:
        """For the page: round and loss of each, and which version of Phi the last one is of."""
        return {"version": self._version, "losses": [list(item) for item in self._losses.items()]}
