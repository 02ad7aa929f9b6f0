"""`gossamer.node.home`: a folder has one daemon."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from gossamer.node import home as folderlock
from gossamer.node.home import Home
from gossamer.protocol.errors import FolderGoneError, StorageError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    return home


def test_a_folder_has_one_daemon(home: Home) -> None:
    home.lock.take()
    with pytest.raises(StorageError, match=f"another node is running in {home.root}"):
        Home(home.root).lock.take()
    home.lock.let_go()
    Home(home.root).lock.take()


def test_a_folder_has_one_daemon_also_where_somebody_removes_the_lock(home: Home) -> None:
    """As who is told that another node is running may do, and then one key signs twice."""
    home.lock.take()
    (home.root / "lock").unlink()
    with pytest.raises(StorageError, match=f"another node is running in {home.root}"):
        Home(home.root).lock.take()
    assert not home.lock.is_elsewhere(), "only a file of it is"


def test_a_folder_that_was_moved_or_removed_is_seen_to_be_gone(home: Home) -> None:
    assert not home.lock.is_elsewhere(), "nobody has locked it"
    home.lock.take()
    assert not home.lock.is_elsewhere()
    home.root.rename(home.root.with_name("elsewhere"))
    assert home.lock.is_elsewhere()
    Home(home.root).create()
    Home(home.root).lock.take()
    assert home.lock.is_elsewhere(), "what is there now is another"
    with pytest.raises(FileNotFoundError):
        home.write_peers(["127.0.0.1:1"])
    assert not home.peers_path.exists()


def test_a_lock_that_cannot_be_taken_is_not_said_to_be_taken(home: Home) -> None:
    (home.root / "lock").mkdir()
    with pytest.raises(StorageError, match="lock: Is a directory"):
        home.lock.take()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_cannot_be_written_to_any_more_may_be_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A daemon that dies meanwhile is started until it can be: nobody needs another folder."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(folderlock.os, "open", refuse)
        with pytest.raises(FolderGoneError, match=f"cannot write to {home.root}") as told:
            home.lock.take()
        assert os.strerror(number) in str(told.value) and "--dir" not in str(told.value)
    home.lock.take()


def test_who_looks_whether_a_folder_is_free_keeps_no_daemon_from_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = os.open(home.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(looks, fcntl.LOCK_SH)
    monkeypatch.setattr(folderlock.time, "sleep", lambda _: fcntl.flock(looks, fcntl.LOCK_UN))
    home.lock.take()
    os.close(looks)
    assert not Home(home.root).lock.is_free()
