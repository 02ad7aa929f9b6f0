"""What a codec is, and the arithmetic that several share."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints

Bytes = npt.NDArray[np.uint8]

ZERO_BLOCK = 255
"""Exponent of a block that decodes to zeros, for codecs whose levels leave out zero."""


class Codec(Protocol):
    """One way to write a tensor. Stateless; a *section* is the bytes of one tensor in a payload."""

    name: str

    def section_bytes_max(self, numel: int) -> int:
        """Most bytes that a section of `numel` values can take."""
        ...

    def section_bytes(self, data: memoryview, numel: int) -> int:
        """Length of the section of `numel` values at the start of `data`. Raises PayloadError."""
        ...

    def encode(self, values: Ints) -> bytes:
        """Write int32 fixed-point values (any shape, magnitudes below 2**30) as a section."""
        ...

    def decode(self, section: memoryview, numel: int) -> Ints:
        """Read a section back as int32[numel], magnitudes below 2**30. Raises PayloadError."""
        ...


def bit_length(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Bit length of non-negative integers below 2**53, element by element (0 for 0)."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int32)


def in_blocks(values: Ints, block: int) -> Ints:
    """Return `values` as int32[blocks, block], padded with zeros at the end."""
    flat = np.ascontiguousarray(values, dtype=np.int32).reshape(-1)
    padded = np.zeros(-(-flat.size // block) * block, dtype=np.int32)
    padded[: flat.size] = flat
    return padded.reshape(-1, block)


def multipliers(exponents: Bytes, exponent_max: int, zero_allowed: bool = False) -> Ints:
    """Turn exponent bytes to factors ``2**e``, int32, 0 for ZERO_BLOCK. Raises PayloadError."""
    is_zero = exponents == ZERO_BLOCK
    if np.any((exponents > exponent_max) & ~(is_zero & zero_allowed)):
        raise PayloadError(f"a block exponent is over {exponent_max}")
    factors = np.int32(1) << np.where(is_zero, 0, exponents).astype(np.int32)
    return np.where(is_zero, np.int32(0), factors).astype(np.int32)
