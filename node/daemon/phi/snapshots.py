"""Snapshots on disk: Phi as chunks and an index, named by its root. The first snapshot is the genesis, Phi_0.

The bytes are int32, little endian, fragment after fragment: the same file on every node that merged the same
records, so that a joiner can take chunks from all of them at once.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256

import numpy as np

from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.limits import CHUNK_BYTES_MAX, CLAIMS_MAX
from gossamer.protocol.payloads import (
    HASH_BYTES,
    chunk_hashes,
    chunk_sizes,
    parse_index,
    root_of,
)
from gossamer.protocol.records import Claim, Delta

KEPT = 2
"""Snapshots that are always kept: the newest, and the one that others may still be at."""

LEASE_S = 60.0
"""An older snapshot is kept for this long after a chunk of it was asked for, up to CLAIMS_MAX in all."""


def _bytes_of(phi: Ints) -> memoryview:
    return memoryview(phi.astype("<i4", copy=False).data).cast("B")


def digest(phi: Ints) -> bytes:
    """The root of these values. It is also a replica's digest, and the digest in a manifest's genesis."""
    return root_of(chunk_hashes(_bytes_of(phi)))


def store(phi: Ints, chunks: ChunkStore) -> bytes:
    """Store Phi, int32[numel], durably as chunks and an index; returns its root. Raises OSError."""
    writer = SnapshotWriter(chunks)
    writer.add(phi)
    return writer.finish()


class SnapshotWriter:
    """Stores a snapshot that comes piece by piece; less than a chunk of it waits in memory."""

    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._hashes: list[bytes] = []
        self._rest = bytearray()

    def add(self, values: Ints) -> None:
        """Take the next values of Phi, any number of them. Raises OSError."""
        self._rest += _bytes_of(values)
        while len(self._rest) >= CHUNK_BYTES_MAX:
            self._put(self._rest[:CHUNK_BYTES_MAX])
            del self._rest[:CHUNK_BYTES_MAX]

    def finish(self) -> bytes:
        """Store the rest and the index; returns the snapshot's root. Raises OSError."""
        if self._rest:
            self._put(self._rest)
        root, index = root_of(self._hashes), b"".join(self._hashes)
        if root not in self._chunks:
            self._chunks.put(root, index, durable=True)
        return root

    def _put(self, piece: bytearray) -> None:
        blob = sha256(piece).digest()
        self._hashes.append(blob)
        if blob not in self._chunks:
            self._chunks.put(blob, bytes(piece), durable=True)


def missing(root: bytes, total: int, chunks: ChunkStore) -> tuple[tuple[bytes, int], ...]:
    """The chunks that are missing of a snapshot of `total` bytes, as (hash, size): only the index if that is
    missing, otherwise what it lists.

    Raises MissingChunkError (fetch again) or PayloadError (an impossible index).
    """
    sizes = chunk_sizes(total)
    if root not in chunks:
        return ((root, HASH_BYTES * len(sizes)),)
    lacking: dict[bytes, int] = {}
    for blob, size in zip(parse_index(chunks.get(root), total), sizes, strict=True):
        fits = chunks.fits(blob, size)
        # A liar may list what is here as part of something else, or what nobody can have.
        if fits is False or lacking.get(blob, size) != size:
            raise PayloadError("a snapshot's index lists a chunk with another size than it has")
        if fits is None:
            lacking[blob] = size
    return tuple(lacking.items())


class SnapshotReader:
    """Reads a snapshot while its chunks come, so that little is left to read once the last one is here."""

    def __init__(self, root: bytes, numel: int, chunks: ChunkStore) -> None:
        """Reads the snapshot of int32[numel] with this root."""
        self.root = root
        self._chunks = chunks
        self._phi = np.empty(numel, dtype="<i4")
        self._read: set[int] = set()
        """Which chunks have been read, by place."""

    @property
    def phi(self) -> Ints:
        """int32[numel]; complete once nothing is missing."""
        return self._phi.astype(np.int32, copy=False)

    def read(self) -> tuple[tuple[bytes, int], ...]:
        """Read what has come since the last call; returns what is still `missing`. Raises as that does."""
        lacking = missing(self.root, self._phi.nbytes, self._chunks)
        absent = {blob for blob, _ in lacking}
        if self.root not in absent:
            view = memoryview(self._phi.data).cast("B")
            for place, blob in enumerate(parse_index(self._chunks.get(self.root), self._phi.nbytes)):
                if blob not in absent and place not in self._read:
                    data, start = self._chunks.get(blob), place * CHUNK_BYTES_MAX
                    view[start : start + len(data)] = data
                    self._read.add(place)
        return lacking


