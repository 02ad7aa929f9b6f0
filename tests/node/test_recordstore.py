"""`gossamer.node.storage.recordstore`: what was committed comes back verified; damage is one clear line."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.storage.original import MARK_NAME
from gossamer.node.storage.recordstore import FORMAT, RecordStore
from gossamer.protocol.errors import DiskFullError, StorageError
from gossamer.protocol.history import Claim
from gossamer.protocol.records import Delta
from tests.protocol.builders import LAYOUT, SMALL, identity, random_delta


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def deltas(rng: np.random.Generator) -> list[Delta]:
    """Some records, newest first."""
    return [random_delta(rng, identity(n), round_)[0] for round_ in (3, 2, 1) for n in range(3)]


def test_records_come_back_in_order_of_round(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:4], durable=True)
    store.add(deltas, durable=False)
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = RecordStore(path, SMALL.swarm_id)
    found = again.load(LAYOUT)
    assert [delta.round for delta in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {delta.record_id: delta for delta in found} == {delta.record_id: delta for delta in deltas}
    again.close()


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


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_format_is_left_alone(path: Path, read_only: bool) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT,)
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="newer Gossamer: update"):
        RecordStore(path, SMALL.swarm_id, read_only=read_only)
    assert path.read_bytes() == before


def test_writes_ahead_and_waits_for_the_disk_when_it_must(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    said: list[str] = []
    store._db._connection.set_trace_callback(said.append)
    store.add(deltas[:1], durable=True)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.add(deltas[1:2], durable=False)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (1,)
    store.close_up_to(_base(1), own_last=1)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,), "payloads are dropped after this"
    store.close()


def test_a_copy_is_told_from_the_file_that_our_own_records_were_added_to(
    path: Path, deltas: list[Delta]
) -> None:
    def is_copy(at: Path) -> bool:
        store = RecordStore(at, SMALL.swarm_id)
        store.close()
        return store.is_copy

    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[1:], durable=False)
    assert not store.is_copy
    store.close()
    assert not is_copy(path)
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:1], durable=True)
    store.close()
    backup, elsewhere = path.with_name("backup"), path.with_name("elsewhere")
    shutil.copyfile(path, backup)
    path.rename(elsewhere)
    assert not is_copy(elsewhere), "it has only been moved"
    shutil.copyfile(backup, path)
    assert is_copy(path)
    assert is_copy(path), "as long as we have not signed anything more"
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:1], durable=True)
    store.close()
    assert not is_copy(path)


def _signed(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=True)
    store.close()


def _is_copy(path: Path) -> bool:
    store = RecordStore(path, SMALL.swarm_id)
    store.close()
    return store.is_copy


def test_a_folder_that_is_put_back_in_place_is_told_from_what_it_was(
    tmp_path: Path, deltas: list[Delta]
) -> None:
    """Its files keep their numbers, as those of a folder made anew may get them again."""
    node, backup = tmp_path / "node", tmp_path / "backup"
    node.mkdir()
    _signed(node / "ledger.sqlite", deltas[:1])
    shutil.copytree(node, backup)
    _signed(node / "ledger.sqlite", deltas[1:])
    assert not _is_copy(node / "ledger.sqlite")
    node.rename(tmp_path / "moved")
    assert not _is_copy(tmp_path / "moved" / "ledger.sqlite"), "it has only been moved"
    (tmp_path / "moved").rename(node)
    number = (node / "ledger.sqlite").stat().st_ino
    shutil.copytree(backup, node, dirs_exist_ok=True)
    assert (node / "ledger.sqlite").stat().st_ino == number
    assert _is_copy(node / "ledger.sqlite")


def test_a_folder_of_before_is_no_copy_and_gets_its_mark_with_what_it_signs_next(
    path: Path, deltas: list[Delta]
) -> None:
    _signed(path, deltas[:1])
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE place SET file = ?", (str(path.stat().st_ino),))
        db.commit()
    path.with_name(MARK_NAME).unlink()
    assert not _is_copy(path)
    assert not _is_copy(path)
    _signed(path, deltas[1:2])
    assert not _is_copy(path)
    path.with_name(MARK_NAME).unlink()
    assert _is_copy(path), "what was put back came without it, say"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE place SET file = ?", (str(path.stat().st_ino + 1),))
        db.commit()
    assert _is_copy(path)


def test_who_lost_a_record_may_have_signed_it(path: Path, deltas: list[Delta]) -> None:
    _signed(path, deltas)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE deltas SET envelope = x'00' WHERE record_id = ?", (deltas[0].record_id,))
        db.commit()
    reader = RecordStore(path, SMALL.swarm_id, read_only=True)
    assert len(reader.load(LAYOUT)) == len(deltas) - 1 and not reader.is_copy
    reader.close()
    store = RecordStore(path, SMALL.swarm_id)
    assert not store.is_copy
    assert len(store.load(LAYOUT)) == len(deltas) - 1
    assert store.is_copy
    store.add(deltas[:1], durable=False)
    store.close()
    assert _is_copy(path), "as long as we have not signed anything more"
    _signed(path, deltas[:1])
    assert not _is_copy(path)


def test_who_never_signed_is_no_copy_ever_after_for_a_record_that_it_lost(
    path: Path, deltas: list[Delta]
) -> None:
    """A bootstrap peer would never sign what shows that it is none any more."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=False)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE deltas SET envelope = x'00' WHERE record_id = ?", (deltas[0].record_id,))
        db.commit()
    store = RecordStore(path, SMALL.swarm_id)
    store.load(LAYOUT)
    assert store.is_copy, "it may have been of our own, and got from others"
    store.close()
    assert not _is_copy(path)


