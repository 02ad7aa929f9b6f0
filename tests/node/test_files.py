"""`gossamer.node.files`: a file appears whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from gossamer.node import files
from gossamer.node.files import write_atomically
from gossamer.protocol.errors import DiskFullError
from tests.node.full_disk import full
from tests.node.synced import Synced


def test_a_file_that_cannot_be_read_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", full)
        files.keep(path, b"new")
    assert path.read_bytes() == b"new"


def test_why_a_file_cannot_be_written_is_said(tmp_path: Path) -> None:
    read_only = OSError(errno.EROFS, "Read-only file system")
    said = str(files.cannot_write(tmp_path, read_only))
    assert said == f"cannot write {tmp_path}: Read-only file system"
    assert str(files.cannot_write(tmp_path, read_only, "say this")) == "say this"
    assert isinstance(files.cannot_write(tmp_path, OSError(errno.EDQUOT, ""), "not this"), DiskFullError)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"], "no half-written file stays"


def test_a_durable_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave an empty file in the place of the old one."""
    synced, replace = Synced(monkeypatch), os.replace
    renamed: list[tuple[bool, bool]] = []

    def noted(aside: str, path: Path) -> None:
        renamed.append((Path(aside) in synced, tmp_path in synced))
        replace(aside, path)

    monkeypatch.setattr(os, "replace", noted)
    write_atomically(tmp_path / "a", b"data")
    assert renamed == [(False, False)] and tmp_path not in synced, "what need not survive costs no wait"
    write_atomically(tmp_path / "b", b"data", durable=True)
    assert renamed[1:] == [(True, False)] and tmp_path in synced


def test_a_folder_that_cannot_be_synced_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems; what is in the file was. A disk that fails is another thing."""
    said = errno.EINVAL

    def of_files_alone(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(said, os.strerror(said))

    monkeypatch.setattr(os, "fsync", of_files_alone)
    write_atomically(tmp_path / "a", b"1", durable=True)
    assert (tmp_path / "a").read_bytes() == b"1"
    said = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "a", b"2", durable=True)
    assert os.listdir(tmp_path) == ["a"]
