"""`int8` and `int4`: blocks of 256 values, each value a small integer times the block's power of two.

A section holds one exponent byte per block, then the codes of all blocks. Codes are offset binary: code
``c`` means ``(c - 2**(bits-1)) << exponent``. In an int4 block, byte ``j`` holds value ``j`` in its low
half and value ``j + 128`` in its high half, so that both directions work on whole rows.

A step is as fine as a block's largest magnitude allows; in `int4` no finer than the power of two nearest to
1.5 times the mean magnitude, 1.2 sigma of a bell-shaped source. Most codes are -1, 0 and 1 then, and a value
takes two bits as chunks travel (`packing`), not three: an entropy-coded uniform quantizer (Gish and Pierce,
"Asymptotically Efficient Quantizing", 1968). Error feedback brings most of the rest later.

Error: at most half a step of ``2**exponent``; a whole step for a block's largest positive values, which
saturate rather than double everybody's step.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import Dense, bit_length, in_blocks, multipliers, values_in_blocks
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints

BLOCK = 256


class BlockCodec(Dense):
    """Linear quantization of 8 or 4 bits with power-of-two steps."""

    def __init__(self, name: str, bits: int, coarseness: int = 0) -> None:
        """`coarseness`: so many eighths of a block's mean magnitude are the least that a step may be, rounded
        down to a power of two."""
        self.name = name
        self.bits = bits
        self.coarseness = coarseness
        self.level_max = 2 ** (bits - 1) - 1
        self.exponent_max = 30 - bits
        """Keeps every decoded magnitude at 2**29 or below."""

    def section_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (1 + BLOCK * self.bits // 8)

    def encode(self, values: Ints) -> bytes:
        blocks = in_blocks(values, BLOCK)
        exponents = self._exponents(np.abs(blocks), values_in_blocks(values.size, BLOCK))
        half = (np.int32(1) << exponents) >> 1
        levels = (blocks + half[:, None]) >> exponents[:, None]
        codes = (np.clip(levels, -self.level_max - 1, self.level_max) + self.level_max + 1).astype(np.uint8)
        if self.bits == 4:
            codes = (codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)).astype(np.uint8, copy=False)
        section: bytes = exponents.astype(np.uint8).tobytes() + codes.tobytes()
        return section

    def _exponents(self, magnitudes: Ints, counts: npt.NDArray[np.int64]) -> Ints:
        """Each block's, of magnitudes in blocks, so many of which are real."""
        finest = bit_length(magnitudes.max(axis=1)) - (self.bits - 1)
        least = (magnitudes.sum(axis=1, dtype=np.int64) // counts * self.coarseness) >> 3
        exponents = np.maximum(finest, bit_length(least) - 1)
        return np.clip(exponents, 0, self.exponent_max).astype(np.int32)

    def decode(self, section: memoryview, numel: int, start: int = 0, stop: int | None = None) -> Ints:
        if len(section) != self.section_bytes(numel):
            raise PayloadError(f"{self.name}: a section of {len(section)} bytes for {numel} values")
        stop = numel if stop is None else stop
        blocks, part = -(-numel // BLOCK), slice(start // BLOCK, -(-stop // BLOCK))
        data = np.frombuffer(section, dtype=np.uint8)
        factors = multipliers(data[:blocks][part], self.exponent_max)
        codes = data[blocks:].reshape(blocks, -1)[part]
        values = np.empty((len(codes), BLOCK), dtype=np.int32)
        if self.bits == 4:
            np.bitwise_and(codes, 15, out=values[:, : BLOCK // 2])
            np.right_shift(codes, 4, out=values[:, BLOCK // 2 :])
        else:
            values[:] = codes
        values -= self.level_max + 1
        values *= factors[:, None]
        return values.reshape(-1)[: stop - start]


INT8 = BlockCodec("int8", 8)
INT4 = BlockCodec("int4", 4, coarseness=17)
"""17 eighths rounded down to a power of two is the power of two nearest, by ratio, to 1.5."""
