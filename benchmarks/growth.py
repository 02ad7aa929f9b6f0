"""Measuring one thing at several sizes, and where its cost bends."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

Row = dict[str, Any]

BENDS = 2.0
"""A cost bends where, from the size before, it grew this many times as much as the size did."""


def in_fresh_process(measured: Callable[[int], Row], size: int) -> Row:
    """Measure in a process of its own: a process's memory does not shrink when objects are freed."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (size,))


def bend(rows: Sequence[Row], size: str, cost: str) -> int | None:
    """The first size at which a cost bends."""
    for before, row in pairwise(rows):
        if row[cost] / before[cost] > BENDS * row[size] / before[size]:
            return int(row[size])
    return None


def bends(rows: Sequence[Row], size: str, costs: Mapping[str, str]) -> str:
    """Which costs bend, and where, in words; `costs` are names by key."""
    found = [f"{name} bends at {at:,}" for key, name in costs.items() if (at := bend(rows, size, key))]
    return ", ".join(found) or "nothing grows twice as fast as its size"
