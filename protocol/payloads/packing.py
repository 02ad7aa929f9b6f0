"""How a chunk travels and lies on disk: packed, where that makes it smaller.

Codecs write codes of fixed width, which NumPy and torch work through at memory speed, and of which some come
far more often than others: those of `int4` hold two bits. zstd (RFC 8878) takes out the rest of each chunk:
a core packs 300 MB of `int4` a second, and unpacks 1 GB.

Chunks are hashed, signed for and merged as they are, and packing is undone before any of that. So what a
release of the library makes of odd input decides over one transfer, and never over a replica's bits.
"""

from typing import Final, NamedTuple

import zstandard

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX

LEVEL: Final = 1
"""Higher ones find 1 % more in codes, and take a third longer."""

WORTH_IT: Final = 0.95
"""What is not smaller than so much of it goes as it is: unpacking would cost more than the line saves."""


class Chunk(NamedTuple):
    """A chunk, and the frame that it is packed to."""

    data: bytes
    frame: bytes | None
    """None where that would hardly be smaller."""

    @property
    def as_it_travels(self) -> bytes:
        return self.data if self.frame is None else self.frame

    @classmethod
    def of(cls, data: bytes) -> "Chunk":
        """Pack it: 1 MiB of `int4` takes 3 ms. Any thread."""
        return cls(data, pack_chunk(data))


def pack_chunk(chunk: bytes) -> bytes | None:
    """One zstd frame that tells its content's size, or None if that is hardly smaller. Any thread."""
    frame = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress(chunk)
    return frame if len(frame) <= WORTH_IT * len(chunk) else None


def packed_size(frame: bytes) -> int:
    """How long the chunk in a frame says that it is. Raises PayloadError if it does not, or too long."""
    try:
        size: int = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError:
        raise PayloadError("not a zstd frame") from None
    if not 0 < size <= CHUNK_BYTES_MAX:
        raise PayloadError("a zstd frame that does not say how long a chunk it holds")
    return size


def unpack_chunk(frame: bytes) -> bytes:
    """The chunk in a frame, in no more memory than that takes. Any thread. Raises PayloadError."""
    size = packed_size(frame)
    try:
        chunk: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise PayloadError("a damaged zstd frame") from None
    if len(chunk) != size:
        raise PayloadError("a zstd frame of another length than it says")
    return chunk
