"""A node's disk: what was written to it, and how much of that is left after an accident.

Own records and the chunks of own payloads are synced before anybody hears of them. Records of others wait in
memory for a moment (lost when the process dies), then in the page cache (lost, in part, when the power goes).
As with SQLite's log, a suffix of the cached records is lost. Chunks are files: one that was not synced may be
gone, or be there under its name with other bytes in it.
"""

import random
from collections.abc import Iterable
from hashlib import sha256

from gossamer.protocol.payloads import payload_chunk_sizes
from gossamer.protocol.records import Claim, Delta
from tests.sim.fold import GENESIS, Base

WRITER_DELAY_S = 0.01
"""A record of another node is written this long after it was accepted."""

WRITE_BACK_S = 30.0
"""After this long the operating system writes files to the disk by itself."""


class DamagedChunkError(Exception):
    """A chunk on disk does not match its name, which is `blob`, the hash of its bytes."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(f"chunk {blob.hex()[:8]} is damaged")
        self.blob = blob


class Disk:
    """Records and chunks of one node."""

    def __init__(self) -> None:
        self._synced: dict[bytes, Delta] = {}
        self._cached: list[tuple[float, Delta]] = []
        self.claims: tuple[Claim, ...] = ()
        """Snapshots held, newest first."""
        self.covered: frozenset[bytes] = frozenset()
        """Records that the newest snapshot holds."""
        self.credentials: list[bytes] = []
        """Grants and revocations."""
        self.peers: dict[str, bytes] = {}
        """Where members are, by address: what a node remembers of whom it met in earlier runs."""
        self.base = GENESIS
        self.own_last = 0
        self.reach = 0
        """The newest round merged that the records do not show the swarm to have reached."""
        self.chunks: dict[bytes, bytes] = {}
        self._unsynced: dict[bytes, float] = {}
        self._checked: dict[bytes, bytes] = {}
        """By name: a chunk's bytes when they were last read and found right."""

    # -- records

    def add(self, delta: Delta, now: float) -> None:
        """Write another node's record when there is time."""
        self._cached.append((now, delta))

    def commit(self, delta: Delta) -> None:
        """Write our own record, and all records before it, so that they survive anything but a lost disk."""
        self.sync()
        self._synced[delta.record_id] = delta

    def sync(self) -> None:
        """The log reaches the disk."""
        self._synced.update((delta.record_id, delta) for _, delta in self._cached)
        self._cached.clear()

    def load(self) -> list[Delta]:
        """Read everything back, in order of round."""
        self.sync()
        return sorted(self._synced.values(), key=lambda delta: (delta.round, delta.record_id))

    # -- history: each of these is one durable transaction

    def add_snapshot(self, claims: tuple[Claim, ...], covered: Iterable[bytes]) -> None:
        """Note the snapshots that we hold now, and the records that the newest holds."""
        self.sync()
        self.claims = claims
        self.covered = frozenset(covered) & self._synced.keys()

    def close_up_to(self, base: Base, own_last: int) -> None:
        """Drop the records that became part of the base."""
        self.sync()
        self.base, self.own_last = base, own_last
        self._synced = {i: delta for i, delta in self._synced.items() if delta.round > base.round}

    def forget(self, deltas: Iterable[Delta]) -> None:
        """Drop records that do not count any more."""
        self.sync()
        for delta in deltas:
            self._synced.pop(delta.record_id, None)

    def begin_at(self, claim: Claim, base: Base, own_last: int) -> None:
        """Begin our history at a snapshot fetched from others."""
        self.claims, self.covered, self.reach = (claim,), frozenset(), 0
        self.close_up_to(base, own_last)

    # -- chunks

    def drop(self, blob: bytes) -> None:
        self.chunks.pop(blob, None)
        self._unsynced.pop(blob, None)
        self._checked.pop(blob, None)

    def has(self, blob: bytes) -> bool:
        return blob in self.chunks

    def fits(self, blob: bytes, size: int) -> bool | None:
        """Whether a chunk has `size` bytes; None if it is not here, or damaged."""
        if blob in self.chunks and len(self.chunks[blob]) == size:
            return True
        try:
            return None if blob not in self.chunks else len(self.get(blob)) == size
        except DamagedChunkError:
            return None

    def holds(self, delta: Delta) -> bool:
        """Whether a delta's payload is here, all of it."""
        sizes = payload_chunk_sizes(delta.body.payload_bytes)
        return all(self.fits(blob, size) for blob, size in zip(delta.body.chunks, sizes, strict=True))

    def put(self, blob: bytes, data: bytes, now: float, *, durable: bool = False) -> None:
        self.chunks[blob] = data
        if durable:
            self._unsynced.pop(blob, None)
        else:
            self._unsynced[blob] = now

    def get(self, blob: bytes) -> bytes:
        """Read a chunk and check it. Raises DamagedChunkError, after which the chunk is missing."""
        data = self.chunks.get(blob, b"")
        if self._checked.get(blob) is not data:
            if sha256(data).digest() != blob:
                self.chunks.pop(blob, None)
                raise DamagedChunkError(blob)
            self._checked[blob] = data
        return data

    def join(self, blobs: Iterable[bytes]) -> bytes:
        """Read chunks one after another. Raises DamagedChunkError, after which all damaged are missing."""
        found: list[bytes] = []
        damaged: DamagedChunkError | None = None
        for blob in blobs:
            try:
                found.append(self.get(blob))
            except DamagedChunkError as error:
                damaged = error
        if damaged is not None:
            raise damaged
        return b"".join(found)

    # -- accidents

    def process_died(self, now: float) -> None:
        """Records that the process had not handed to the operating system yet are lost."""
        self._cached = [entry for entry in self._cached if entry[0] <= now - WRITER_DELAY_S]

    def power_cut(self, now: float, rng: random.Random) -> None:
        """Part of what was not synced is lost, or damaged."""
        del self._cached[rng.randrange(len(self._cached) + 1) :]
        for blob in [blob for blob, since in self._unsynced.items() if since > now - WRITE_BACK_S]:
            fate = rng.random()
            if fate < 0.3:
                self.chunks.pop(blob, None)
            elif fate < 0.5 and blob in self.chunks:
                self.chunks[blob] = self.chunks[blob][:-1] + b"\0"
        self._unsynced.clear()

    def wipe(self) -> None:
        """The disk is lost, or replaced by an empty one."""
        self._synced.clear()
        self._cached.clear()
        self.chunks.clear()
        self._unsynced.clear()
        self._checked.clear()
        self.peers.clear()
        self.claims, self.covered, self.base, self.own_last, self.reach = (), frozenset(), GENESIS, 0, 0
