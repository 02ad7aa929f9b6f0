"""`gossamer bootstrap`: a manifest or a folder that will not do is one clear line, and can be put right."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from gossamer.node.home import Home
from gossamer.node.inputs import read_manifest
from gossamer.protocol.errors import DiskFullError, StorageError
from tests.bootstrap.gossamer_command import Run, entries, in_process
from tests.net.processes import COMMAND, wait_for


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return in_process(capsys, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("momentum = 0.5", "momentun = 0.7", ["outer.momentun", "unknown key"]),
        ("momentum = 0.5", 'momentum = "a lot"', ["outer.momentum"]),
        ("momentum = 0.5", "momentum = 1.5", ["outer.momentum"]),
        ("momentum = 0.5", "momentum = nan", ["outer.momentum"]),
        ("every_steps = 30", "every_steps = 30.5", ["pace.every_steps"]),
        ("every_seconds = 0.0", "every_seconds = 2.0", ["pace"]),
        ('name = "int4"', 'name = "zip"', ["zip"]),
        ("[outer]", "[inner]", ["inner"]),
        ("[outer]", "[outer", ["not valid TOML"]),
        ("fragments = 4", "fragments = 10000", ["fragments"]),
        ('mode = "open"', 'mode = "ajar"', ["admission.mode"]),
        ("[genesis]\ndigest = ", "[genesis]\ndigest = 'xyz' #", ["genesis.digest"]),
    ],
)
def test_a_manifest_that_cannot_be(run: Run, tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    assert run("init", "my.toml", "--codec", "int4", "--every-steps", 30).status == 0
    text = (tmp_path / "my.toml").read_text()
    assert text.count(old) == 1
    (tmp_path / "my.toml").write_text(text.replace(old, new))
    run("bootstrap", "my.toml", "--dir", "d", "--listen", "127.0.0.1:0").assert_user_error(*parts)
    assert not Home(tmp_path / "d").manifest_path.exists(), "once put right, the folder may be used"


def test_a_manifest_that_is_no_text_or_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_bytes(b"\xff\xfe\x00")
    run("bootstrap", "my.toml").assert_user_error("my.toml", "not text")
    (tmp_path / "empty.toml").write_text("")
    run("bootstrap", "empty.toml").assert_user_error("empty.toml")
    run("bootstrap", tmp_path).assert_user_error(str(tmp_path))


def test_a_folder_of_another_swarm(run: Run, tmp_path: Path) -> None:
    assert run("init", "one.toml").status == 0
    assert run("init", "two.toml", "--seed", 1).status == 0
    one, two = read_manifest(tmp_path / "one.toml"), read_manifest(tmp_path / "two.toml")
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(one)
    run("bootstrap", "two.toml", "--dir", "d").assert_user_error(
        one.swarm_id.hex()[:12], two.swarm_id.hex()[:12]
    )
    run("node", "--dir", "d", "--swarm-id", two.swarm_id.hex()).assert_user_error(one.swarm_id.hex()[:12])
    run("node", "--dir", "d", "--trust", "somebody").assert_user_error("'somebody' is not a node id")
    assert entries(home.root) == {"manifest"}


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), StorageError("the disk is full")])
def test_a_bootstrap_peer_that_did_not_get_to_its_model_may_have_another_manifest(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def ensure_genesis(*_: object) -> None:
        raise problem

    assert run("init", "my.toml", "--preset", "tiny").status == 0
    monkeypatch.setattr("gossamer.bootstrap.genesis.ensure_genesis", ensure_genesis)
    assert run("bootstrap", "my.toml", "--dir", "d").status in (2, 130)
    assert Home(tmp_path / "d").manifest() is None


def test_a_bootstrap_peer_that_finds_the_disk_full_may_be_started_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By systemd, say: status 2 would keep it from that."""

    def full(*_: object) -> None:
        raise DiskFullError("cannot write d/ledger.sqlite: the disk is full; free some space")

    assert run("init", "my.toml", "--preset", "tiny").status == 0
    monkeypatch.setattr("gossamer.bootstrap.genesis.ensure_genesis", full)
    outcome = run("bootstrap", "my.toml", "--dir", "d")
    assert outcome.status == 1
    assert outcome.err == "gossamer: cannot write d/ledger.sqlite: the disk is full; free some space\n"


def test_a_model_that_cannot_be_built_ends_it(run: Run, tmp_path: Path) -> None:
    """What builds it prints why: one line."""
    assert run("init", "my.toml", "--preset", "tiny").status == 0
    text = (tmp_path / "my.toml").read_text()
    (tmp_path / "my.toml").write_text(text.replace("seed = 0", "seed = 1"))
    assert run("bootstrap", "my.toml", "--dir", "d").status == 2
    assert Home(tmp_path / "d").manifest() is None, "once put right, the folder may be used"


def test_what_builds_a_model_ends_with_the_command(run: Run, tmp_path: Path) -> None:
    """For minutes, if the model is large, it would keep processors and memory, and write into the folder."""
    assert run("init", "my.toml", "--preset", "tiny").status == 0
    command = subprocess.Popen([*COMMAND, "bootstrap", "my.toml", "--dir", "d"], cwd=tmp_path)
    try:
        (child,) = wait_for(psutil.Process(command.pid).children, 60, "what builds the model")
        wait_for(lambda: "gossamer.node.trainer.genesis" in child.cmdline(), 60, "its module")
    finally:
        command.kill()
        command.wait(60)
    child.wait(60)
    stored = [file for file in (tmp_path / "d" / "chunks").rglob("*") if file.is_file()]
    assert not stored, "it has not gone on to store the model"
