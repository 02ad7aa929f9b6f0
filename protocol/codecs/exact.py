"""`exact`: every bit of every value, for tests and tiny models.

A section holds the values, zigzagged, in blocks of 4096 (the last one shorter). Each block is written byte
plane by byte plane, lowest first: small values leave the high planes almost empty, and those pack well.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import Bytes, Dense
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints

BLOCK = 4096


class ExactCodec(Dense):
    """Lossless."""

    name = "exact"

    def section_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Ints) -> bytes:
        flat = np.ascontiguousarray(values, dtype="<i4").reshape(-1)
        data = ((flat << 1) ^ (flat >> 31)).view(np.uint8)
        whole = data.size - data.size % (4 * BLOCK)
        blocks, rest = data[:whole].reshape(-1, BLOCK, 4), data[whole:].reshape(-1, 4)
        section: bytes = blocks.transpose(0, 2, 1).tobytes() + rest.T.tobytes()
        return section

    def decode(self, section: memoryview, numel: int, start: int, stop: int) -> Ints:
        data = np.frombuffer(section, dtype=np.uint8)[4 * start : 4 * stop]
        whole = data.size - data.size % (4 * BLOCK)
        zigzag = np.empty(stop - start, dtype="<u4")
        _interleave(data[:whole].reshape(-1, 4, BLOCK), zigzag[: whole // 4])
        _interleave(data[whole:].reshape(1, 4, -1), zigzag[whole // 4 :])
        values = (zigzag >> 1).astype(np.int32) ^ -(zigzag & 1).astype(np.int32)
        if np.any(np.abs(values.astype(np.int64)) >= VALUE_LIMIT):
            raise PayloadError("exact: a value is outside +-64")
        return values


def _interleave(planes: Bytes, values: npt.NDArray[np.uint32]) -> None:
    """Put byte planes, uint8[blocks, 4, n], together again into `values`, uint32[blocks * n]."""
    blocks, _, n = planes.shape
    values.view(np.uint8).reshape(blocks, n, 4)[:] = planes.transpose(0, 2, 1)
