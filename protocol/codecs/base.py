"""What a codec is, and the arithmetic that several share."""

from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints, sum_of_squares

Bytes = npt.NDArray[np.uint8]

Sums = npt.NDArray[np.int64]

GRAIN = 4096
"""Parts of a section begin at multiples of this: every codec's blocks divide it."""

ZERO_BLOCK = 255
"""Exponent of a block that decodes to zeros, for codecs that have no level for zero."""


class Survey(NamedTuple):
    """What a first pass over part of a tensor gives; see `Codec.survey`."""

    squares: int
    sample: Ints


class OuterDefaults(NamedTuple):
    """Outer settings that suit a codec in a new manifest; docs/benchmarks.md has the evidence.

    Momentum only pays from 4 bits up. The mean of deltas that differ is shorter than each of them, and `rda`
    makes up for that: where all tensors are averaged by mean, the steps are longer instead, and then tolerate
    less momentum.
    """

    learning_rate: float
    momentum: float
    ef_decay: float


class Codec(Protocol):
    """One way to write a tensor. Stateless; a *section* is the bytes of one tensor in a payload."""

    name: str
    outer: OuterDefaults
    outer_by_mean: OuterDefaults
    """Where all tensors are averaged by mean."""

    def section_bytes(self, numel: int) -> int:
        """The length in bytes of a section of `numel` values."""
        ...

    def encode(self, values: Ints) -> bytes:
        """Write int32 fixed-point values (any shape, magnitudes below 2**30) as a section."""
        ...

    def decode(self, section: memoryview, numel: int, start: int, stop: int) -> Ints:
        """Read values `start` to `stop` of a section back, int32[stop - start], magnitudes below 2**30.

        The section is of the right length. `start` is a multiple of `GRAIN`, and so is `stop` unless it is
        the end. Raises PayloadError, at least for what is wrong in that part.
        """
        ...

    def accumulate(self, section: memoryview, numel: int, start: int, factor: int, sums: Sums) -> None:
        """Add `factor` times the values from `start` on to `sums`, int64, one element for each value."""
        ...

    def survey(self, section: memoryview, numel: int, start: int, stop: int, sampling: slice) -> Survey:
        """The exact sum of squares of values `start` to `stop`, and those values that `sampling` picks."""
        ...


class Dense(Codec):
    """`accumulate` and `survey` for codecs that write every value, by way of `decode`."""

    outer = OuterDefaults(0.5, 0.7, 1.0)
    outer_by_mean = OuterDefaults(0.7, 0.5, 1.0)

    def accumulate(self, section: memoryview, numel: int, start: int, factor: int, sums: Sums) -> None:
        values = self.decode(section, numel, start, start + sums.size)
        sums += np.multiply(values, np.int64(factor), dtype=np.int64)

    def survey(self, section: memoryview, numel: int, start: int, stop: int, sampling: slice) -> Survey:
        values = self.decode(section, numel, start, stop)
        return Survey(sum_of_squares(values), values[sampling])


def bit_length(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Bit length of non-negative integers below 2**53, element by element (0 for 0)."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int32)


def in_blocks(values: Ints, block: int) -> Ints:
    """Return `values` as int32[blocks, block], padded with zeros at the end."""
    flat = np.ascontiguousarray(values, dtype=np.int32).reshape(-1)
    padded = np.zeros(-(-flat.size // block) * block, dtype=np.int32)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def values_in_blocks(numel: int, block: int) -> npt.NDArray[np.int64]:
    """How many of `numel` values lie in each block: the last one may have fewer."""
    starts = np.arange(0, numel, block, dtype=np.int64)
    return np.minimum(numel - starts, block)


def multipliers(exponents: Bytes, exponent_max: int, zero_allowed: bool = False) -> Ints:
    """Turn exponent bytes into factors ``2**e``, int32, 0 for ZERO_BLOCK. Raises PayloadError."""
    factors = _multipliers(exponent_max, zero_allowed)[exponents]
    if factors.size and factors.min() < 0:
        raise PayloadError(f"a block exponent is over {exponent_max}")
    return factors


@cache
def _multipliers(exponent_max: int, zero_allowed: bool) -> Ints:
    """The factor for every exponent byte, -1 for invalid ones."""
    table = np.full(256, -1, dtype=np.int32)
    table[: exponent_max + 1] = 1 << np.arange(exponent_max + 1)
    if zero_allowed:
        table[ZERO_BLOCK] = 0
    return table
