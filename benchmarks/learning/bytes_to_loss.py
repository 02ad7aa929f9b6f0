"""How many bytes a node publishes, or sends, until the model has reached a loss."""

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.learning.world import Point

TARGETS = (2.0, 1.8, 1.6)
"""Nats per byte."""


def bytes_until(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Bytes published and sent when the loss first was at `target` or below; None if it never was.

    Between two points of the curve, loss and bytes are taken to be on a straight line.
    """
    for before, after in pairwise(curve):
        if after.loss <= target:
            part = min(1.0, (before.loss - target) / (before.loss - after.loss))
            return (
                before.published + part * (after.published - before.published),
                before.sent + part * (after.sent - before.sent),
            )
    return None
