"""`int8` and `int4`: blocks of 256 values, each value a small integer times the block's power of two.

A section holds one exponent byte per block, then the codes of all blocks. Codes are offset binary: code
``c`` means ``(c - 2**(bits-1)) << exponent``. In an int4 block, byte ``j`` holds value ``j`` in its low
half and value ``j + 128`` in its high half, so that both directions work on whole rows.

Error: at most half a step of ``2**exponent``; a whole step for a block's largest positive values, which
saturate rather than double everybody's step.
"""

import numpy as np

from gossamer.protocol.codecs.base import Dense, bit_length, in_blocks, multipliers
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints

BLOCK = 256


class BlockCodec(Dense):
    """Linear quantization of 8 or 4 bits with power-of-two steps."""

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        self.bits = bits
        self.level_max = 2 ** (bits - 1) - 1
        self.exponent_max = 30 - bits
        """Keeps every decoded magnitude at 2**29 or below."""

    def section_bytes_max(self, numel: int) -> int:
        return -(-numel // BLOCK) * (1 + BLOCK * self.bits // 8)

    def section_bytes(self, data: memoryview, numel: int) -> int:
        return self.section_bytes_max(numel)

    def encode(self, values: Ints) -> bytes:
        blocks = in_blocks(values, BLOCK)
        exponents = self._exponents(np.abs(blocks).max(axis=1))
        half = (np.int32(1) << exponents) >> 1
        levels = (blocks + half[:, None]) >> exponents[:, None]
        codes = (np.clip(levels, -self.level_max - 1, self.level_max) + self.level_max + 1).astype(np.uint8)
        if self.bits == 4:
            codes = (codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)).astype(np.uint8, copy=False)
        section: bytes = exponents.astype(np.uint8).tobytes() + codes.tobytes()
        return section

    def _exponents(self, peaks: Ints) -> Ints:
        return np.clip(bit_length(peaks) - (self.bits - 1), 0, self.exponent_max).astype(np.int32)

    def decode(self, section: memoryview, numel: int, start: int = 0, stop: int | None = None) -> Ints:
        if len(section) != self.section_bytes_max(numel):
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
