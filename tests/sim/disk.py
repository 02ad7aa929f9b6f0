"""A node's disk: what it has been told to keep, and how much of that is left after an accident.

Own records and the chunks of own payloads are synced before anybody hears of them. What others wrote waits
in memory for a moment (lost when the process dies), then in the page cache (lost, in part, when the power
goes); like SQLite's log, the page cache loses a suffix of the records. Chunks are files: one that was not
synced may be gone, or there under its name with other bytes in it.
"""

import random
from hashlib import sha256

from gossamer.protocol.envelope import open_envelope
from gossamer.protocol.layout import Layout
from gossamer.protocol.records import Delta, parse_delta

WRITER_DELAY_S = 0.01
"""A record of another node is written this long after it was accepted."""

WRITE_BACK_S = 30.0
"""The system writes files to the disk by itself after this long."""


class DamagedChunkError(Exception):
    """A chunk on disk is not what its name promises; `blob` is that name."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(f"chunk {blob.hex()[:8]} is damaged")
        self.blob = blob


class Disk:
    """Records and chunks of one node."""

    def __init__(self) -> None:
        self._synced: dict[bytes, bytes] = {}
        self._cached: list[tuple[float, bytes, bytes]] = []
        self.chunks: dict[bytes, bytes] = {}
        self._unsynced: dict[bytes, float] = {}

    # -- records

    def add(self, delta: Delta, now: float) -> None:
        """Write somebody else's record when there is time for it."""
        self._cached.append((now, delta.record_id, delta.data))

    def commit(self, delta: Delta) -> None:
        """Write our own record, and whatever came before it, so that it survives anything but a lost disk."""
        self.sync()
        self._synced[delta.record_id] = delta.data

    def sync(self) -> None:
        """The log reaches the disk."""
        self._synced.update((record_id, data) for _, record_id, data in self._cached)
        self._cached.clear()

    def load(self, swarm_id: bytes, layout: Layout) -> list[Delta]:
        """Read everything back, in order of round, checking signatures again."""
        self.sync()
        found = [parse_delta(open_envelope(data, swarm_id), layout) for data in self._synced.values()]
        return sorted(found, key=lambda delta: (delta.round, delta.record_id))

    # -- chunks

    def has(self, blob: bytes) -> bool:
        return blob in self.chunks

    def put(self, blob: bytes, data: bytes, now: float, *, durable: bool = False) -> None:
        self.chunks[blob] = data
        if durable:
            self._unsynced.pop(blob, None)
        else:
            self._unsynced[blob] = now

    def get(self, blob: bytes) -> bytes:
        """Read a chunk and check it. Raises DamagedChunkError, after which it is missing."""
        data = self.chunks.get(blob, b"")
        if sha256(data).digest() != blob:
            self.chunks.pop(blob, None)
            raise DamagedChunkError(blob)
        return data

    # -- accidents

    def process_died(self, now: float) -> None:
        """What the process had not handed to the system yet is lost."""
        self._cached = [entry for entry in self._cached if entry[0] <= now - WRITER_DELAY_S]

    def power_cut(self, now: float, rng: random.Random) -> None:
        """What was not synced is lost in part."""
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
