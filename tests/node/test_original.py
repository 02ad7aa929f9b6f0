"""`gossamer.node.daemon.storage.records`: a copy of a node's records is told from what they were added to."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.records import MARK_NAME, RecordStore
from gossamer.protocol.errors import DiskFullError, StorageError
from gossamer.protocol.records import Delta
from tests.protocol.builders import LAYOUT, SMALL


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_without_room_for_the_mark_is_full(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("gossamer.node.daemon.storage.records.os.open", refuse)
    with pytest.raises(StorageError) as error:
        RecordStore(path, SMALL.swarm_id)
    assert isinstance(error.value, DiskFullError) == (code == errno.ENOSPC)
    assert "damaged" not in str(error.value)
