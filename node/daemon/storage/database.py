"""A SQLite file in WAL mode, whose errors say what to do about them.

Blocking, and used from several threads: changes wait for each other.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gossamer.node.files import disk_full
from gossamer.protocol.errors import StorageError

_ADVICE = {
    sqlite3.SQLITE_CANTOPEN: "this user must be able to write to it and to its folder",
    sqlite3.SQLITE_READONLY: "this user must be able to write to it and to its folder",
    sqlite3.SQLITE_BUSY: "another program holds it: have it let go",
    sqlite3.SQLITE_LOCKED: "another program holds it: have it let go",
    sqlite3.SQLITE_IOERR: "check its disk, which is full or failed",
}
"""What to do about an error of SQLite; of any other, the file is damaged."""


class Database:
    """One open database file. Every method raises StorageError, except where it states sqlite3.Error."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create the file; `read_only` leaves it as it is. Raises StorageError."""
        self._path = path
        self._lock = threading.Lock()
        with self.explained():
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
                timeout=10,
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of SQLite inside the block into StorageError."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where it quotes a damaged file
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the higher bits are details
            if code == sqlite3.SQLITE_FULL:
                raise disk_full(self._path) from None
            advice = _ADVICE.get(code, "if it is damaged, remove it: what others hold is fetched again")
            raise StorageError(f"cannot use the database {self._path} ({str(error)!a}): {advice}") from None

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing. With `durable`, the changes survive a power cut once done. Raises StorageError."""
        with self._lock, self.explained():
            self.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self.execute("COMMIT")
            except BaseException:
                self._roll_back()  # unless a full disk has done so already
                raise

    @contextmanager
    def one_state(self) -> Iterator[None]:
        """All reads inside the block see one state, whatever other processes commit. Raises StorageError."""
        with self.explained():
            self.execute("BEGIN")
        try:
            yield
        finally:
            self._roll_back()  # nothing was written: this only ends the read transaction

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self.execute("ROLLBACK")

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Run one statement. Raises sqlite3.Error: see `explained`."""
        return self._connection.execute(statement, values)

    def create(self, schema: str) -> None:
        """Create the tables of a schema. Raises sqlite3.Error: see `explained`."""
        self.execute("PRAGMA journal_mode=WAL")
        self._connection.executescript(schema)

    def has(self, table: str) -> bool:
        """Whether a table exists. Raises sqlite3.Error: see `explained`."""
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        return self.execute(query, (table,)).fetchone() is not None

    def close(self) -> None:
        """Close the file. Waits for a thread that still writes: SQLite would go on with a connection that is
        gone."""
        with self._lock:
            self._connection.close()
