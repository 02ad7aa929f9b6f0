"""The `gossamer` command: every mistake a person can make is one clear line, exit status 2, and no trace."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.node import __version__, verify
from gossamer.node.daemon.monitoring.status import to_json
from gossamer.node.exports import generate
from gossamer.node.home import Home
from gossamer.node.inputs import read_manifest
from gossamer.node.verify import Verdict
from gossamer.protocol.access.handshake import PROTOCOL_VERSION
from tests.bootstrap.gossamer_command import Run, entries, in_process
from tests.node.full_disk import no_room_in
from tests.node.statuses import member
from tests.protocol import builders


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return in_process(capsys, monkeypatch, tmp_path)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port where nobody answers: it is taken, so that nobody else gets it, and not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["swarm", "--nodes", 0], "--nodes"),
        (["swarm", "--nodes", 65], "--nodes"),
        (["swarm", "--nodes", "many"], "--nodes"),
        (["swarm", "--rounds", 0], "--rounds"),
        (["swarm", "--every-steps", -1], "--every-steps"),
        (["swarm", "--seed", -1], "--seed"),
        (["swarm", "--seed", 2**62 + 1], "--seed"),
        (["swarm", "--frobnicate"], "--frobnicate"),
        (["swarm", "--preset", "huge"], "huge"),
        (["swarm", "--fragments", 99], "99 fragments of 20 tensors"),
        (["swarm", "--data", "missing.txt"], "missing.txt"),
        (["swarm", "--json", "missing/summary.json"], "missing"),
        (["swarm", "--json", "."], "is not a file"),
        (["init"], "MANIFEST"),
        (["init", "m.toml", "--codec", "zip"], "zip"),
        (["init", "m.toml", "--preset", "huge"], "huge"),
        (["init", "m.toml", "--task", "chess"], "chess"),
        (["init", "m.toml", "--task", "chess.py:Chess"], "there is no file chess.py"),
        (["init", "m.toml", "--option", "batchsize=3"], "did you mean 'batch_size'"),
        (["swarm", "--task", "chess.py:Chess"], "there is no file chess.py"),
        (["swarm", "--option", "lr=fast"], "must be a number"),
        (["init", "m.toml", "--every-seconds", "nan"], "--every-seconds"),
        (["init", "m.toml", "--fragments", 99], "99 fragments of 20 tensors"),
        (["init", "m.toml", "--name", "bell\a"], "name"),
        (["init", "missing/m.toml"], "missing/m.toml"),
        (["bootstrap", "missing.toml"], "missing.toml"),
        (["node"], "--join"),
        (["node", "--join", "nowhere"], "nowhere"),
        (["node", "--join", "a" * 64 + ":1"], "HOST:PORT"),
        (["node", "--join", "127.0.0.1:70000"], "127.0.0.1:70000"),
        (["node", "--join", "127.0.0.1:1", "--data", "missing.txt"], "missing.txt"),
        (["node", "--join", "127.0.0.1:1", "--threads", 9999], "--threads"),
        (["node", "--join", "127.0.0.1:1", "--trust", "abc"], "--trust: 'abc' is not a node id"),
        (["node", "--join", "127.0.0.1:1", "--swarm-id", ""], "'' is not a swarm id"),
        (["node", "--join", "127.0.0.1:1", "--swarm-id", "demo"], "'demo' is not a swarm id"),
        (["status", "127.0.0.1"], "HOST:PORT"),
        (["peers", "127.0.0.1"], "HOST:PORT"),
        (["top", "127.0.0.1"], "HOST:PORT"),
        (["top"], "no node with an admin server runs in"),
        (["top", "--dir", "missing"], "missing"),
        (["top", "127.0.0.1:1"], "needs a terminal"),
        (["init", "my.toml", "--averaging", "median"], "centered-clip"),
        (["verify", "127.0.0.1:1"], "two or more"),
        (["generate", "--dir", "missing"], "missing"),
        (["generate", "--dir", ".", "--length", 0], "--length"),
        (["generate", "--dir", ".", "--seed", 2**64], "--seed"),
        (["export", "--dir", "missing", "out.safetensors"], "missing"),
        (["export", "--dir", ".", "out", "--dtype", "int8"], "bfloat16"),
        (["export", "--dir", "."], "OUT"),
        (["frobnicate"], "frobnicate"),
        (["node", "--dir", ""], "--dir: the path is empty"),
        (["id", "--dir", ""], "the path is empty"),
        (["node", "--dir", ".", "--name", "bell\a"], "--name"),
        (["node", "--dir", ".", "--name", "\udcfc"], "--name"),
        (["bootstrap", "m.toml", "--name", "n" * 257], "at most 256 bytes"),
        (["init", "m.toml", "--data", "missing.txt"], "missing.txt"),
        (["bootstrap", "/dev/zero"], "too large for a manifest"),
        (["node", "--invite", "missing"], "missing"),
        (["node", "--dir", __file__], "Not a directory"),
        (["invite", "ab" * 32, "--manifest", "m.toml", "--owner-key", "."], "m.toml"),
    ],
)
def test_what_a_flag_cannot_be(run: Run, tmp_path: Path, args: list[object], part: str) -> None:
    run(*args).assert_user_error(part)
    assert entries(tmp_path) == set(), "nothing half-written"


def test_the_version(run: Run) -> None:
    assert run("--version").out == f"gossamer {__version__}, wire protocol {PROTOCOL_VERSION}\n"


def test_a_bug_of_ours_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: object) -> str:
        raise RuntimeError("no\nidea")

    monkeypatch.setattr("gossamer.node.home.own_id", broken)
    outcome = run("id")
    assert outcome.status == 1
    assert outcome.err.startswith("gossamer: a bug in gossamer: RuntimeError: no idea (test_cli.py:")
    assert outcome.err.count("\n") == 1


def test_a_full_disk_under_the_output_is_no_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gossamer.node.home.own_id", full)
    run("id").assert_user_error("No space left on device")


def test_help_and_mistakes_come_without_aiohttp_and_torch() -> None:
    code = "import sys, gossamer.bootstrap.cli.main; print({'aiohttp', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=200) == "set()\n"


def test_windows_is_told_to_take_wsl() -> None:
    code = "import sys; sys.platform = 'win32'; from gossamer.node import Peer"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("does not run on Windows: install it inside WSL 2")


def test_no_command_shows_help_and_nothing_else(run: Run) -> None:
    outcome = run()
    assert "swarm" in outcome.out + outcome.err
    assert "gossamer:  " not in outcome.err


def test_nobody_answers(run: Run, tmp_path: Path, free_port: int) -> None:
    run("node", "--join", f"127.0.0.1:{free_port}").assert_user_error(str(free_port), "refused")
    run("status", f"127.0.0.1:{free_port}").assert_user_error(str(free_port))
    run("verify", f"127.0.0.1:{free_port}", "127.0.0.1:1").assert_user_error("no Gossamer node answers")
    assert entries(tmp_path) == set()


def test_a_new_node_may_wait_for_the_one_that_it_joins_and_says_so_once(
    run: Run, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been started with it, by nobody who would start it again."""
    pauses = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.node.join.time.sleep", sleep)
    assert run("node", "--wait", "--join", f"127.0.0.1:{free_port}").status == 130
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"no Gossamer node answers at 127.0.0.1:{free_port} (connection refused); is it running?"
        " Trying again every 5 s"
    ]


