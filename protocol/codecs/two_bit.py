"""`int2`: blocks of 256 values, each one of the four levels -3, -1, 1, 3 times the block's power of two.

Four levels without zero are the 2-bit uniform quantizer of least error for a bell-shaped source (Max,
"Quantizing for Minimum Distortion", 1960): the unit is 0.498 sigma, which is 0.62 of the mean magnitude.
Error feedback makes up for values that saturate. A block of zeros has the exponent ZERO_BLOCK.

A section holds one exponent byte per block, then the codes; byte ``j`` of a block holds the values
``j``, ``j + 64``, ``j + 128`` and ``j + 192`` from its lowest bits up, as ``(level + 3) / 2``.
"""

import numpy as np

from gossamer.protocol.codecs.base import (
    ZERO_BLOCK,
    Dense,
    OuterDefaults,
    bit_length,
    in_blocks,
    multipliers,
    values_in_blocks,
)
from gossamer.protocol.fixedpoint import Ints

BLOCK = 256
QUARTER = BLOCK // 4
EXPONENT_MAX = 27


class TwoBitCodec(Dense):
    """Mid-rise quantization of 2 bits."""

    name = "int2"
    outer = OuterDefaults(1.0, 0.0, 0.9)
    outer_by_mean = OuterDefaults(1.4, 0.0, 0.9)

    def section_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (1 + QUARTER)

    def encode(self, values: Ints) -> bytes:
        blocks = in_blocks(values, BLOCK)
        means = np.abs(blocks).sum(axis=1, dtype=np.int64) // values_in_blocks(values.size, BLOCK)
        exponents = np.clip(bit_length(means * 225 // 256) - 1, 0, EXPONENT_MAX).astype(np.int32)
        step = np.int32(2) << exponents
        # floor(v / step) is -2, -1, 0 or 1 for the four levels; clamping saturates the rest.
        codes = (np.clip(blocks >> bit_length(step - 1)[:, None], -2, 1) + 2).astype(np.uint8)
        packed = np.zeros((len(blocks), QUARTER), dtype=np.uint8)
        for part in range(4):
            packed |= codes[:, part * QUARTER : (part + 1) * QUARTER] << (2 * part)
        is_zero = ~blocks.any(axis=1)
        packed[is_zero] = 0
        return np.where(is_zero, ZERO_BLOCK, exponents).astype(np.uint8).tobytes() + packed.tobytes()

    def decode(self, section: memoryview, numel: int, start: int, stop: int) -> Ints:
        blocks, part = -(-numel // BLOCK), slice(start // BLOCK, -(-stop // BLOCK))
        data = np.frombuffer(section, dtype=np.uint8)
        factors = multipliers(data[:blocks][part], EXPONENT_MAX, zero_allowed=True)
        packed = data[blocks:].reshape(blocks, QUARTER)[part]
        values = np.empty((len(packed), BLOCK), dtype=np.int32)
        for quarter in range(4):
            values[:, quarter * QUARTER : (quarter + 1) * QUARTER] = (packed >> (2 * quarter)) & 3
        values *= 2
        values -= 3
        values *= factors[:, None]
        return values.reshape(-1)[: stop - start]
