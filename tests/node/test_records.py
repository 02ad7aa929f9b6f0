"""`gossamer.node.daemon.storage.records`: what was committed comes back verified; damage is left out."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from gossamer.node.daemon.storage import disk as disk_module
from gossamer.node.daemon.storage import records
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.daemon.storage.records import (
    FORMAT,
    GENESIS,
    Base,
    RecordStore,
    RecordWriter,
    StoredHistory,
)
from gossamer.protocol.errors import DiskFullError, StorageError
from gossamer.protocol.records import Claim, Delta
from tests.protocol.builders import LAYOUT, SMALL, unsigned


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def test_records_come_back_in_order_of_round(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:4])
    store.add(deltas)
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = RecordStore(path, SMALL.swarm_id)
    found = again.load(LAYOUT)
    assert [delta.round for delta in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {delta.record_id: delta for delta in found} == {delta.record_id: delta for delta in deltas}
    again.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_another_format_is_left_alone(path: Path, read_only: bool) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (FORMAT,)
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="another release of Gossamer: use that one"):
        RecordStore(path, SMALL.swarm_id, read_only=read_only)
    assert path.read_bytes() == before


def test_the_last_round_that_we_signed_outlives_its_record(path: Path, deltas: list[Delta]) -> None:
    """A record that turns out damaged may be our own: we must not sign its round again."""
    store = RecordStore(path, SMALL.swarm_id)
    for round_ in (3, 2):
        store.add([next(delta for delta in deltas if delta.round == round_)], own=True)
    store.close_up_to(_base(3), own_last=1)
    assert store.load(LAYOUT) == [] and store.load_history().own_last == 3
    store.close_up_to(_base(3), own_last=7)
    assert store.load_history().own_last == 7
    store.close()


def test_writes_ahead_and_waits_for_the_disk_when_it_must(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)

    def synchronous() -> int:
        return int(store._db.execute("PRAGMA synchronous").fetchone()[0])

    store.add(deltas[:1], own=True)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",) and synchronous() == 2
    store.add(deltas[1:2])
    assert synchronous() == 1
    store.close_up_to(_base(1), own_last=1)
    assert synchronous() == 2, "payloads are dropped after this"
    store.close()


def test_a_snapshot_holds_what_still_waits_to_be_added(path: Path, deltas: list[Delta]) -> None:
    """Else it would not be told by what it holds at the next start, and be left out."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:3])
    claim = Claim(2, 1, bytes(32), bytes(32))
    store.add_snapshot(claim, deltas[2:5], ())
    store.add(deltas[3:])
    assert store.load_history().covered == {delta.record_id for delta in deltas[2:5]}
    assert len(store.load(LAYOUT)) == len(deltas)
    store.close()


def test_the_next_snapshot_writes_only_what_it_holds_beyond_the_last(path: Path, deltas: list[Delta]) -> None:
    """A ledger of a week has a million rows, and a snapshot comes every few minutes."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas[:8])
    store.add_snapshot(Claim(2, 1, bytes(32), bytes(32)), deltas[1:8], ())
    before = store._db.total_changes
    store.add_snapshot(Claim(3, 1, bytes(32), bytes([1] * 32)), deltas[2:], ())
    assert store._db.total_changes - before == 4, "both snapshots, one left out, and one new"
    assert store.load_history().covered == {delta.record_id for delta in deltas[2:]}
    store.close()


def test_history_that_begins_anew_holds_nothing_of_the_one_before(path: Path, deltas: list[Delta]) -> None:
    """What the swarm's snapshot holds of our records is not known, nor how far they were merged into it."""
    store = RecordStore(path, SMALL.swarm_id)
    store.add_snapshot(Claim(3, 1, bytes(32), bytes(32)), deltas, ())
    store.note_reach(3)
    claim = Claim(1, 7, bytes([1] * 32), bytes([2] * 32))
    store.begin_at(claim, own_last=3)
    base = Base(claim.round, claim.digest, claim.tokens)
    assert store.load_history() == StoredHistory(base, 3, (claim,), frozenset(), 0)
    assert [delta.round for delta in store.load(LAYOUT)] == [2, 2, 2, 3, 3, 3]
    store.close()


def test_a_database_whose_making_was_cut_short_is_read_as_empty(path: Path) -> None:
    path.touch()
    reader = RecordStore(path, SMALL.swarm_id, read_only=True)
    assert reader.load_history() == StoredHistory(GENESIS, 0, (), frozenset(), 0)
    reader.close()
    assert path.stat().st_size == 0
    store = RecordStore(path, SMALL.swarm_id)
    assert store.load_history() == StoredHistory(GENESIS, 0, (), frozenset(), 0)
    store.close()


def _base(round_: int) -> Base:
    return Base(round_, bytes(32), 0)


def test_a_tampered_row_is_left_out_until_its_record_comes_again(path: Path, deltas: list[Delta]) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas)
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
    store.add(deltas[:2])  # fetched again
    assert len(store.load(LAYOUT)) == len(deltas)
    store.close()


