"""`topk`: the largest of every 64 values, as one byte; 0.13 bit a parameter.

A section holds one exponent byte per block of 4096 values, then one byte per run of 64. From the lowest bit
up, the byte holds the value's position in its run (6 bits), whether it is negative, and whether its magnitude
is 3 or 2 times ``2**exponent``. NOTHING says that the whole run is 0. What is not sent stays in the sender's
error-feedback residual.

The 64 largest of all 4096 values would hold a fifth more of a delta's energy. But their positions would take
12 bits each, or 8 in Elias-Fano coding, where that of the largest of a run takes 6.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import OuterDefaults, Sums, Survey, bit_length, in_blocks, multipliers
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints, sum_of_squares

BLOCK = 4096
RUN = 64
RUNS = BLOCK // RUN
"""Runs of a whole block."""
EXPONENT_MAX = 27
NEGATIVE = 64
LARGE = 128
NOTHING = 255
"""Entry of a run of which nothing is sent. So a run's last value, if negative and large, is sent as small."""


class TopKCodec:
    """Sparse, with one bit of magnitude."""

    name = "topk"
    outer = OuterDefaults(3.0, 0.0, 0.8)
    """It sends so little of a delta that longer steps make up for it, if the rest is soon forgotten."""
    outer_by_mean = OuterDefaults(4.5, 0.0, 0.8)

    def section_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) + -(-numel // RUN)

    def encode(self, values: Ints) -> bytes:
        runs = in_blocks(values, RUN)
        positions = np.abs(runs).argmax(axis=1)  # of equal values, the first
        picked = np.take_along_axis(runs, positions[:, None], axis=1)[:, 0]
        magnitudes = np.abs(picked)
        exponents = _exponents(in_blocks(magnitudes, RUNS).astype(np.int64))
        units = np.int32(1) << exponents.astype(np.int32).repeat(RUNS)[: len(runs)]
        # The border between levels 2 and 3 lies at 5 half units, that between 0 and 2 at one unit.
        is_large = 2 * magnitudes >= 5 * units
        entries = positions + NEGATIVE * (picked < 0) + LARGE * is_large
        entries -= LARGE * (entries == NOTHING)
        entries[magnitudes <= units] = NOTHING
        section: bytes = exponents.tobytes() + entries.astype(np.uint8).tobytes()
        return section

    def decode(self, section: memoryview, numel: int, start: int, stop: int) -> Ints:
        positions, levels = self._entries(section, numel, start, stop)
        values = np.zeros(stop - start, dtype=np.int32)
        values[positions] = levels
        return values

    def accumulate(self, section: memoryview, numel: int, start: int, factor: int, sums: Sums) -> None:
        positions, levels = self._entries(section, numel, start, start + sums.size)
        sums[positions] += np.multiply(levels, np.int64(factor), dtype=np.int64)  # no position twice

    def survey(self, section: memoryview, numel: int, start: int, stop: int, sampling: slice) -> Survey:
        positions, levels = self._entries(section, numel, start, stop)
        chosen = range(stop - start)[sampling]
        sample = np.zeros(len(chosen), dtype=np.int32)
        place, rest = np.divmod(positions - chosen.start, chosen.step)
        is_chosen = (rest == 0) & (place >= 0)
        sample[place[is_chosen]] = levels[is_chosen]
        return Survey(sum_of_squares(levels), sample)

    def _entries(
        self, section: memoryview, numel: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.intp], Ints]:
        """Ascending positions, counted from `start`, one per run, and the values there."""
        data, blocks = np.frombuffer(section, dtype=np.uint8), -(-numel // BLOCK)
        factors = multipliers(data[:blocks][start // BLOCK : -(-stop // BLOCK)], EXPONENT_MAX)
        entries = data[blocks:][start // RUN : -(-stop // RUN)]
        positions = np.arange(0, stop - start, RUN, dtype=np.intp)
        positions += entries & (RUN - 1)
        levels = LEVELS[entries]
        levels *= factors.repeat(RUNS)[: len(levels)]
        if len(entries) and positions[-1] >= stop - start:  # only an incomplete last run has such positions
            if entries[-1] != NOTHING:
                raise PayloadError(f"topk: a position past the last of {numel} values")
            positions, levels = positions[:-1], levels[:-1]
        return positions, levels


def _exponents(magnitudes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Each block's exponent, uint8[blocks], from the largest magnitudes of its runs, [blocks, RUNS].

    The levels suit the mean of those magnitudes that are at or above the mean: most of rare tokens'
    embeddings hardly moved.
    """
    sums = magnitudes.sum(axis=1, keepdims=True)
    above = np.where(magnitudes < -(-sums // RUNS), 0, magnitudes)
    means = above.sum(axis=1) // np.maximum(1, np.count_nonzero(above, axis=1))
    return np.clip(bit_length(means) - 2, 0, EXPONENT_MAX).astype(np.uint8)


def _level_of_entry() -> Ints:
    entries = np.arange(256)
    levels = np.where(entries & LARGE, 3, 2) * np.where(entries & NEGATIVE, -1, 1)
    return np.where(entries == NOTHING, 0, levels).astype(np.int32)


LEVELS = _level_of_entry()
"""The value that each byte stands for, in units of ``2**exponent``."""
