"""How a chunk travels and lies on disk: packed, where that makes it smaller.

Codecs write codes of fixed width, which NumPy and torch process at memory speed. Some codes come far more
often than others: a code of `int4` holds about two bits of information. zstd (RFC 8878) takes out the rest,
chunk by chunk: a core packs 300 MB of `int4` a second, and unpacks 1 GB.

Chunks are hashed, signed for and merged unpacked. So what a release of the library makes of odd input affects
one transfer, and never a replica's bits.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Final, NamedTuple

import zstandard

from gossamer.protocol import limits
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX

# --- Content addressing: anything large is cut into chunks of at most 1 MiB, each known by its SHA-256.
#
# A *root* names a whole file by one hash: it is the SHA-256 of the file's chunk hashes, one after another.
# That list is itself a chunk (the *index*), so a file can be fetched from strangers with nothing known but
# its root. Genesis parameters, snapshots and the digest of a replica all use roots.

HASH_BYTES = 32


def payload_chunk_bytes(total: int) -> int:
    """Size of the chunks of a payload of `total` bytes: a power of two, for about 64 chunks.

    A node can pass on a chunk only when it has all of it: what goes through many hands goes in small chunks.
    """
    size = limits.PAYLOAD_CHUNK_BYTES_MIN
    while size * limits.PAYLOAD_CHUNKS_AIM < total and size < limits.CHUNK_BYTES_MAX:
        size *= 2
    return size


def split(data: memoryview | bytes, size: int = limits.CHUNK_BYTES_MAX) -> Iterable[memoryview]:
    """Cut `data` into chunks of `size`, the last one shorter. No copies."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), size):
        yield view[start : start + size]


def split_payload(data: memoryview | bytes) -> Iterable[memoryview]:
    """Cut a payload into its chunks. No copies."""
    return split(data, payload_chunk_bytes(len(data)))


def chunk_hashes(data: memoryview | bytes, size: int = limits.CHUNK_BYTES_MAX) -> tuple[bytes, ...]:
    """Return the SHA-256 of every chunk of `data`."""
    return tuple(sha256(chunk).digest() for chunk in split(data, size))


def root_of(hashes: Iterable[bytes]) -> bytes:
    """Return the root of a file with these chunk hashes."""
    return sha256(b"".join(hashes)).digest()


def chunk_sizes(total: int, size: int = limits.CHUNK_BYTES_MAX) -> tuple[int, ...]:
    """Return the sizes in bytes of the chunks of a file of `total` bytes, cut every `size`."""
    whole, rest = divmod(total, size)
    return (size,) * whole + ((rest,) if rest else ())


def payload_chunk_sizes(total: int) -> tuple[int, ...]:
    """Return the sizes in bytes of the chunks of a payload of `total` bytes."""
    return chunk_sizes(total, payload_chunk_bytes(total))


def parse_index(index: bytes, total: int) -> tuple[bytes, ...]:
    """Read the chunk hashes of a file of `total` bytes from its index. Raises PayloadError if wrong."""
    if len(index) != HASH_BYTES * len(chunk_sizes(total)):
        raise PayloadError(f"an index of {len(index)} bytes does not describe a file of {total}")
    return tuple(index[i : i + HASH_BYTES] for i in range(0, len(index), HASH_BYTES))


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
