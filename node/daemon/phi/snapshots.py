"""Snapshots on disk: Phi as chunks and an index, named by its root. The first snapshot is the genesis, Phi_0.

The bytes are int32, little endian, fragment after fragment: the same file on every node that merged the same
records, so that a joiner can take chunks from all of them at once.

From round 1 on, the index ends with the roots of two more such files, the sums that the averaged model is
made of (`protocol.history.average`), and with what the swarm decides (`protocol.history.folds`). So a claim
of a snapshot is a claim of these too. A joiner starts once Phi is here, and fetches the sums while it trains.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.average import Sums
from gossamer.protocol.limits import CHUNK_BYTES_MAX, CLAIMS_MAX
from gossamer.protocol.payloads import (
    HASH_BYTES,
    Fragment,
    Layout,
    chunk_hashes,
    chunk_sizes,
    parse_index,
    root_of,
)
from gossamer.protocol.records import Claim, Delta

SUMS = len(Sums._fields)

KEPT = 2
"""Snapshots that are always kept: the newest, and the one that others may still be at."""

LEASE_S = 60.0
"""An older snapshot is kept for this long after a chunk of it was asked for, up to CLAIMS_MAX in all."""


def _bytes_of(phi: Ints) -> memoryview:
    return memoryview(phi.astype("<i4", copy=False).data).cast("B")


def digest(phi: Ints) -> bytes:
    """The root of these values. It is also a replica's digest, and the digest in a manifest's genesis."""
    return root_of(chunk_hashes(_bytes_of(phi)))


def store(phi: Ints, chunks: ChunkStore, sums: Sums | None = None, folds: bytes = b"") -> bytes:
    """Store a snapshot durably as chunks and indices; returns its root. Raises OSError.

    `phi` and both `sums`: int32[numel]; neither sums nor folds for round 0.
    """
    roots = [] if sums is None else [store(one, chunks) for one in sums]
    writer = FileWriter(chunks)
    writer.add(phi)
    return writer.finish(*roots, folds)


class FileWriter:
    """Stores a file of int32 values that comes piece by piece; less than a chunk of it waits in memory."""

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

    def finish(self, *rest: bytes) -> bytes:
        """Store the rest, and the index, which ends with the `rest`, if any; returns its root. Raises
        OSError."""
        if self._rest:
            self._put(self._rest)
        listed = [*self._hashes, *rest]
        root, index = root_of(listed), b"".join(listed)
        if root not in self._chunks:
            self._chunks.put(root, index, durable=True)
        return root

    def _put(self, piece: bytearray) -> None:
        blob = sha256(piece).digest()
        self._hashes.append(blob)
        if blob not in self._chunks:
            self._chunks.put(blob, bytes(piece), durable=True)


class SnapshotWriter:
    """Stores a snapshot fragment by fragment, after an earlier one whose sums it carries on."""

    def __init__(self, before: Sequence[bytes], layout: Layout, chunks: ChunkStore) -> None:
        """`before`: the roots of the sums of the snapshot before it; none if that is genesis."""
        self._before, self._layout, self._chunks = before, layout, chunks
        self._phi = FileWriter(chunks)
        self._sums = [FileWriter(chunks) for _ in range(SUMS)]
        self._unchanged: list[Fragment] = []
        """Fragments whose sums are those of the snapshot before, and not written yet."""

    def add(self, fragment: Fragment, phi: Ints, sums: Sums | None) -> None:
        """Take the next fragment; no `sums` if those of the snapshot before hold. Raises OSError, or as
        `read_sums`."""
        self._phi.add(phi)
        if sums is None:
            self._unchanged.append(fragment)
        else:
            self._copy_unchanged()
            self._add_sums(sums)

    def finish(self, round_: int, folds: bytes = b"") -> bytes:
        """Store the rest and the indices; returns the root of the snapshot of this round. Raises as `add`."""
        roots = self._before
        if round_ and (not roots or len(self._unchanged) < len(self._layout.fragments)):
            self._copy_unchanged()
            roots = [one.finish() for one in self._sums]
        return self._phi.finish(*roots, folds if round_ else b"")

    def _copy_unchanged(self) -> None:
        for fragment in self._unchanged:
            self._add_sums(read_sums(self._before, fragment, self._layout.snapshot_bytes, self._chunks))
        self._unchanged.clear()

    def _add_sums(self, sums: Sums) -> None:
        for writer, one in zip(self._sums, sums, strict=True):
            writer.add(one)


class Index(NamedTuple):
    """What the index of a snapshot holds."""

    phi: tuple[bytes, ...]
    """The hashes of the chunks of Phi."""
    sums: tuple[bytes, ...]
    """The roots of the sums; none at round 0."""
    folds: bytes
    """As `Folds.pack` makes them; none at round 0."""


def read_index(root: bytes, total: int, chunks: ChunkStore) -> Index:
    """The index of a snapshot of `total` bytes. Raises MissingChunkError or PayloadError."""
    index, phi = chunks.get(root), HASH_BYTES * len(chunk_sizes(total))
    sums, folds = index[phi:][: HASH_BYTES * SUMS], index[phi + HASH_BYTES * SUMS :]
    if len(sums) not in (0, HASH_BYTES * SUMS):
        raise PayloadError(f"an index of {len(index)} bytes does not describe a snapshot of {total}")
    roots = tuple(sums[at : at + HASH_BYTES] for at in range(0, len(sums), HASH_BYTES))
    return Index(parse_index(index[:phi], total), roots, folds)


def missing(claim: Claim, total: int, chunks: ChunkStore, folds: int = 0) -> tuple[tuple[bytes, int], ...]:
    """The chunks that are missing of a snapshot of `total` bytes and `folds` bytes of folds, as (hash, size):
    only the index if that is missing, otherwise what it lists of Phi; if none of that is, what is missing of
    the sums.

    Raises MissingChunkError (fetch again) or PayloadError (an impossible index).
    """
    sizes = chunk_sizes(total)
    length = HASH_BYTES * len(sizes) + (HASH_BYTES * SUMS + folds if claim.round else 0)
    if lacking := _lacking([(claim.root, length)], chunks):
        return lacking
    hashes, sums, _ = read_index(claim.root, total, chunks)
    if lacking := _lacking(zip(hashes, sizes, strict=True), chunks):
        return lacking
    listed: list[tuple[bytes, int]] = []
    for root in sums:
        if index := _lacking([(root, HASH_BYTES * len(sizes))], chunks):
            listed += index
        else:
            listed += zip(parse_index(chunks.get(root), total), sizes, strict=True)
    return _lacking(listed, chunks)


def _lacking(listed: Iterable[tuple[bytes, int]], chunks: ChunkStore) -> tuple[tuple[bytes, int], ...]:
    lacking: dict[bytes, int] = {}
    for blob, size in listed:
        fits = chunks.fits(blob, size)
        # A liar may list what is here as part of something else, or what nobody can have.
        if fits is False or lacking.get(blob, size) != size:
            raise PayloadError("a snapshot's index lists a chunk with another size than it has")
        if fits is None:
            lacking[blob] = size
    return tuple(lacking.items())


def read_sums(roots: Sequence[bytes], fragment: Fragment, total: int, chunks: ChunkStore) -> Sums:
    """A fragment's sums, int32[fragment.numel] each, from files with these roots; zeros if there are none.

    Raises MissingChunkError or PayloadError.
    """
    sums = [np.zeros(fragment.numel, "<i4") for _ in range(SUMS)]
    start, stop = 4 * fragment.offset, 4 * (fragment.offset + fragment.numel)
    for one, file in zip(sums, roots, strict=bool(roots)):
        hashes, view = parse_index(chunks.get(file), total), memoryview(one.data).cast("B")
        for place in range(start // CHUNK_BYTES_MAX, -(-stop // CHUNK_BYTES_MAX)):
            first = place * CHUNK_BYTES_MAX
            data = memoryview(chunks.get(hashes[place]))[max(0, start - first) : stop - first]
            at = max(0, first - start)
            view[at : at + len(data)] = data
    return Sums(*sums)


def are_here(roots: Iterable[bytes], total: int, chunks: ChunkStore) -> bool:
    """Whether all of the files with these roots is here, as far as can be seen without reading it. What a
    liar lists as such a file never is. Raises StorageError if an index cannot be read just now."""
    with suppress(MissingChunkError, PayloadError):
        return all(blob in chunks for root in roots for blob in parse_index(chunks.get(root), total))
    return False


class SnapshotReader:
    """Reads a snapshot's Phi while its chunks come, so that little is left to read once the last is here."""

    def __init__(self, claim: Claim, numel: int, chunks: ChunkStore, folds: int = 0) -> None:
        """Reads the snapshot of int32[numel], with `folds` bytes of folds, that this claim names."""
        self.claim = claim
        self._folds = folds
        self._chunks = chunks
        self._phi = np.empty(numel, dtype="<i4")
        self._read: set[int] = set()
        """Which chunks have been read, by place."""

    @property
    def phi(self) -> Ints:
        """int32[numel]; complete once nothing is missing of it."""
        return self._phi.astype(np.int32, copy=False)

    @property
    def is_complete(self) -> bool:
        """Whether all of Phi has been read; sums may still be missing."""
        return len(self._read) == len(chunk_sizes(self._phi.nbytes))

    def read(self) -> tuple[tuple[bytes, int], ...]:
        """Read what has come since the last call; returns what is still `missing`. Raises as that does."""
        lacking = missing(self.claim, self._phi.nbytes, self._chunks, self._folds)
        absent = {blob for blob, _ in lacking}
        if self.claim.root not in absent:
            view = memoryview(self._phi.data).cast("B")
            hashes = read_index(self.claim.root, self._phi.nbytes, self._chunks).phi
            for place, blob in enumerate(hashes):
                if blob not in absent and place not in self._read:
                    data, start = self._chunks.get(blob), place * CHUNK_BYTES_MAX
                    view[start : start + len(data)] = data
                    self._read.add(place)
        return lacking


