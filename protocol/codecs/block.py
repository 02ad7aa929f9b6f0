"""`int8` and `int4`: blocks of 256 values, each value a small integer times the block's power of two.

A section holds one exponent byte per block, then the codes of all blocks. Codes are offset binary: code
``c`` means ``(c - 2**(bits-1)) << exponent``. In an int4 block, byte ``j`` holds value ``j`` in its low
half and value ``j + 128`` in its high half, so that encoding and decoding work on whole rows.

A step is as fine as a block's largest magnitude allows. In `int4` it is no finer than once to twice the mean
magnitude, which is 1.1 sigma of a bell-shaped source. Then most codes are -1, 0 and 1, and a value takes two
bits as chunks travel (see `payloads`), not three: an entropy-coded uniform quantizer (Gish and Pierce,
"Asymptotically Efficient Quantizing", 1968). Before rounding, a value is brought nearer to 0 by an eighth of
a step, as in video coding (Sullivan, "Efficient Scalar Quantization of Exponential and Laplacian Random
Variables", 1996): zeros cost least, and rounding does not lengthen a delta. Error feedback sends the rest
later. Where a block of values that are all about as large would round to 0, its step is half as long.

Error: at most half a step of ``2**exponent``, in `int4` five eighths of one; a whole step for a block's
largest positive values, which saturate so as not to double the whole block's step.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import Dense, bit_length, in_blocks, multipliers, values_in_blocks
from gossamer.protocol.fixedpoint import Ints

BLOCK = 256


class BlockCodec(Dense):
    """Linear quantization of 8 or 4 bits with power-of-two steps."""

    def __init__(self, name: str, bits: int, *, is_coarse: bool = False) -> None:
        """`is_coarse`: a step is at least the largest power of two in twice a block's mean magnitude, and
        values are brought nearer to 0 by an eighth of it."""
        self.name = name
        self.bits = bits
        self.is_coarse = is_coarse
        self.level_max = 2 ** (bits - 1) - 1
        self.exponent_max = 30 - bits
        """Keeps every decoded magnitude at 2**29 or below."""

    def section_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (1 + BLOCK * self.bits // 8)

    def encode(self, values: Ints) -> bytes:
        blocks = in_blocks(values, BLOCK)
        exponents = self._exponents(np.abs(blocks), values_in_blocks(values.size, BLOCK))
        steps = (np.int32(1) << exponents)[:, None]
        if self.is_coarse:
            blocks = blocks - np.clip(blocks, -(steps >> 3), steps >> 3)
        levels = (blocks + (steps >> 1)) >> exponents[:, None]
        codes = (np.clip(levels, -self.level_max - 1, self.level_max) + self.level_max + 1).astype(np.uint8)
        if self.bits == 4:
            codes = (codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)).astype(np.uint8, copy=False)
        section: bytes = exponents.astype(np.uint8).tobytes() + codes.tobytes()
        return section

    def _exponents(self, magnitudes: Ints, counts: npt.NDArray[np.int64]) -> Ints:
        """Each block's exponent. `magnitudes` are in blocks; the first `counts` of each are no padding."""
        peaks = magnitudes.max(axis=1)
        exponents = bit_length(peaks) - (self.bits - 1)
        if self.is_coarse:
            means = magnitudes.sum(axis=1, dtype=np.int64) // counts
            exponents = np.maximum(exponents, bit_length(means))
        exponents = np.clip(exponents, 0, self.exponent_max).astype(np.int32)
        steps = np.int32(1) << exponents
        exponents -= peaks <= (steps >> 1) + (steps >> 3)
        return exponents.clip(0)

    def decode(self, section: memoryview, numel: int, start: int, stop: int) -> Ints:
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
INT4 = BlockCodec("int4", 4, is_coarse=True)
