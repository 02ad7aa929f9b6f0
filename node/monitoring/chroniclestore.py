"""The chronicle on disk: one SQLite file, written in batches. If it is lost, only history for display is
lost.

It reaches further back than the rounds in memory: old rounds are seldom looked at, and can wait for the disk.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from gossamer.node.monitoring.chronicle import ENTRIES_MAX, ROUNDS_MAX
from gossamer.node.monitoring.evaluations import EVALUATIONS_MAX
from gossamer.node.monitoring.rounds import Entry, Round, at_most
from gossamer.protocol.errors import MalformedError, StorageError
from gossamer.protocol.wire import pack, unpack

ENTRIES_BYTES_MAX = 1 << 20
"""Limit for one round: 1,024 entries of under 100 bytes."""

STORED_BYTES_MAX = 1 << 26
"""Limit for all rounds together: 10,000 rounds with 64 members each take 35 MB."""

DROP_EVERY = 100
"""Excess rounds are dropped once in this many rounds written, since finding them reads the whole file."""

LOCKED_S = 5.0
"""How long to wait for a file that another process has locked."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seen REAL NOT NULL,
    swarm_tokens INTEGER,  -- `Round.merged_tokens`
    agreement REAL,
    entries BLOB NOT NULL  -- msgpack: [[author, tokens, steps, staleness, loss, flags], ...]
);
CREATE TABLE IF NOT EXISTS evaluations (round INTEGER PRIMARY KEY, loss REAL NOT NULL);
"""

_COLUMNS = "round, seen, swarm_tokens, agreement, entries"
_DROP_OLDEST = """
DELETE FROM rounds WHERE round <= (
    SELECT max(round) FROM (
        SELECT round, count(*) OVER newest AS rounds, sum(length(entries)) OVER newest AS bytes
        FROM rounds WINDOW newest AS (ORDER BY round DESC)
    ) WHERE rounds > ? OR bytes > ?
);
"""

_DROP_EVALUATIONS = """
DELETE FROM evaluations WHERE round NOT IN (SELECT round FROM evaluations ORDER BY round DESC LIMIT ?);
"""

log = logging.getLogger("gossamer.chronicle")


_NONE: Mapping[int, float] = MappingProxyType({})


class ChronicleStore:
    """The chronicle's file. It blocks: call it from worker threads."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self._path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._undropped = DROP_EVERY
        """Rounds written since excess ones were last dropped; an earlier run may have left too many."""

    def load(self) -> tuple[list[Round], int]:
        """The newest rounds, as many as are kept in memory, ascending; and the newest one left out, or 0.

        A damaged file is replaced by a new one.
        """
        with self._lock:
            try:
                return self._load()
            except (sqlite3.Error, MalformedError, TypeError, ValueError) as error:
                log.warning("earlier rounds are not known: cannot read %s (%s)", self._path, error)
                if _is_damage(error):
                    self._begin_anew()
                return [], 0

    def _load(self) -> tuple[list[Round], int]:
        found: list[Round] = []
        entries = 0
        for values in self._open().execute(f"SELECT {_COLUMNS} FROM rounds ORDER BY round DESC"):
            row = _round_of(values)
            entries += len(row.entries)
            if len(found) == ROUNDS_MAX or (entries > ENTRIES_MAX and found):
                return found[::-1], row.number
            found.append(row)
        return found[::-1], 0

    def load_evaluations(self) -> list[tuple[int, float]]:
        """Held-out losses by round, ascending; none if they cannot be read."""
        query = "SELECT round, loss FROM evaluations WHERE typeof(loss) = 'real' ORDER BY round"
        with self._lock:
            try:
                return self._open().execute(query).fetchall()
            except sqlite3.Error as error:
                log.debug("cannot read %s: %s", self._path, error)
                return []

    def between(self, first: int, last: int, rounds_max: int, entries_max: int) -> list[Round]:
        """The newest rounds kept from `first` to `last`, descending, within the limits of `at_most`; none if
        they cannot be read."""
        query = f"SELECT {_COLUMNS} FROM rounds WHERE round BETWEEN ? AND ? ORDER BY round DESC"
        with self._lock:
            try:
                found = self._open().execute(query, (first, last))
                return list(at_most(map(_round_of, found), rounds_max, entries_max))
            except (sqlite3.Error, MalformedError, TypeError, ValueError) as error:
                log.debug("cannot read %s: %s", self._path, error)
                return []

    def oldest(self) -> int | None:
        """The oldest round kept; None if there is none, or it cannot be read."""
        with self._lock:
            try:
                (found,) = self._open().execute("SELECT min(round) FROM rounds").fetchone()
            except sqlite3.Error:
                return None
        return None if found is None else int(found)

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=LOCKED_S)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.executescript(_SCHEMA)
            except BaseException:  # a full disk, say: the next call tries to open it again
                db.close()
                raise
            self._db = db
        return self._db

    def _begin_anew(self) -> None:
        self._close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()

    def save(self, rounds: Iterable[Round], evaluations: Mapping[int, float] = _NONE) -> None:
        """Write rounds and held-out losses, and now and then drop the oldest beyond what is kept.

        Raises StorageError.
        """
        rows = [
            (row.number, row.seen, _bounded(row.merged_tokens), row.agreement, _pack(row)) for row in rounds
        ]
        with self._lock:
            undropped = self._undropped + len(rows)
            try:
                db = self._open()
                db.execute("BEGIN IMMEDIATE")
                try:
                    db.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", rows)
                    if undropped >= DROP_EVERY:
                        db.execute(_DROP_OLDEST, (ROUNDS_MAX, STORED_BYTES_MAX))
                        undropped = 0
                    db.executemany("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", evaluations.items())
                    db.execute(_DROP_EVALUATIONS, (EVALUATIONS_MAX,))
                    db.execute("COMMIT")
                    self._undropped = undropped
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
    """Whether the file itself is at fault, and not a full disk or missing permissions."""
    is_operational = isinstance(error, sqlite3.OperationalError)
    return not is_operational or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _round_of(values: tuple[int, float, int | None, float | None, bytes]) -> Round:
    """A round from its row in the file. Raises MalformedError, TypeError or ValueError."""
    number, seen, merged_tokens, agreement, packed = values
    return Round(number, seen, merged_tokens, agreement, _unpack(packed))


def _pack(row: Round) -> bytes:
    return pack([list(entry) for entry in row.entries])


def _unpack(packed: bytes) -> tuple[Entry, ...]:
    value = unpack(packed, ENTRIES_BYTES_MAX)
    if not isinstance(value, list):
        raise ValueError("entries that are no list")
    return tuple(Entry(*fields) for fields in value)


def _bounded(tokens: int | None) -> int | None:
    """A token count that fits SQLite's 64-bit integers; what members claim may add up to more."""
    return None if tokens is None else min(tokens, 2**63 - 1)