def load(root: bytes, numel: int, chunks: ChunkStore) -> Ints:
    """Read a snapshot: int32[numel]. Raises MissingChunkError or PayloadError."""
    reader = SnapshotReader(root, numel, chunks)
    if lacking := reader.read():
        raise MissingChunkError(lacking[0][0])
    return reader.phi


class SnapshotShelf:
    """Which snapshots are kept, newest first, and when each was last asked for."""

    def __init__(self, chunks: ChunkStore, total_bytes: int) -> None:
        self._chunks = chunks
        self._total = total_bytes
        self.claims: tuple[Claim, ...] = ()
        self._used: dict[bytes, float] = {}
        self._owner: dict[bytes, bytes] = {}
        """Of each chunk of a kept snapshot, the root of the newest one that it belongs to."""

    def is_of_newest(self, blob: bytes) -> bool:
        """Whether a chunk belongs to the newest snapshot that is kept."""
        return bool(self.claims) and self._owner.get(blob) == self.claims[0].root

    def touch(self, blob: bytes) -> None:
        """Note that a chunk was asked for, so its snapshot is in use."""
        root = self._owner.get(blob)
        if root is not None:
            self._used[root] = time.monotonic()

    def kept_beside(self, claim: Claim) -> tuple[Claim, ...]:
        """Which snapshots are kept beside a new one. Once this is recorded durably, `keep` all of them."""
        # A late record has superseded one of the same round: nobody should start from it any more.
        older = [known for known in self.claims if known.round < claim.round]
        now = time.monotonic()
        kept = [
            known
            for place, known in enumerate(older)
            if place < KEPT - 1 or now - self._used.get(known.root, -LEASE_S) < LEASE_S
        ][: CLAIMS_MAX - 1]
        self._used = {known.root: self._used[known.root] for known in kept if known.root in self._used}
        return tuple(kept)

    def keep(self, claims: tuple[Claim, ...]) -> None:
        """Keep these snapshots from now on, newest first."""
        self.claims = claims
        self._owner = {blob: claim.root for claim in reversed(claims) for blob in self._blobs(claim.root)}

    def restore(self, claims: Iterable[Claim]) -> None:
        """Take over the snapshots that an earlier run kept, except those that are no longer whole, as far as
        can be seen without reading them."""
        whole = []
        for claim in claims:
            with suppress(MissingChunkError, PayloadError):
                if not missing(claim.root, self._total, self._chunks):
                    whole.append(claim)
        self.keep(tuple(whole))

    def sweep(self, blobs: set[bytes], wanted: Sequence[bytes], open_records: Iterable[Delta]) -> None:
        """Remove all of these chunks but those that are of use: for a snapshot that is kept or, by its root,
        wanted, for the payload of an open record, or reserved for one that is about to be signed.

        Chunks are known by their content, so anybody may publish one that is part of something else. Raises
        OSError or StorageError: MissingChunkError, and removes nothing, if the index of the newest one or of
        one that is wanted turns out damaged.
        """
        self.keep(self.claims)
        roots = [*(claim.root for claim in self.claims[:1]), *wanted]
        unneeded = blobs.difference(self._owner, *map(self._blobs, wanted))
        for root in roots:
            if root not in self._chunks:
                raise MissingChunkError(root)
        for delta in open_records:  # one by one, since all their chunks together would be millions
            unneeded.difference_update(delta.body.chunks)
            self._chunks.release(delta.body.chunks)
        for blob in unneeded:
            self._chunks.drop(blob)

    def _blobs(self, root: bytes) -> tuple[bytes, ...]:
        """The chunks of a snapshot, as far as they are known: its index, then those it lists. Raises
        StorageError."""
        with suppress(MissingChunkError, PayloadError):  # the latter for a liar's index
            return (root, *parse_index(self._chunks.get(root), self._total))
        return (root,)
