"""`gossamer.node.daemon.storage.database`: all or nothing, and its troubles are one line that says what to
do."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.database import Database
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.protocol.errors import DiskFullError, StorageError
from gossamer.protocol.records import Delta
from tests.protocol.builders import LAYOUT, SMALL


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_closing_waits_for_what_a_thread_still_writes(path: Path, deltas: list[Delta]) -> None:
    """A task that is cancelled leaves its thread behind, and SQLite would be used after it is freed."""
    store = RecordStore(path, SMALL.swarm_id)
    with store._db.transaction(durable=False) as db:
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        assert db.execute("SELECT 1").fetchone() == (1,)
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(StorageError):
        store.add(deltas, durable=False)


def test_of_what_fails_half_way_nothing_stays_and_the_next_change_is_made(path: Path) -> None:
    database = Database(path)
    database.create("CREATE TABLE numbers (number INTEGER)")
    for number, fails in ((1, True), (2, False)):
        with contextlib.suppress(ZeroDivisionError), database.transaction(durable=False) as db:
            db.execute("INSERT INTO numbers VALUES (?)", (number,))
            assert not fails or 1 / 0
    assert database.execute("SELECT number FROM numbers").fetchall() == [(2,)]
    database.close()


def test_what_was_committed_survives_a_process_that_dies(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=True)
    copy = path.with_name("copy.sqlite")  # the files as they lie when the process is killed
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    found = RecordStore(copy, SMALL.swarm_id)
    assert len(found.load(LAYOUT)) == len(deltas)
    found.close()
    store.close()


def test_a_failed_batch_leaves_nothing(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON deltas WHEN NEW.round = 1 BEGIN"
                      " SELECT RAISE(ROLLBACK, 'database or disk is full'); END")  # fmt: skip
    with pytest.raises(StorageError, match="disk is full"):
        store.add(deltas, durable=True)
    store._db.execute("DROP TRIGGER full")
    assert store.load(LAYOUT) == []
    store.add(deltas, durable=True)
    assert len(store.load(LAYOUT)) == len(deltas)
    store.close()


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\x00" + bytes(4096)])
def test_a_damaged_database_is_one_clear_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StorageError) as error:
        RecordStore(path, SMALL.swarm_id)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_reader_makes_no_database(path: Path) -> None:
    with pytest.raises(StorageError, match="cannot use the database"):
        RecordStore(path, SMALL.swarm_id, read_only=True)
    assert not path.exists()


def test_a_database_that_another_program_holds_is_not_called_damaged(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute("PRAGMA busy_timeout = 1")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="another program holds it") as held:
            store.add(deltas, durable=True)
        assert "remove it" not in str(held.value)
    store.add(deltas, durable=True)
    store.close()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (sqlite3.SQLITE_FULL, "the disk is full"),
        (sqlite3.SQLITE_IOERR_FSYNC, "check its disk, which is full or"),
    ],
)
def test_a_disk_that_fails_does_not_make_a_database_damaged(path: Path, code: int, told: str) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    with pytest.raises(StorageError, match=told) as raised, store._db.explained():
        raise error
    assert isinstance(raised.value, DiskFullError) == (code == sqlite3.SQLITE_FULL)
    store.close()


def test_what_cannot_be_reached_is_not_called_damaged(path: Path) -> None:
    with pytest.raises(StorageError, match="able to write to it and to its folder") as error:
        RecordStore(path.with_name("missing") / "ledger.sqlite", SMALL.swarm_id)
    assert "remove" not in str(error.value)
