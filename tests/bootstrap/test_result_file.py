"""`gossamer.bootstrap.summary`: what is no file is written into or refused, and never replaced."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from gossamer.bootstrap import local_swarm as swarm
from gossamer.bootstrap.summary import ResultFile
from gossamer.node.files import put
from gossamer.protocol.errors import ConfigError, StorageError
from tests.bootstrap.local_swarms import options
from tests.bootstrap.summaries import status, summary


@pytest.fixture
def pipe() -> tuple[int, int]:
    """A pipe's ends, to read from and to write to."""
    return os.pipe()


def test_a_file_is_replaced_as_a_whole_and_a_link_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old, and longer than what is new")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link", "new"):
        ResultFile(tmp_path / name).write(b"new")
        assert (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "new"]


@pytest.mark.parametrize("spelling", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_an_open_pipe_is_written_into(spelling: str, pipe: tuple[int, int]) -> None:
    """What a shell makes of ``--json >(jq .)``."""
    reads, writes = pipe
    ResultFile(Path(spelling.format(writes))).write(b"all of it")
    os.close(writes)
    assert os.read(reads, 100) == b"all of it"
    with pytest.raises(ConfigError, match="only open for reading"):
        ResultFile(Path(spelling.format(reads)))
    os.close(reads)
    with pytest.raises(ConfigError, match="Bad file descriptor"):
        ResultFile(Path(spelling.format(reads)))


def test_a_pipe_that_takes_little_at_a_time_gets_all_of_it(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = pipe
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4]))
    ResultFile(Path(f"/dev/fd/{writes}")).write(b"all of it")
    os.close(writes)
    assert os.read(reads, 100) == b"all of it"
    os.close(reads)


def test_only_standard_output_is_where_the_display_would_be() -> None:
    assert ResultFile(Path("/dev/stdout")).is_stdout and ResultFile(Path("/dev/fd/1")).is_stdout
    assert not ResultFile(Path("/dev/stderr")).is_stdout and not ResultFile(Path("/dev/null")).is_stdout


def test_a_fifo_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    fifo, null = tmp_path / "fifo", tmp_path / "null"
    os.mkfifo(fifo)
    null.symlink_to("/dev/null")
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(fifo.read_bytes()))
    reader.start()
    ResultFile(fifo).write(b"x")
    reader.join()
    assert said == [b"x"] and stat.S_ISFIFO(fifo.stat().st_mode)
    ResultFile(null).write(b"x")
    assert null.is_symlink() and stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_nothing_else_is_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(ConfigError, match="neither a file nor a pipe"):
            ResultFile(tmp_path / "s")
    (tmp_path / "dangling").symlink_to("missing/file")
    with pytest.raises(ConfigError, match="there is no folder .*/missing"):
        ResultFile(tmp_path / "dangling")


def test_no_file_is_put_in_the_place_of_what_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match="not a file"):
            put(tmp_path / name, b"x")
    assert stat.S_ISFIFO((tmp_path / "link").stat().st_mode)


class Run:
    """A local swarm that is over at once."""

    def __init__(self, *_: object) -> None:
        pass

    async def run(self) -> object:
        return summary(status(0), status(1))


@pytest.mark.parametrize("chosen", ["/dev/full", "/dev/stdout"])
def test_a_run_is_shown_also_where_its_result_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], chosen: str
) -> None:
    monkeypatch.setattr(swarm, "LocalSwarm", Run)
    asked = options(tmp_path / "d", json_path=Path(chosen))
    if chosen == "/dev/full":
        with pytest.raises(StorageError, match="cannot write /dev/full: No space left on device"):
            swarm.run_swarm(asked)
        assert "bit-identical" in capfd.readouterr().out
    else:
        assert swarm.run_swarm(asked) == 0
        found = capfd.readouterr()
        assert found.out.startswith("{\n") and found.out.endswith("}\n"), "nothing but JSON"
        assert "bit-identical" in found.err


def test_a_result_that_cannot_be_written_leaves_no_folder_that_nobody_knows_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logged(Run):
        def __init__(self, _options: object, _manifest: object, folder: Path, _console: object) -> None:
            (folder / "node-1.log").touch()

    monkeypatch.setattr(swarm, "LocalSwarm", Logged)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StorageError, match="/dev/full"):
        swarm.run_swarm(options(None, json_path=Path("/dev/full")))
    assert list(tmp_path.iterdir()) == []


def test_a_result_is_there_also_where_the_run_cannot_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show_summary(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(swarm, "LocalSwarm", Run)
    monkeypatch.setattr(swarm, "show_summary", show_summary)
    with pytest.raises(OSError):
        swarm.run_swarm(options(tmp_path / "d", json_path=tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text())["ok"]


def test_the_path_of_the_folders_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(swarm, "LocalSwarm", Run)
    folder = tmp_path / ("long" * 30) / "d"
    assert swarm.run_swarm(options(folder)) == 0
    assert f"The nodes' folders are in {folder}\n" in capsys.readouterr().out
