"""The `gossamer` command: every mistake a person can make is one clear line, exit status 2, and no trace."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossamer.bootstrap import cli
from gossamer.bootstrap.manifests import read
from gossamer.node.home import Home


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    out: str
    err: str

    def assert_user_error(self, *parts: str) -> None:
        """One line on standard error that holds all `parts`; nothing else happened."""
        assert self.status == 2, self
        assert self.err.startswith("gossamer: ") and self.err.endswith("\n"), self
        assert self.err.count("\n") == 1, self
        for part in parts:
            assert part in self.err, (part, self.err)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))
    # Folders are for processes; the handlers that it sets are for ours.
    monkeypatch.setattr("gossamer.node.logs.configure", lambda **_: None)

    def run_it(*args: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["gossamer", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run_it


@pytest.fixture
def free_port() -> int:
    """A port where nobody answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- flags


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["swarm", "--nodes", 0], "--nodes"),
        (["swarm", "--nodes", 65], "--nodes"),
        (["swarm", "--nodes", "many"], "--nodes"),
        (["swarm", "--rounds", 0], "--rounds"),
        (["swarm", "--every-steps", -1], "--every-steps"),
        (["swarm", "--seed", -1], "--seed"),
        (["swarm", "--frobnicate"], "--frobnicate"),
        (["swarm", "--codec", "zip"], "zip"),
        (["swarm", "--preset", "huge"], "huge"),
        (["swarm", "--fragments", 99], "--fragments"),
        (["swarm", "--data", "missing.txt"], "missing.txt"),
        (["swarm", "--json", "missing/summary.json"], "missing"),
        (["swarm", "--json", "."], "folder"),
        (["init"], "MANIFEST"),
        (["init", "m.toml", "--codec", "zip"], "zip"),
        (["init", "m.toml", "--preset", "huge"], "huge"),
        (["init", "m.toml", "--task", "chess"], "chess"),
        (["init", "m.toml", "--every-seconds", "nan"], "--every-seconds"),
        (["init", "m.toml", "--fragments", 99], "--fragments"),
        (["init", "m.toml", "--name", "bell\a"], "name"),
        (["init", "m.toml", "--name", "n" * 201], "name"),
        (["init", "missing/m.toml"], "missing/m.toml"),
        (["bootstrap", "missing.toml"], "missing.toml"),
        (["node"], "--join"),
        (["node", "--join", "nowhere"], "nowhere"),
        (["node", "--join", "a" * 64 + ":1"], "HOST:PORT"),
        (["node", "--join", "127.0.0.1:70000"], "127.0.0.1:70000"),
        (["node", "--join", "127.0.0.1:1", "--data", "missing.txt"], "missing.txt"),
        (["node", "--join", "127.0.0.1:1", "--threads", 9999], "--threads"),
        (["status", "127.0.0.1"], "HOST:PORT"),
        (["peers", "127.0.0.1"], "HOST:PORT"),
        (["top", "127.0.0.1"], "HOST:PORT"),
        (["top"], "no node runs in"),
        (["top", "--dir", "missing"], "missing"),
        (["top", "127.0.0.1:1"], "needs a terminal"),
        (["init", "my.toml", "--averaging", "median"], "centered-clip"),
        (["verify", "127.0.0.1:1"], "two or more"),
        (["generate", "--dir", "missing"], "missing"),
        (["generate", "--dir", ".", "--length", 0], "--length"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_what_a_flag_cannot_be(run: Run, tmp_path: Path, args: list[object], part: str) -> None:
    run(*args).assert_user_error(part)
    assert entries(tmp_path) == set(), "nothing half-written"


def test_no_command_shows_help_and_nothing_else(run: Run) -> None:
    outcome = run()
    assert "swarm" in outcome.out + outcome.err
    assert "gossamer:  " not in outcome.err


def test_nobody_answers(run: Run, tmp_path: Path, free_port: int) -> None:
    run("node", "--join", f"127.0.0.1:{free_port}").assert_user_error(str(free_port), "refused")
    run("status", f"127.0.0.1:{free_port}").assert_user_error(str(free_port))
    run("verify", f"127.0.0.1:{free_port}", "127.0.0.1:1").assert_user_error("nobody useful answers")
    assert entries(tmp_path) == set()


def test_a_folder_that_is_in_use_for_something_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("x")
    run("swarm", "--dir", "full").assert_user_error("full", "not empty")
    run("swarm", "--dir", "file").assert_user_error("file")
    assert entries(tmp_path) == {"full", "file"}
    assert entries(tmp_path / "full") == {"diary.txt"}


def test_data_without_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary").write_bytes(bytes(10_000))
    for name, part in (("empty", "no text"), ("short.txt", "9 bytes"), ("binary", "NUL")):
        run("swarm", "--data", name, "--dir", "d").assert_user_error(name, part)
    assert entries(tmp_path) == {"empty", "short.txt", "binary"}


# -- manifests


def test_init_writes_what_bootstrap_reads(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--fragments", 2, "--codec", "topk")
    assert outcome.status == 0
    manifest = read(tmp_path / "my.toml")
    assert manifest.swarm_id.hex() in outcome.out
    assert (manifest.swarm.name, manifest.outer.codec, manifest.layout.fragments) == ("my", "topk", 2)
    assert entries(tmp_path) == {"my.toml"}


def test_init_replaces_a_manifest_only_when_told(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml").status == 0
    before = (tmp_path / "my.toml").read_text()
    run("init", "my.toml", "--name", "other").assert_user_error("my.toml", "--force")
    assert (tmp_path / "my.toml").read_text() == before
    assert run("init", "my.toml", "--name", "other", "--force").status == 0
    assert read(tmp_path / "my.toml").swarm.name == "other"
    (tmp_path / "folder").mkdir()
    run("init", "folder", "--force").assert_user_error("folder")
    assert entries(tmp_path) == {"my.toml", "folder"}


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("momentum = 0.7", "momentun = 0.7", ["outer.momentun", "unknown key"]),
        ("momentum = 0.7", 'momentum = "a lot"', ["outer.momentum"]),
        ("momentum = 0.7", "momentum = 1.5", ["outer.momentum"]),
        ("momentum = 0.7", "momentum = nan", ["outer.momentum"]),
        ("every_steps = 30", "every_steps = 30.5", ["pace.every_steps"]),
        ("every_steps = 30", "every_steps = 0", ["pace"]),
        ('codec = "int4"', 'codec = "zip"', ["zip"]),
        ("[outer]", "[inner]", ["inner"]),
        ("[outer]", "[outer", ["not valid TOML"]),
        ("fragments = 1", "fragments = 10000", ["fragments"]),
        ('mode = "open"', 'mode = "ajar"', ["admission.mode"]),
        ('preset = "tiny"', 'preset = "huge"', ["huge"]),
        ("seed = 0", "seed = 1", ["first parameters"]),
        ("digest = ", "digest = 'xyz' #", ["genesis.digest"]),
    ],
)
def test_a_manifest_that_cannot_be(run: Run, tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    assert run("init", "my.toml").status == 0
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
    one, two = read(tmp_path / "one.toml"), read(tmp_path / "two.toml")
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(one)
    run("bootstrap", "two.toml", "--dir", "d").assert_user_error(
        one.swarm_id.hex()[:12], two.swarm_id.hex()[:12]
    )
    run("node", "--dir", "d", "--swarm-id", two.swarm_id.hex()).assert_user_error(one.swarm_id.hex()[:12])
    assert entries(home.root) == {"manifest"}


def test_a_damaged_manifest_or_key_in_the_folder(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml").status == 0
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(read(tmp_path / "my.toml"))
    home.manifest_path.write_bytes(b"junk")
    run("node", "--dir", "d").assert_user_error("d/manifest", "damaged")
    home.key_path.write_bytes(b"short")
    home.key_path.chmod(0o600)
    run("id", "--dir", "d").assert_user_error("d/key", "damaged")
    home.key_path.chmod(0o644)
    run("id", "--dir", "d").assert_user_error("chmod 600")