def test_a_folder_that_is_in_use_for_something_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("x")
    run("swarm", "--dir", "full").assert_user_error("full", "not empty")
    run("swarm", "--dir", "file").assert_user_error("file")
    assert entries(tmp_path) == {"full", "file"}
    assert entries(tmp_path / "full") == {"diary.txt"}


def test_a_disk_without_room_for_a_swarms_first_parameters(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room_in("chunks", monkeypatch)
    outcome = run("swarm", "--dir", "d")
    assert outcome.status == 1
    where = tmp_path / "d" / "bootstrap" / "chunks"
    assert outcome.err == f"gossamer: cannot write {where}: the disk is full; free some space\n"


def test_data_without_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary").write_bytes(bytes(10_000))
    for name, part in (("empty", "no text"), ("short.txt", "9 bytes"), ("binary", "NUL")):
        run("swarm", "--data", name, "--dir", "d").assert_user_error(name, part)
    assert entries(tmp_path) == {"empty", "short.txt", "binary"}


def test_a_damaged_manifest_or_key_in_the_folder(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml").status == 0
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(read_manifest(tmp_path / "my.toml"))
    home.manifest_path.write_bytes(b"junk")
    run("node", "--dir", "d").assert_user_error("d/manifest", "damaged")
    home.key_path.write_bytes(b"short")
    home.key_path.chmod(0o600)
    run("id", "--dir", "d").assert_user_error("d/key", "damaged")
    home.key_path.chmod(0o644)
    run("id", "--dir", "d").assert_user_error("chmod 600")


@pytest.mark.parametrize(
    "part",
    [{"trainer": [1]}, {"members": [{"health": 5}]}, {"members": 5}, {"itself": {}}, {"agreement": 10**400}],
)
@pytest.mark.parametrize("command", ["status", "peers"])
def test_an_answer_of_the_wrong_shape_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, part: dict[str, object], command: str
) -> None:
    whole = {"swarm": "s", "swarm_id": "ab", "node_id": "cd", "name": "", "state": "x\x1b", "round": 1}
    whole |= {"clock": 1, "records": 1, "members": [], "links": [], "agreement": None, "trains": True}

    async def fetch_status(*_: object, **__: object) -> dict[str, object]:
        return whole | {"itself": to_json(member(0))} | part

    monkeypatch.setattr("gossamer.node.daemon.network.rpc.fetch_status", fetch_status)
    outcome = run(command, "127.0.0.1:1", "--insecure-plaintext")
    assert "a bug" not in outcome.err and "\x1b" not in outcome.out + outcome.err
    if (command, *part) not in {("status", "itself"), ("status", "agreement"), ("peers", "trainer")}:
        outcome.assert_user_error("gossamer: 127.0.0.1:1 ")


def test_no_mistake_commands_a_terminal(run: Run) -> None:
    run("init", "m.toml", "--from", "gone\x1b[2J").assert_user_error(
        "--from gone\N{REPLACEMENT CHARACTER}[2J"
    )
    assert "\x1b" not in run("swarm", "--\x1b[2J").err


@pytest.mark.parametrize(("agreed", "status"), [(True, 0), (False, 1)])
def test_the_status_of_verify_says_whether_all_agree(
    run: Run, monkeypatch: pytest.MonkeyPatch, agreed: bool, status: int
) -> None:
    async def verified(*_: object, **__: object) -> Verdict:
        return Verdict(agreed, None, {"a:1": {"merged_digest": "m", "phi_digest": "p"}})

    monkeypatch.setattr(verify, "verify", verified)
    assert run("verify", "a:1", "b:1").status == status


def test_what_a_model_writes_cannot_steer_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def written(*_: object, **__: object) -> Iterator[str]:
        yield from ("a\x1b[2J", "b")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "generate", written)
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(builders.manifest())
    said = run("generate", "--dir", "d")
    assert said.out == "a\N{REPLACEMENT CHARACTER}[2Jb"
    said.assert_user_error("No space left on device")
