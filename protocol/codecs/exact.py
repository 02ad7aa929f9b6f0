"""`exact`: every bit of every value, for tests and tiny models.

A section is its length (4 bytes, little endian), then the values zigzagged, byte plane by byte plane, in
one lz4 block; or the planes as they are where lz4 would not shrink them, which a length of ``4 * numel``
says. This is the one codec where lz4 pays: small values leave the high planes almost empty. Packed int4
codes are incompressible, so the others go without.
"""

import lz4.block
import numpy as np

from gossamer.protocol.codecs.base import Dense
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints

LENGTH_BYTES = 4


class ExactCodec(Dense):
    """Lossless."""

    name = "exact"
    in_parts = False  # an lz4 block has none

    def section_bytes_max(self, numel: int) -> int:
        return LENGTH_BYTES + 4 * numel

    def section_bytes(self, data: memoryview, numel: int) -> int:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        if len(data) < LENGTH_BYTES + length or not 0 < length <= 4 * numel:
            raise PayloadError("exact: a section's length is impossible")
        return LENGTH_BYTES + length

    def encode(self, values: Ints) -> bytes:
        flat = np.ascontiguousarray(values, dtype="<i4").reshape(-1)
        zigzag = (flat << 1) ^ (flat >> 31)
        planes = np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 4).T).tobytes()
        packed: bytes = lz4.block.compress(planes, store_size=False)
        body = packed if len(packed) < len(planes) else planes
        return len(body).to_bytes(LENGTH_BYTES, "little") + body

    def decode(self, section: memoryview, numel: int, start: int = 0, stop: int | None = None) -> Ints:
        if self.section_bytes(section, numel) != len(section):
            raise PayloadError(f"exact: a section of {len(section)} bytes for {numel} values")
        body = section[LENGTH_BYTES:]
        if len(body) < 4 * numel:
            try:
                body = lz4.block.decompress(body, uncompressed_size=4 * numel)
            except lz4.block.LZ4BlockError:
                raise PayloadError("exact: not an lz4 block") from None
            if len(body) != 4 * numel:
                raise PayloadError("exact: an lz4 block of another size")
        planes = np.frombuffer(body, dtype=np.uint8).reshape(4, numel)
        zigzag = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
        values = ((zigzag >> 1).astype(np.int32)) ^ -(zigzag & 1).astype(np.int32)
        if np.any(np.abs(values.astype(np.int64)) >= VALUE_LIMIT):
            raise PayloadError("exact: a value is outside +-64")
        return values[start:stop]
