"""The chronicle on disk: one small SQLite file, written in batches. Losing it loses nothing but memories."""

import logging
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gossamer.node.chronicle import ENTRIES_MAX, ROUNDS_MAX, Entry, Round
from gossamer.protocol.errors import MalformedError, StorageError
from gossamer.protocol.wire import pack, unpack

ENTRIES_BYTES_MAX = 1 << 20
"""Of one round: 1,024 entries of under 100 bytes."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seen REAL NOT NULL, swarm_tokens INTEGER, agreement REAL,
    entries BLOB NOT NULL  -- msgpack: [[author, tokens, steps, staleness, loss, flags], ...]
);
"""

log = logging.getLogger("gossamer.chronicle")


class ChronicleStore:
    """Blocking: call it from worker threads."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened yet."""
        self._path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def load(self) -> list[Round]:
        """The rounds kept, ascending. A file that is damaged is begun anew."""
        with self._lock:
            try:
                return self._load()
            except (sqlite3.Error, MalformedError, TypeError, ValueError) as error:
                log.warning("what happened before is not known: cannot read %s (%s)", self._path, error)
                if _is_damage(error):
                    self._begin_anew()
                return []

    def _load(self) -> list[Round]:
        found: list[Round] = []
        entries = 0
        rows = self._open().execute(
            "SELECT round, seen, swarm_tokens, agreement, entries FROM rounds ORDER BY round DESC LIMIT ?",
            (ROUNDS_MAX,),
        )
        for number, seen, swarm_tokens, agreement, packed in rows:
            row = Round(number, seen, swarm_tokens, agreement, _unpack(packed))
            entries += len(row.entries)
            if entries > ENTRIES_MAX and found:
                break
            found.append(row)
        return found[::-1]

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=5)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        return self._db

    def _begin_anew(self) -> None:
        self._close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()

    def save(self, rounds: Iterable[Round], begins_after: int) -> None:
        """Write rounds, and drop those up to `begins_after`. Raises StorageError."""
        rows = [
            (row.number, row.seen, _bounded(row.swarm_tokens), row.agreement, _pack(row)) for row in rounds
        ]
        with self._lock:
            try:
                db = self._open()
                db.execute("BEGIN IMMEDIATE")
                try:
                    db.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", rows)
                    db.execute("DELETE FROM rounds WHERE round <= ?", (begins_after,))
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:  # a full disk has rolled back already
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StorageError(f"cannot write {self._path}: {error}") from None

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, rather than a full disk or missing rights."""
    is_operational = isinstance(error, sqlite3.OperationalError)
    return not is_operational or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _pack(row: Round) -> bytes:
    return pack([list(entry) for entry in row.entries])


def _unpack(packed: bytes) -> tuple[Entry, ...]:
    """Raises MalformedError, TypeError or ValueError."""
    value = unpack(packed, ENTRIES_BYTES_MAX)
    if not isinstance(value, list):
        raise ValueError("entries that are no list")
    return tuple(Entry(*fields) for fields in value)


def _bounded(tokens: int | None) -> int | None:
    """SQLite's integers have 64 bits; what members claim may add up to more."""
    return None if tokens is None else min(tokens, 2**63 - 1)
