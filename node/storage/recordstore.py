"""Signed records on disk: SQLite in WAL mode, one row an envelope.

Our own records are committed with a full sync before anybody hears of them ("write before you speak"), so
that a crash cannot make us sign another delta for the same round. Records of others are committed in
batches; what a crash loses of those, anti-entropy brings back.

A copy of the file does not know what was signed after it was made. So the file says with our own records
which file it is, by the number that its file system has given it: a copy has another. But a file system may
give the number of one that was removed again, and what is put back may be written into the file that was
there. So beside it lies one that is never written to again, `MARK_NAME`, and when that was last changed is
noted too: nobody can set that time, and whatever puts the folder back changes it.
"""

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gossamer.node.storage.base import GENESIS, Base
from gossamer.node.storage.wholefile import FULL, sync_folder
from gossamer.protocol.envelope import open_envelope
from gossamer.protocol.errors import DiskFullError, MalformedError, PeerError, StorageError
from gossamer.protocol.history import Claim
from gossamer.protocol.layout import Layout
from gossamer.protocol.records import Delta, parse_delta

_SCHEMA = """
CREATE TABLE IF NOT EXISTS swarm (id BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS deltas (
    record_id BLOB PRIMARY KEY, round INTEGER NOT NULL, envelope BLOB NOT NULL,
    covered INTEGER NOT NULL DEFAULT 0  -- whether the newest snapshot holds it
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS credentials (
    record_id BLOB PRIMARY KEY, envelope BLOB NOT NULL  -- grants and revocations
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    root BLOB PRIMARY KEY, round INTEGER NOT NULL, tokens INTEGER NOT NULL, digest BLOB NOT NULL,
    number INTEGER NOT NULL  -- the highest is the newest
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS history (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    floor INTEGER NOT NULL, chain BLOB NOT NULL, tokens INTEGER NOT NULL, own_last INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS reach (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    round INTEGER NOT NULL  -- the newest that is merged, where the records do not show that it may be
);
CREATE TABLE IF NOT EXISTS place (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    file TEXT NOT NULL  -- which one this was when we last signed: it may be a copy, and '' always is
);
"""

FORMAT = 1
"""Of the tables, as `PRAGMA user_version` tells it: raised when an older Gossamer could not read them."""

MARK_NAME = "original"
"""What tells a node's folder from a copy of it, beside its database: an empty file."""

log = logging.getLogger("gossamer.records")

