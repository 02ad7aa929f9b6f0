"""Blocks of the data, as a delta claims them: runs, packed.

A run is the first block, and the one after the last. Runs are ascending, with gaps between them. What they
mean is in `protocol.history.data_claims`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from gossamer.protocol import limits
from gossamer.protocol.wire import blob

Runs = list[tuple[int, int]]


def pack_runs(runs: Runs) -> bytes:
    """Encode ascending runs with gaps between them: the lengths of gap and run in turns, as LEB128
    varints."""
    data, end = bytearray(), 0
    for first, stop in runs:
        for number in (first - end, stop - first):
            while number > 0x7F:
                data.append(number & 0x7F | 0x80)
                number >>= 7
            data.append(number)
        end = stop
    return bytes(data)


def runs_in(data: bytes) -> Runs:
    """Inverse of `pack_runs`. Raises ValueError for bytes that it returns for no runs in BLOCKS_MAX."""
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number, shift = 0, 0
    runs, end = [], 0
    for place, (gap, length) in enumerate(zip(numbers[::2], numbers[1::2], strict=False)):
        if length == 0 or (gap == 0 and place > 0):
            raise ValueError("has an empty run or gap")
        runs.append((end + gap, end + gap + length))
        end += gap + length
    if end > limits.BLOCKS_MAX or pack_runs(runs) != data:
        raise ValueError("is not a list of runs of blocks")
    return runs


def claim(value: Any) -> bytes:
    """The check of a claim in a delta's schema."""
    data: bytes = blob(0, limits.CLAIM_BYTES_MAX)(value)
    runs_in(data)
    return data


def size_of(runs: Runs) -> int:
    """The number of blocks in runs."""
    return sum(stop - first for first, stop in runs)


def first_of(runs: Runs, count: int) -> Runs:
    """The first `count` blocks of runs."""
    kept: Runs = []
    for first, stop in runs:
        if count > 0:
            kept.append((first, min(stop, first + count)))
            count -= stop - first
    return kept


def pack_blocks(blocks: Iterable[int]) -> tuple[bytes, list[int]]:
    """Pack as many blocks as one claim may hold, lowest first. Returns the claim, and the blocks that are
    left."""
    ascending = np.unique(np.fromiter(blocks, np.int64))
    parts = np.split(ascending, np.flatnonzero(np.diff(ascending) > 1) + 1)
    runs = [(int(part[0]), int(part[-1]) + 1) for part in parts[: limits.CLAIM_BYTES_MAX // 2] if part.size]
    while len(data := pack_runs(runs)) > limits.CLAIM_BYTES_MAX:
        runs.pop()
    return data, ascending[size_of(runs) :].tolist()