def test_a_snapshot_holds_what_still_waits_to_be_added(path: Path, deltas: list[Delta]) -> None:
    """Else it would not be told by what it holds at the next start, and be left out."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:3], durable=False)
    claim = Claim(2, 1, bytes(32), bytes(32))
    store.add_snapshot(claim, deltas[2:5], ())
    store.add(deltas[3:], durable=False)
    assert store.load_history().covered == {delta.record_id for delta in deltas[2:5]}
    assert len(store.load(LAYOUT)) == len(deltas)
    store.drop_snapshot(claim.root)
    assert store.load_history().claims == ()
    store.close()


def test_a_database_whose_making_was_cut_short_is_read_as_empty(path: Path) -> None:
    path.touch()
    reader = RecordStore(path, SMALL.swarm_id, read_only=True)
    assert reader.load_history().claims == ()
    reader.close()
    assert path.stat().st_size == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_without_room_for_the_mark_is_full(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("gossamer.node.storage.original.os.open", refuse)
    with pytest.raises(StorageError) as error:
        RecordStore(path, SMALL.swarm_id)
    assert isinstance(error.value, DiskFullError) == (code == errno.ENOSPC)
    assert "damaged" not in str(error.value)


def _base(round_: int):
    from gossamer.node.storage.base import Base

    return Base(round_, bytes(32), 0)


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


def test_a_page_damaged_in_the_middle_is_one_clear_line(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=True)
    store.close()
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data), 4096):
        data[start : start + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(StorageError, match="cannot use the database"):
        RecordStore(path, SMALL.swarm_id).load(LAYOUT)


def test_a_tampered_row_is_dropped_for_good(path: Path, deltas: list[Delta]) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=True)
    store.close()
    db = sqlite3.connect(path)
    tampered = bytearray(deltas[0].data)
    tampered[-1] ^= 1
    db.execute("UPDATE deltas SET envelope = ? WHERE record_id = ?", (bytes(tampered), deltas[0].record_id))
    db.execute("UPDATE deltas SET envelope = ? WHERE record_id = ?", (b"", deltas[1].record_id))
    db.commit()
    db.close()
    store = RecordStore(path, SMALL.swarm_id)
    assert {d.record_id for d in store.load(LAYOUT)} == {d.record_id for d in deltas[2:]}
    store.add(deltas[:2], durable=False)  # fetched again
    assert len(store.load(LAYOUT)) == len(deltas)
    store.close()


def test_another_swarms_database_is_refused(path: Path) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    with pytest.raises(StorageError, match="another swarm"):
        RecordStore(path, bytes(32))


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO history VALUES (1, 'x', zeroblob(32), 0, 0)",
        "INSERT INTO history VALUES (1, 0, 7, 0, 0)",
        "INSERT INTO history VALUES (1, 0, zeroblob(31), 0, 0)",
        "INSERT INTO history VALUES (1, 0, zeroblob(32), 0, -1)",
        "INSERT INTO snapshots VALUES ('root', 1, 1, zeroblob(32), 1)",
        "INSERT INTO snapshots VALUES (zeroblob(32), 1, 1.5, zeroblob(32), 1)",
        "INSERT INTO deltas VALUES ('id', 1, 'x', 1)",
    ],
)
def test_history_of_other_types_is_one_clear_line(path: Path, change: str) -> None:
    """SQLite lets any column hold anything."""
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute(change)
    with pytest.raises(StorageError, match="never written"):
        store.load_history()
    store.close()


def test_an_envelope_of_another_type_is_dropped(path: Path) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute("INSERT INTO deltas VALUES (zeroblob(32), 1, 'text', 0)")
    assert store.load(LAYOUT) == []
    assert store._db.execute("SELECT COUNT(*) FROM deltas").fetchone() == (0,)
    store.close()


@pytest.mark.parametrize("flipped", [b"\x01", b"\x86"])
def test_a_damaged_schema_is_quoted_printably(path: Path, flipped: bytes) -> None:
    """SQLite quotes what it found, which may be no text at all."""
    RecordStore(path, SMALL.swarm_id).close()
    data = path.read_bytes().replace(b"historyhistory", b"hist" + flipped + b"ryhistory")
    path.write_bytes(data.replace(b"CREATE TABLE history", b"CREATE TABLX history"))
    with pytest.raises(StorageError) as error:
        RecordStore(path, SMALL.swarm_id)
    assert str(error.value).isprintable()


def test_a_reader_sees_one_moment_and_drops_nothing(path: Path, deltas: list[Delta]) -> None:
    daemon = RecordStore(path, SMALL.swarm_id)
    daemon.add(deltas, durable=False)
    daemon._db.execute("UPDATE deltas SET envelope = x'00' WHERE record_id = ?", [deltas[0].record_id])
    reader = RecordStore(path, SMALL.swarm_id, read_only=True)
    with reader.one_state():
        assert reader.load_history().base.round == 0
        daemon.close_up_to(_base(2), own_last=2)
        assert reader.load_history().base.round == 0
        assert len(reader.load(LAYOUT)) == len(deltas) - 1
    assert reader.load_history().base.round == 2
    reader.close()
    assert daemon._db.execute("SELECT COUNT(*) FROM deltas WHERE round = 3").fetchone() == (3,)
    daemon.close()
    with pytest.raises(StorageError, match="another swarm"):
        RecordStore(path, bytes(32), read_only=True)


def test_a_reader_makes_no_database(path: Path) -> None:
    with pytest.raises(StorageError, match="cannot use the database"):
        RecordStore(path, SMALL.swarm_id, read_only=True)
    assert not path.exists()


def test_a_folder_that_nobody_can_write_to_is_read_all_the_same(
    path: Path, deltas: list[Delta], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a backup. SQLite wants to write beside a database in WAL mode even where it only reads."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, durable=True)
    store.close()
    monkeypatch.setattr(os, "access", lambda *_: False)
    reader = RecordStore(path, SMALL.swarm_id, read_only=True)
    assert len(reader.load(LAYOUT)) == len(deltas)
    assert {file.name for file in path.parent.iterdir()} == {path.name, MARK_NAME}
    reader.close()


def test_a_database_that_another_program_holds_is_not_called_damaged(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute("PRAGMA busy_timeout = 1")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="another program holds") as held:
            store.add(deltas, durable=True)
        assert "remove it" not in str(held.value)
    store.add(deltas, durable=True)
    store.close()


def test_a_disk_that_fails_does_not_make_a_database_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    with pytest.raises(StorageError, match="look after its disk"), store._db.explained():
        raise error
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(DiskFullError), store._db.explained():
        raise error  # as SQLite says it of a file that it maps
    store.close()


def test_what_cannot_be_reached_is_not_called_damaged(path: Path) -> None:
    with pytest.raises(StorageError, match="able to write to its folder") as error:
        RecordStore(path.with_name("missing") / "ledger.sqlite", SMALL.swarm_id)
    assert "remove" not in str(error.value)