def load(claim: Claim, numel: int, chunks: ChunkStore, folds: int = 0) -> Ints:
    """Read a snapshot's Phi: int32[numel]. Raises MissingChunkError or PayloadError."""
    reader = SnapshotReader(claim, numel, chunks, folds)
    lacking = reader.read()
    if not reader.is_complete:
        raise MissingChunkError(lacking[0][0])
    return reader.phi


class SnapshotShelf:
    """Which snapshots are kept, newest first, and when each was last asked for."""

    def __init__(self, chunks: ChunkStore, total_bytes: int, folds: int = 0) -> None:
        self._chunks = chunks
        self._total = total_bytes
        self._folds = folds
        self.claims: tuple[Claim, ...] = ()
        self.sums: tuple[bytes, ...] = ()
        """The roots of the newest one's sums, which its index lists; none of genesis."""
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
        if claims[:1] != self.claims[:1]:
            self.sums = read_index(claims[0].root, self._total, self._chunks).sums
        self.claims = claims
        self._owner = {blob: claim.root for claim in reversed(claims) for blob in self._blobs(claim.root)}

    def restore(self, claims: Iterable[Claim]) -> None:
        """Take over the snapshots that an earlier run kept, except those that are no longer whole, as far as
        can be seen without reading them. The first of them is: its Phi has been read, if not its sums."""
        whole = []
        for place, claim in enumerate(claims):
            with suppress(MissingChunkError, PayloadError):
                if not place or not missing(claim, self._total, self._chunks, self._folds):
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
        """The chunks of a snapshot, as far as they are known: indices, and those they list. Raises
        StorageError."""
        known = [root]
        with suppress(MissingChunkError, PayloadError):  # the latter for a liar's index
            hashes, sums, _ = read_index(root, self._total, self._chunks)
            known += [*hashes, *sums]
            for file in sums:
                known += parse_index(self._chunks.get(file), self._total)
        return tuple(known)