def test_another_swarms_database_is_refused(path: Path) -> None:
    RecordStore(path, SMALL.swarm_id).close()
    with pytest.raises(StorageError, match="another swarm"):
        RecordStore(path, bytes(32))


def test_a_reader_sees_one_moment_and_drops_nothing(path: Path, deltas: list[Delta]) -> None:
    daemon = RecordStore(path, SMALL.swarm_id)
    daemon.add(deltas)
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


# -- what goes wrong


def test_closing_waits_for_what_a_thread_still_writes(path: Path, deltas: list[Delta]) -> None:
    """A task that is cancelled leaves its thread behind, and SQLite would be used after it is freed."""
    store = RecordStore(path, SMALL.swarm_id)
    with store._change() as db:
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive() and db.execute("SELECT 1").fetchone() == (1,)
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(StorageError):
        store.add(deltas)


def test_what_was_committed_survives_a_process_that_dies(path: Path, deltas: list[Delta]) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    store.add(deltas, own=True)
    copy = path.with_name("copy.sqlite")  # the files as they lie when the process is killed
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    found = RecordStore(copy, SMALL.swarm_id)
    assert len(found.load(LAYOUT)) == len(deltas)
    found.close()
    store.close()


@pytest.mark.parametrize("kind", ["ROLLBACK", "ABORT"])
def test_a_failed_batch_leaves_nothing(path: Path, deltas: list[Delta], kind: str) -> None:
    """A full disk may have rolled it back already."""
    store = RecordStore(path, SMALL.swarm_id)
    store._db.execute("CREATE TRIGGER full BEFORE INSERT ON deltas WHEN NEW.round = 3 BEGIN"
                      f" SELECT RAISE({kind}, 'database or disk is full'); END")  # fmt: skip
    with pytest.raises(StorageError, match="disk is full"):
        store.add(deltas)
    store._db.execute("DROP TRIGGER full")
    assert store.load(LAYOUT) == []
    store.add(deltas)
    assert len(store.load(LAYOUT)) == len(deltas)
    store.close()


@pytest.mark.parametrize("content", [b"not a database" * 100, b"SQLite format 3\x00" + bytes(4096)])
def test_a_damaged_database_is_one_clear_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StorageError) as error:
        RecordStore(path, SMALL.swarm_id)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_reached_is_neither_made_nor_called_damaged(path: Path) -> None:
    for place, read_only in ((path, True), (path.with_name("missing") / "ledger.sqlite", False)):
        with pytest.raises(StorageError, match="able to write to it and to its folder") as error:
            RecordStore(place, SMALL.swarm_id, read_only=read_only)
        assert "remove" not in str(error.value) and not place.exists()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (sqlite3.SQLITE_FULL, "the disk is full"),
        (sqlite3.SQLITE_IOERR_FSYNC, "check its disk, which is full or"),
        (sqlite3.SQLITE_BUSY, "another program holds it"),
    ],
)
def test_a_disk_that_fails_does_not_make_a_database_damaged(path: Path, code: int, advice: str) -> None:
    store = RecordStore(path, SMALL.swarm_id)
    error = sqlite3.OperationalError("an error")
    error.sqlite_errorcode = code
    with pytest.raises(StorageError, match=advice) as raised, store._explained():
        raise error
    assert isinstance(raised.value, DiskFullError) == (code == sqlite3.SQLITE_FULL)
    assert "remove" not in str(raised.value)
    store.close()


# -- the writer


class FakeStore:
    """Notes what it is given, and fails when told."""

    def __init__(self) -> None:
        self.batches: list[list[Delta]] = []
        self.failures = 0

    def add(self, deltas: Iterable[Delta]) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("the disk is full")
        self.batches.append(list(deltas))


class Setup:
    def __init__(self, folder: Path) -> None:
        self.store = FakeStore()
        self.disk = Disk(folder, on_closed=lambda: None)
        self.writer = RecordWriter(self.store, self.disk)  # type: ignore[arg-type]


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.1)
    setup = Setup(tmp_path)
    tasks = [asyncio.create_task(work.run()) for work in (setup.writer, setup.disk)]
    yield setup
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_what_waits_is_written_together(setup: Setup) -> None:
    deltas = [unsigned(n, 1) for n in range(100)]
    for delta in deltas:
        setup.writer.add(delta)
    await setup.writer.drained()
    assert setup.store.batches == [deltas]


async def test_whoever_brings_too_much_waits_and_a_full_disk_loses_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BACKLOG_MAX", 3)
    setup.store.failures = 2
    deltas = [unsigned(n, 1) for n in range(5)]
    for delta in deltas:
        setup.writer.add(delta)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await setup.writer.room()
    async with asyncio.timeout(60):
        await setup.writer.room()
        await setup.writer.drained()
    assert setup.store.batches == [deltas]