_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The second when a message quotes what is in a damaged file."""


BESIDE_BYTES = 32 * 1024
"""Of the index of the log of writes."""

_OUT_OF_REACH = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_HELD = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _mode(path: Path, read_only: bool) -> str:
    """How to open a database, as SQLite's URIs say it.

    SQLite writes files beside it even to read it, unless told that nobody changes it: nobody can where the
    folder is read-only, a backup say. What is left in a log of writes would be missed then.
    """
    if not read_only:
        return "mode=rwc"
    is_fixed = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return "mode=ro&immutable=1" if is_fixed else "mode=ro"


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """What is kept of the past: the closed part, the snapshots, and what the newest of them holds."""

    base: Base
    own_last: int
    claims: tuple[Claim, ...]
    covered: frozenset[bytes]
    reach: int
    """The newest round merged that the swarm cannot have reached by its records alone, or one before it."""


class RecordStore:
    """Blocking: call it from worker threads."""

    def __init__(self, path: Path, swarm_id: bytes, *, read_only: bool = False) -> None:
        """Open or create the database; `read_only` leaves it as it is, for those who only look at a node's.

        Raises StorageError if it is damaged, another swarm's, or of a newer format than is known here.
        """
        self._path = path
        self._swarm_id = swarm_id
        self._read_only = read_only
        self._lock = threading.Lock()
        self._file = ""
        self.is_copy = False
        """Whether our own records were last added to another file, of which this is a copy; or whether some
        of them may have been lost, which is the same: we may have signed more than is known here."""
        try:
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?{_mode(path, read_only)}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
                timeout=10,
            )
        except _SQLITE_ERRORS as error:
            raise self._broken(error) from None
        try:
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            if found > FORMAT:
                raise StorageError(f"{path} was written by a newer Gossamer: update this one to use it")
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.executescript(_SCHEMA)
                if found < FORMAT:
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
            row = self._db.execute("SELECT id FROM swarm").fetchone() if self._has("swarm") else None
            if row is not None and row[0] != swarm_id:
                raise StorageError(f"{path} belongs to another swarm; choose another --dir")
            if not read_only:
                if row is None:
                    self._db.execute("INSERT INTO swarm VALUES (?)", (swarm_id,))
                path.chmod(0o600)
                place = self._db.execute("SELECT file FROM place").fetchone()
                known = None if place is None else str(place[0])
                self._file = _whereabouts(path)
                # That of an earlier version has no mark yet.
                self.is_copy = known is not None and known not in (self._file, self._file.split()[0])
        except (*_SQLITE_ERRORS, OSError, StorageError) as error:
            self._db.close()
            raise error if isinstance(error, StorageError) else self._broken(error) from None

    def _broken(self, error: Exception) -> StorageError:
        if isinstance(error, OSError):
            if error.errno in FULL:
                return self._full()
            return StorageError(f"cannot use the database {self._path}: {error.strerror}")
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # above are details
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and self._lacks_room()):
            return self._full()
        if code in _OUT_OF_REACH:
            return StorageError(
                f"cannot use the database {self._path} ({error}): this user has to be able to write to its"
                " folder, and its path must not be much longer than 500 bytes"
            )
        if code in _HELD:
            return StorageError(
                f"another program holds the database {self._path}: nothing is stored or published until it"
                " lets go"
            )
        if code == sqlite3.SQLITE_IOERR:
            return StorageError(
                f"cannot use the database {self._path} ({error}): look after its disk, which failed"
            )
        return self._damaged(str(error))

    def _full(self) -> DiskFullError:
        return DiskFullError(f"cannot write {self._path}: the disk is full; free some space")

    def _lacks_room(self) -> bool:
        """Whether there is none for the file that SQLite maps beside a database, which fails like a disk."""
        with suppress(OSError):
            return shutil.disk_usage(self._path.parent).free < BESIDE_BYTES
        return False

    def _damaged(self, problem: str) -> StorageError:
        what = problem if problem.isprintable() else ascii(problem)  # SQLite quotes what it found on disk
        return StorageError(
            f"cannot use the database {self._path} ({what});"
            " if it is damaged, remove it: what others hold is fetched again"
        )

    @contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing; with `durable`, it survives a power cut once done. Raises StorageError."""
        try:
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has rolled back already
                    self._db.execute("ROLLBACK")
                raise
        except _SQLITE_ERRORS as error:
            raise self._broken(error) from None

    def add(self, deltas: Iterable[Delta], *, durable: bool) -> None:
        """Commit records; with `durable`, as of our own, they survive a power cut once this returns.

        Raises StorageError.
        """
        rows = [(delta.record_id, delta.round, delta.data) for delta in deltas]
        with self._lock, self._transaction(durable=durable) as db:
            db.executemany("INSERT OR IGNORE INTO deltas (record_id, round, envelope) VALUES (?, ?, ?)", rows)
            if durable:
                db.execute("INSERT OR REPLACE INTO place VALUES (1, ?)", (self._file,))

    def add_credential(self, record_id: bytes, envelope: bytes) -> None:
        """Commit a grant or a revocation. Durable. Raises StorageError."""
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO credentials VALUES (?, ?)", (record_id, envelope))

    def load_credentials(self) -> list[bytes]:
        """The envelopes of all grants and revocations, in order of record id. Raises StorageError."""
        try:
            rows = self._db.execute("SELECT envelope FROM credentials ORDER BY record_id").fetchall()
        except sqlite3.Error as error:
            raise self._broken(error) from None
        return [row[0] for row in rows]

    def add_snapshot(self, claim: Claim, covered: Iterable[Delta], keep: Iterable[bytes]) -> None:
        """Note a snapshot that holds the records `covered`; of the older ones keep those roots. Durable.

        Records that are still waiting to be added are, so that the snapshot can be told by what it holds.
        Raises StorageError.
        """
        with self._lock, self._transaction() as db:
            self._insert_snapshot(db, claim)
            db.execute("UPDATE deltas SET covered = 0")
            db.executemany(
                "INSERT INTO deltas VALUES (?, ?, ?, 1) ON CONFLICT (record_id) DO UPDATE SET covered = 1",
                [(delta.record_id, delta.round, delta.data) for delta in covered],
            )
            roots = [claim.root, *keep]
            marks = ",".join("?" * len(roots))
            db.execute(f"DELETE FROM snapshots WHERE root NOT IN ({marks})", roots)

    def drop_snapshot(self, root: bytes) -> None:
        """Forget one of the older snapshots. Durable. Raises StorageError."""
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM snapshots WHERE root = ?", (root,))

    def begin_at(self, claim: Claim, own_last: int) -> None:
        """Begin history at a snapshot got from others: everything up to it is closed. Durable."""
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM snapshots")
            db.execute("DELETE FROM reach")
            self._insert_snapshot(db, claim)
            db.execute("UPDATE deltas SET covered = 0")
            self._close(db, Base(claim.round, claim.digest, claim.tokens), own_last)

    def note_reach(self, round_: int) -> None:
        """Note that rounds up to this one were merged, though the records do not show that the swarm has
        reached it. Raises StorageError."""
        with self._lock, self._transaction(durable=False) as db:
            db.execute("INSERT OR REPLACE INTO reach VALUES (1, ?)", (round_,))

    def close_up_to(self, base: Base, own_last: int) -> None:
        """Drop the records that became part of the base. Durable."""
        with self._lock, self._transaction() as db:
            self._close(db, base, own_last)

    @staticmethod
    def _insert_snapshot(db: sqlite3.Connection, claim: Claim) -> None:
        db.execute(
            "INSERT OR REPLACE INTO snapshots SELECT ?, ?, ?, ?, 1 + COALESCE(MAX(number), 0) FROM snapshots",
            (claim.root, claim.round, claim.tokens, claim.digest),
        )

    @staticmethod
    def _close(db: sqlite3.Connection, base: Base, own_last: int) -> None:
        db.execute("DELETE FROM deltas WHERE round <= ?", (base.round,))
        db.execute(
            "INSERT OR REPLACE INTO history VALUES (1, ?, ?, ?, ?)",
            (base.round, base.chain, base.tokens, own_last),
        )

    def load_history(self) -> StoredHistory:
        """Read back what `add_snapshot`, `begin_at` and `close_up_to` wrote. Raises StorageError."""
        try:
            if not self._has("history"):  # its first start was cut short, and this is only looked at
                return StoredHistory(GENESIS, 0, (), frozenset(), 0)
            row = self._db.execute("SELECT floor, chain, tokens, own_last FROM history").fetchone()
            snapshots = self._db.execute(
                "SELECT round, tokens, digest, root FROM snapshots ORDER BY number DESC"
            ).fetchall()
            covered = self._db.execute("SELECT record_id FROM deltas WHERE covered = 1").fetchall()
            reach = self._load_reach()
        except _SQLITE_ERRORS as error:
            raise self._broken(error) from None
        kinds = [
            (row, "ibii"),
            (reach, "i"),
            *((s, "iibb") for s in snapshots),
            *((c, "b") for c in covered),
        ]
        if not all(_is_of(found, kind) for found, kind in kinds if found is not None):
            raise self._damaged("a row holds what was never written")
        base = Base(row[0], row[1], row[2]) if row else GENESIS
        return StoredHistory(
            base,
            row[3] if row else 0,
            tuple(Claim(*s) for s in snapshots),
            frozenset(r[0] for r in covered),
            reach[0] if reach else 0,
        )

    def _has(self, table: str) -> bool:
        """Whether there is such a table."""
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        return self._db.execute(query, (table,)).fetchone() is not None

    def _load_reach(self) -> tuple[int] | None:
        """What `note_reach` wrote; a folder of before has no place for it, as long as it is only read."""
        if not self._has("reach"):
            return None
        row: tuple[int] | None = self._db.execute("SELECT round FROM reach").fetchone()
        return row

    @contextmanager
    def one_state(self) -> Iterator[None]:
        """What is loaded inside is of one moment, whatever a running daemon commits. Raises StorageError."""
        try:
            self._db.execute("BEGIN")
        except _SQLITE_ERRORS as error:
            raise self._broken(error) from None
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")  # of nothing: it only ends the reading

    def load(self, layout: Layout) -> list[Delta]:
        """Read everything back, in order of round, checking signatures again. Raises StorageError.

        A row that does not verify is left out and, unless read-only, dropped: its record is fetched again
        from those who hold it. It may have been of our own: until others have told, we may have signed more
        than what is left shows.
        """
        found: list[Delta] = []
        broken: list[object] = []
        try:
            for record_id, envelope in self._db.execute(
                "SELECT record_id, envelope FROM deltas ORDER BY round"
            ):
                try:
                    if not isinstance(envelope, bytes):  # SQLite does not enforce a column's type
                        raise MalformedError("not an envelope")
                    found.append(parse_delta(open_envelope(envelope, self._swarm_id), layout))
                except PeerError:
                    broken.append(record_id)
        except _SQLITE_ERRORS as error:
            raise self._broken(error) from None
        if broken and not self._read_only:
            log.warning("%d records in %s are damaged; they are fetched again", len(broken), self._path)
            self._drop_broken(broken)
        return found

    def _drop_broken(self, record_ids: Iterable[object]) -> None:
        """Remove rows that do not verify, and with them the certainty of what we have signed. Durable.

        Where nothing was ever signed here, that lasts as long as we run: the rows may be of our own that
        others have brought back, but a bootstrap peer's are not, and it would never sign anything more.
        """
        with self._lock, self._transaction() as db:
            db.executemany("DELETE FROM deltas WHERE record_id = ?", [(found,) for found in record_ids])
            db.execute("UPDATE place SET file = ''")
        self.is_copy = True

    def close(self) -> None:
        """Close the database, folding the write-ahead log into it.

        Not in the middle of what a thread still writes: SQLite would go on with what is gone.
        """
        with self._lock:
            self._db.close()


def _is_of(row: Sequence[object], kinds: str) -> bool:
    """Whether a row holds what its kinds say: `i`, a number that is not negative; `b`, a hash."""
    return all(
        (type(value) is int and value >= 0) if kind == "i" else (type(value) is bytes and len(value) == 32)
        for value, kind in zip(row, kinds, strict=True)
    )


def _whereabouts(path: Path) -> str:
    """Which file this is, and when the mark beside it was last changed; made if need be. Raises OSError."""
    mark = path.with_name(MARK_NAME)
    with suppress(FileExistsError):
        fd = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.fsync(fd)
            sync_folder(mark.parent)
        finally:
            os.close(fd)
    found = mark.stat()
    return f"{path.stat().st_ino} {found.st_ino} {found.st_ctime_ns}"
