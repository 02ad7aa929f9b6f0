"""Content addressing: anything large is cut into chunks of at most 1 MiB, each known by its SHA-256.

A *root* names a whole file by one hash: it is the SHA-256 of the file's chunk hashes, one after another. That
list is itself a chunk (the *index*), so a file can be fetched from strangers with nothing known but its root.
Genesis parameters, snapshots and the digest of a replica all use roots.
"""

from collections.abc import Iterable
from hashlib import sha256

from gossamer.protocol import limits
from gossamer.protocol.errors import PayloadError

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
