"""`topk8`, `topk16` and `topk`: the largest of every 8, 16 or 64 values, as one byte; 1, 0.5 or 0.13 bit a
parameter, and 0.6, 0.37 or 0.13 as chunks travel (see `payloads`).

A section holds one exponent byte per block of 4096 values, then one byte per run. From the lowest bit up, the
byte holds the value's position in its run (6 bits), whether it is negative, and whether its magnitude is 3 or
2 times ``2**exponent``. NOTHING says that the whole run is 0. What is not sent stays in the sender's
error-feedback residual.

Shorter runs leave bits of the position at 0, which cost nothing once packed. Finer magnitudes in their place
(2, 3, 4 and 6; 2 to 24; linear steps) took 5 to 20 % more packed bytes for 1 % less error with feedback, on
deltas of a small GPT: what is left out weighs more. Those bytes are better spent on a shorter run.

The 64 largest of all 4096 values would hold a fifth more of a delta's energy than the largest of each run of
64. But their positions would take 12 bits each, or 8 in Elias-Fano coding, not 6.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import OuterDefaults, Sums, Survey, bit_length, in_blocks, multipliers
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints, sum_of_squares

BLOCK = 4096
EXPONENT_MAX = 27
NEGATIVE = 64
LARGE = 128
NOTHING = 255
"""Entry of a run of which nothing is sent. So the last of 64, if negative and large, is sent as small."""


class TopKCodec:
    """Sparse, with one bit of magnitude."""

    def __init__(self, name: str, run: int, learning_rate: float) -> None:
        """It sends so little of a delta that longer outer steps make up for it, if the rest is soon
        forgotten."""
        self.name = name
        self.run = run
        self.outer = OuterDefaults(learning_rate, 0.0, 0.8)
        self.outer_by_mean = OuterDefaults(1.5 * learning_rate, 0.0, 0.8)
        self.runs = BLOCK // run
        """Of a whole block."""

    def section_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) + -(-numel // self.run)

    def encode(self, values: Ints) -> bytes:
        runs = in_blocks(values, self.run)
        positions = np.abs(runs).argmax(axis=1)  # of equal values, the first
        picked = np.take_along_axis(runs, positions[:, None], axis=1)[:, 0]
        magnitudes = np.abs(picked)
        exponents = _exponents(in_blocks(magnitudes, self.runs).astype(np.int64))
        units = np.int32(1) << exponents.astype(np.int32).repeat(self.runs)[: len(runs)]
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
        entries = data[blocks:][start // self.run : -(-stop // self.run)]
        positions = np.arange(0, stop - start, self.run, dtype=np.intp)
        positions += entries & (self.run - 1)
        levels = LEVELS[entries]
        levels *= factors.repeat(self.runs)[: len(levels)]
        if len(entries) and positions[-1] >= stop - start:  # only an incomplete last run has such positions
            if entries[-1] != NOTHING:
                raise PayloadError(f"{self.name}: a position past the last of {numel} values")
            positions, levels = positions[:-1], levels[:-1]
        return positions, levels


def _exponents(magnitudes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Each block's exponent, uint8[blocks], from the largest magnitudes of its runs, [blocks, runs].

    The levels suit the mean of those magnitudes that are at or above the mean: most of rare tokens'
    embeddings hardly moved.
    """
    sums = magnitudes.sum(axis=1, keepdims=True)
    above = np.where(magnitudes < -(-sums // magnitudes.shape[1]), 0, magnitudes)
    means = above.sum(axis=1) // np.maximum(1, np.count_nonzero(above, axis=1))
    return np.clip(bit_length(means) - 2, 0, EXPONENT_MAX).astype(np.uint8)


def _level_of_entry() -> Ints:
    entries = np.arange(256)
    levels = np.where(entries & LARGE, 3, 2) * np.where(entries & NEGATIVE, -1, 1)
    return np.where(entries == NOTHING, 0, levels).astype(np.int32)


LEVELS = _level_of_entry()
"""The value that each byte stands for, in units of ``2**exponent``."""


TOPK8 = TopKCodec("topk8", 8, 1.4)
TOPK16 = TopKCodec("topk16", 16, 1.7)
TOPK = TopKCodec("topk", 64, 3.0)
