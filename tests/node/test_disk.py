"""`gossamer.node.daemon.storage.disk`: a full disk delays what is written, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gossamer.node.daemon.storage import disk as disk_module
from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.files import write_atomically
from gossamer.protocol.errors import FolderGoneError, StorageError
from tests.node.full_disk import full, no_room_in
from tests.node.trainer_side import until


class Gate:
    """A gate, and how often it has closed."""

    def __init__(self, *folders: Path) -> None:
        self.closed = 0
        self.disk = Disk(*folders, on_closed=self._on_closed)

    def _on_closed(self) -> None:
        self.closed += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    return tmp_path / "d"


@pytest.fixture
def gate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.01)
    return Gate(folder)


@contextlib.asynccontextmanager
async def looked_after(gate: Gate) -> AsyncIterator[Disk]:
    task = asyncio.create_task(gate.disk.run())
    yield gate.disk
    task.cancel()
    await asyncio.wait([task])


def refuse(code: int) -> None:
    raise OSError(code, os.strerror(code))


async def test_what_is_written_is_done_in_a_thread_and_answered(gate: Gate, folder: Path) -> None:
    assert await gate.disk.write(divmod, 7, 2) == (3, 1)
    assert await gate.disk.try_write(write_atomically, folder / "x", b"x", durable=True)
    assert (folder / "x").read_bytes() == b"x" and gate.closed == 0 and gate.disk.problem == ""


async def test_a_full_disk_delays_what_must_be_kept_and_nothing_else_is_tried(
    gate: Gate, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writers = []
    async with looked_after(gate) as disk:
        with monkeypatch.context() as patch:
            no_room_in(folder.name, patch)
            for number in range(5):
                work = disk.write(write_atomically, folder / str(number), b"x")
                writers.append(asyncio.create_task(work))
            await until(lambda: gate.closed >= 10)  # the writers, and the probe again and again
            assert not disk.is_writable and not await disk.writable(0.01)
            assert not await disk.try_write(write_atomically, folder / "x", b"x")
            assert "No space left on device; nothing is stored, fetched or published" in disk.problem
            assert not list(folder.iterdir()), "the probe leaves nothing behind either"
        await asyncio.gather(*writers)
        await disk.writable()
    assert {file.name for file in folder.iterdir()} == {*map(str, range(5))}
    assert len(caplog.records) == 1, "it may be full for days"


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "Read-only file system"), StorageError("another program holds it")]
)
async def test_any_other_failure_passes_too(gate: Gate, error: Exception) -> None:
    failures = [error, error]

    def work() -> str:
        if failures:
            raise failures.pop()
        return "done"

    async with looked_after(gate) as disk:
        assert await disk.write(work) == "done"
    assert gate.closed == 2


async def test_what_could_not_be_written_once_is_not_tried_again(gate: Gate) -> None:
    assert not await gate.disk.try_write(full)
    assert not gate.disk.is_writable and gate.closed == 1


async def test_a_small_file_that_fits_is_no_proof_of_room(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all would be fetched that cannot be kept."""
    synced = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: full() if os.fstat(fd).st_size > 1 << 19 else synced(fd))
    assert not await gate.disk.try_write(full)
    async with looked_after(gate) as disk:
        await until(lambda: gate.closed > 3)
        assert not disk.is_writable


async def test_nothing_is_written_to_another_folder_that_comes_in_the_place_of_ours(
    gate: Gate, folder: Path, tmp_path: Path
) -> None:
    """As below a disk that is unmounted, or where a link is changed: it may be another node's."""
    other = tmp_path / "other"
    other.mkdir()
    folder.rename(tmp_path / "away")
    for takes_its_place in (lambda: None, lambda: folder.symlink_to(other)):
        takes_its_place()
        for write in (gate.disk.write, gate.disk.try_write):
            with pytest.raises(FolderGoneError, match="d is gone: was it moved"):
                await write(write_atomically, folder / "x", b"x")
        with pytest.raises(FolderGoneError):
            async with asyncio.timeout(60):
                await gate.disk.run()
    assert list(other.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Disk(tmp_path / "missing", on_closed=lambda: None)
