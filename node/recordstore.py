"""Signed records on disk: SQLite in WAL mode, one row an envelope.

Our own records are committed with a full sync before anybody hears of them ("write before you speak"), so
that a crash cannot make us sign another delta for the same round. Records of others are committed in
batches; what a crash loses of those, anti-entropy brings back.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from gossamer.protocol.envelope import open_envelope
from gossamer.protocol.errors import PeerError, StorageError
from gossamer.protocol.layout import Layout
from gossamer.protocol.records import Delta, parse_delta

_SCHEMA = """
CREATE TABLE IF NOT EXISTS swarm (id BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS deltas (
    record_id BLOB PRIMARY KEY, round INTEGER NOT NULL, envelope BLOB NOT NULL
) WITHOUT ROWID;
"""


class RecordStore:
    """Blocking: call it from one worker thread at a time."""

    def __init__(self, path: Path, swarm_id: bytes) -> None:
        """Open or create the database. Raises StorageError if it is damaged or another swarm's."""
        self._path = path
        self._swarm_id = swarm_id
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
            row = self._db.execute("SELECT id FROM swarm").fetchone()
            if row is None:
                self._db.execute("INSERT INTO swarm VALUES (?)", (swarm_id,))
            elif row[0] != swarm_id:
                raise StorageError(f"{path} belongs to another swarm; choose another --dir")
            path.chmod(0o600)
        except (sqlite3.Error, OSError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> StorageError:
        return StorageError(
            f"cannot use the database {self._path} ({error});"
            " if it is damaged, remove it: what others hold is fetched again"
        )

    def add(self, deltas: Iterable[Delta], *, durable: bool) -> None:
        """Commit records; with `durable`, they survive a power cut once this returns. Raises StorageError."""
        rows = [(delta.record_id, delta.round, delta.data) for delta in deltas]
        try:
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany("INSERT OR IGNORE INTO deltas VALUES (?, ?, ?)", rows)
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._broken(error) from None

    def load(self, layout: Layout) -> list[Delta]:
        """Read everything back, in order of round, checking signatures again. Raises StorageError.

        A row that does not verify is dropped: its record is fetched again from those who hold it.
        """
        found: list[Delta] = []
        broken: list[bytes] = []
        try:
            for record_id, envelope in self._db.execute(
                "SELECT record_id, envelope FROM deltas ORDER BY round"
            ):
                try:
                    found.append(parse_delta(open_envelope(envelope, self._swarm_id), layout))
                except PeerError:
                    broken.append(record_id)
            self._db.executemany(
                "DELETE FROM deltas WHERE record_id = ?", [(record_id,) for record_id in broken]
            )
        except sqlite3.Error as error:
            raise self._broken(error) from None
        return found

    def close(self) -> None:
        """Close the database, folding the write-ahead log into it."""
        self._db.close()
