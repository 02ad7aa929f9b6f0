"""How a chunk travels and lies on disk: packed, where that makes it smaller.

Codecs write codes of fixed width, which NumPy and torch process at memory speed. Some codes come far more
often than others: a code of `int4` holds about two bits of information. zstd (RFC 8878) takes out the rest,
chunk by chunk: a core packs 300 MB of `int4` a second, and unpacks 1 GB.

Chunks are hashed, signed for and merged unpacked. So what a release of the library makes of odd input affects
one transfer, and never a replica's bits.
"""

from typing import Final, NamedTuple

import zstandard

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX

LEVEL: Final = 1
"""The zstd level. Higher ones save 1 % more on codes, and take a third longer."""

WORTH_IT: Final = 0.95
"""A chunk that packs to more than this part of its size goes as it is: unpacking costs more than is saved."""


class Chunk(NamedTuple):
    """A chunk, and the zstd frame that it packs to."""

    data: bytes
    frame: bytes | None
    """None if the frame would hardly be smaller."""

    @property
    def as_it_travels(self) -> bytes:
        return self.data if self.frame is None else self.frame

    @classmethod
    def of(cls, data: bytes) -> "Chunk":
        """Pack a chunk: 1 MiB of `int4` takes 3 ms. Any thread."""
        return cls(data, pack_chunk(data))


def pack_chunk(chunk: bytes) -> bytes | None:
    """One zstd frame that states its content's size, or None if it is hardly smaller. Any thread."""
    try:
        frame = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress(chunk)
    except zstandard.ZstdError:  # any bytes can be packed: only memory can be lacking
        raise MemoryError from None
    return frame if len(frame) <= WORTH_IT * len(chunk) else None


def packed_size(frame: bytes) -> int:
    """The size in bytes that a frame states for its chunk. Raises PayloadError if none, or too large."""
    try:
        size: int = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError:
        raise PayloadError("not a zstd frame") from None
    if not 0 < size <= CHUNK_BYTES_MAX:
        raise PayloadError("a zstd frame that does not say how long a chunk it holds")
    return size


def unpack_chunk(frame: bytes) -> bytes:
    """The chunk in a frame, unpacked in no more memory than it takes. Any thread. Raises PayloadError."""
    size = packed_size(frame)
    try:
        chunk: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise PayloadError("a damaged zstd frame") from None
    if len(chunk) != size:
        raise PayloadError("a zstd frame of another length than it says")
    return chunk
