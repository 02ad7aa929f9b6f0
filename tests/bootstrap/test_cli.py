"""The `gossamer` command: every mistake a person can make is one clear line, exit status 2, and no trace."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

from gossamer.bootstrap import cli, genesis_file, manifests
from gossamer.bootstrap.commands import flags
from gossamer.bootstrap.manifests import read
from gossamer.models.registry import build_task
from gossamer.models.task_file import parse_task_file
from gossamer.node import __version__
from gossamer.node.options import DaemonOptions
from gossamer.node.phi import genesis
from gossamer.node.renewal import keep_grant
from gossamer.node.storage import wholefile
from gossamer.node.storage.home import Home
from gossamer.protocol.admission import Charter, Revocation, Role
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import DiskFullError, NobodyThereError, NotAnsweredError, StorageError
from gossamer.protocol.identity import Identity
from gossamer.protocol.invitation import read_invitation
from gossamer.protocol.rules import RULES
from tests.models.own_tasks import write_task


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
        (["swarm", "--seed", 2**62 + 1], "--seed"),
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
        (["init", "m.toml", "--task", "chess.py:Chess"], "there is no file chess.py"),
        (["init", "m.toml", "--option", "batchsize=3"], "did you mean 'batch_size'"),
        (["swarm", "--task", "chess.py:Chess"], "there is no file chess.py"),
        (["swarm", "--option", "lr=fast"], "must be a number"),
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
        (["node", "--join", "127.0.0.1:1", "--trust", "abc"], "--trust': 'abc' is no node id"),
        (["node", "--join", "127.0.0.1:1", "--swarm-id", ""], "'' is no swarm id"),
        (["node", "--join", "127.0.0.1:1", "--swarm-id", "demo"], "'demo' is no swarm id"),
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
        (["generate", "--dir", ".", "--seed", 2**64], f"'--seed': {2**64} is more than"),
        (["export", "--dir", "missing", "out.safetensors"], "missing"),
        (["export", "--dir", ".", "out", "--dtype", "int8"], "bfloat16"),
        (["export", "--dir", "."], "OUT"),
        (["frobnicate"], "frobnicate"),
        (["init", ""], "the path is empty"),
        (["id", "--dir", ""], "the path is empty"),
        (["config", "check", ""], "the path is empty"),
        (["node", "--dir", ".", "--name", "bell\a"], "--name"),
        (["node", "--dir", ".", "--name", "\udcfc"], "--name"),
        (["bootstrap", "m.toml", "--name", "n" * 257], "at most 256 bytes"),
        (["swarm", "--data", ""], "the path is empty"),
        (["init", "m.toml", "--data", "missing.txt"], "missing.txt"),
        (["bootstrap", "/dev/zero"], "too large for a manifest"),
        (["node", "--invite", "missing"], "'missing': No such file or directory"),
        (["node", "--dir", __file__], "is a file, not a folder"),
        (["invite", "ab" * 32, "--manifest", "m.toml", "--owner-key", "."], "m.toml"),
    ],
)
def test_what_a_flag_cannot_be(run: Run, tmp_path: Path, args: list[object], part: str) -> None:
    run(*args).assert_user_error(part)
    assert entries(tmp_path) == set(), "nothing half-written"


def test_a_folder_that_is_gone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in ("id", "init", "swarm", "node"):
        run(command).assert_user_error("the folder that you are in is gone", "cd to one that exists")


def test_the_version(run: Run) -> None:
    assert run("--version").out == f"gossamer {__version__}\n"


def test_names_in_the_help_are_those_that_there_are() -> None:
    assert tuple(CODECS) == flags.CODEC_NAMES
    assert tuple(RULES) == flags.RULE_NAMES
    assert {name.upper() for name in flags.ROLE_NAMES} == {role.name for role in Role}


def test_a_bug_of_ours_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: object) -> str:
        raise RuntimeError("no\nidea")

    monkeypatch.setattr("gossamer.node.folders.own_id", broken)
    outcome = run("id")
    assert outcome.status == 1
    assert outcome.err.startswith("gossamer: a bug in gossamer: RuntimeError: no idea (test_cli.py:")
    assert outcome.err.count("\n") == 1


def test_a_full_disk_under_the_output_is_no_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gossamer.node.folders.own_id", full)
    run("id").assert_user_error("No space left on device")


def test_help_and_mistakes_come_without_numpy_and_aiohttp() -> None:
    code = "import sys, gossamer.bootstrap.cli; print({'numpy', 'aiohttp', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "set()\n"


def interrupted_at(module: str, *, ignored: bool = False) -> subprocess.CompletedProcess[bytes]:
    """`gossamer --version`, as it is installed, with a Ctrl-C at the moment when it imports a module."""
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
# As on a terminal: whoever runs the tests in the background of a shell has them ignore it.
signal.signal(signal.SIGINT, signal.SIG_IGN if {ignored} else signal.default_int_handler)
from gossamer.bootstrap.entry import main
main()
"""
    return subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, timeout=60, check=False
    )


def test_a_command_that_is_interrupted_while_it_is_read_in_says_nothing() -> None:
    done = interrupted_at("typer")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")  # a shell says 130


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    done = interrupted_at("typer", ignored=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_all_of_unicode_is_enough(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gossamer.bootstrap.cli", "init", "--help"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--preset" in done.stdout


def test_so_is_a_locale_without_any() -> None:
    """In which Python's own leniency is for names of files, and for nothing else."""
    say = "from gossamer.bootstrap import cli; cli._print_what_the_terminal_has(); print('\\u00e9 \\u2500')"
    for utf8, said in (("0", b"? ?\n"), ("1", "\u00e9 \u2500\n".encode())):
        done = subprocess.run(
            [sys.executable, "-X", f"utf8={utf8}", "-c", say],
            env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, said, b"")


def test_init_says_what_a_shell_understands(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my swarm.toml"
    assert f"gossamer bootstrap '{path}'" in run("init", path, "--preset", "tiny").out


def test_no_command_shows_help_and_nothing_else(run: Run) -> None:
    outcome = run()
    assert "swarm" in outcome.out + outcome.err
    assert "gossamer:  " not in outcome.err


def test_nobody_answers(run: Run, tmp_path: Path, free_port: int) -> None:
    run("node", "--join", f"127.0.0.1:{free_port}").assert_user_error(str(free_port), "refused")
    run("status", f"127.0.0.1:{free_port}").assert_user_error(str(free_port))
    run("verify", f"127.0.0.1:{free_port}", "127.0.0.1:1").assert_user_error("nobody useful answers")
    assert entries(tmp_path) == set()


def test_a_new_node_may_wait_for_the_one_that_it_joins_and_says_so_once(
    run: Run, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been started with it, by nobody who would start it again."""
    pauses = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.node.entering.time.sleep", sleep)
    assert run("node", "--wait", "--join", f"127.0.0.1:{free_port}").status == 130
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"nobody useful answers at 127.0.0.1:{free_port} (connection refused); is the node running?"
        " It is asked again every 5 s"
    ]


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
        ("momentum = 0.5", "momentun = 0.7", ["outer.momentun", "unknown key"]),
        ("momentum = 0.5", 'momentum = "a lot"', ["outer.momentum"]),
        ("momentum = 0.5", "momentum = 1.5", ["outer.momentum"]),
        ("momentum = 0.5", "momentum = nan", ["outer.momentum"]),
        ("every_steps = 30", "every_steps = 30.5", ["pace.every_steps"]),
        ("every_steps = 30", "every_steps = 0", ["pace"]),
        ('codec = "int4"', 'codec = "zip"', ["zip"]),
        ("[outer]", "[inner]", ["inner"]),
        ("[outer]", "[outer", ["not valid TOML"]),
        ("fragments = 4", "fragments = 10000", ["fragments"]),
        ('mode = "open"', 'mode = "ajar"', ["admission.mode"]),
        ('preset = "tiny"', 'preset = "huge"', ["huge"]),
        ("seed = 0", "seed = 1", ["first parameters", "--from", ".genesis.safetensors"]),
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
    run("node", "--dir", "d", "--trust", "somebody").assert_user_error("'somebody' is no node id")
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


# -- tasks of one's own, and existing weights


def test_init_with_a_task_of_ones_own(run: Run, task_folder: Path, tmp_path: Path) -> None:
    text = write_task(task_folder)
    outcome = run("init", "my.toml", "--task", text, "--option", "width=4", "--option", "lr=0.5")
    assert outcome.status == 0 and "my.genesis.safetensors" in outcome.out
    manifest = read(tmp_path / "my.toml")
    assert manifest.task.name == "own_line:Line"
    assert manifest.task.options == {"width": 4, "lr": 0.5, "bias": False, "note": "-"}
    assert manifest.task.source == parse_task_file(text).source()
    phi = genesis_file.read(manifest, tmp_path / "my.genesis.safetensors")
    assert phi.size == 4 * 8 + 4 + 4 + 1
    assert str(tmp_path) not in (tmp_path / "my.toml").read_text()

    # Going on from there, in a swarm of its own.
    outcome = run(
        "init",
        "on.toml",
        "--task",
        text,
        "--option",
        "width=4",
        "--from",
        "my.genesis.safetensors",
        "--seed",
        7,
    )
    assert outcome.status == 0
    assert read(tmp_path / "on.toml").genesis == manifest.genesis
    outcome = run("init", "on.toml", "--task", text, "--from", "my.genesis.safetensors", "--force")
    outcome.assert_user_error("tensor '0.weight' has shape [4, 8]; the model's has [8, 8]")


def test_init_with_existing_weights(run: Run, tmp_path: Path) -> None:
    assert run("init", "one.toml").status == 0
    model = build_task("text", {}).build_model(5)
    save_model(model, str(tmp_path / "w.safetensors"))
    run("init", "two.toml", "--from", "gone").assert_user_error("--from gone: there is no such file")
    with torch.no_grad():
        next(iter(model.parameters()))[0] = torch.nan
    save_model(model, str(tmp_path / "nan.safetensors"))
    run("init", "two.toml", "--from", "nan.safetensors").assert_user_error(
        "nan.safetensors: tensor 'model.embed_tokens.weight': a value is not finite"
    )
    model = build_task("text", {}).build_model(5)
    assert run("init", "two.toml", "--from", "w.safetensors").status == 0
    two = read(tmp_path / "two.toml")
    assert two.genesis != read(tmp_path / "one.toml").genesis
    phi = genesis_file.read(two, tmp_path / "two.genesis.safetensors")
    assert (phi == genesis.parameters(model, two.plan())).all()


def test_a_manifest_that_cannot_be_written_leaves_the_first_parameters_of_the_old_one(
    run: Run, task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong together."""
    text = write_task(task_folder)
    assert run("init", "my.toml", "--task", text).status == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("my.*")}

    def full(*_: object) -> None:
        raise StorageError("cannot write my.toml: No space left on device")

    monkeypatch.setattr(manifests, "write", full)
    run("init", "my.toml", "--task", text, "--seed", 7, "--force").assert_user_error("No space left")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("my.*")} == before
    assert not list(tmp_path.glob(".my*"))


@pytest.mark.parametrize("path", [".", "..", "/", "home"])
def test_init_wants_a_file(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "home").mkdir()
    run("init", path, "--invited", "--force").assert_user_error("is a folder; name a file")
    assert entries(tmp_path) == {"home"}


def test_no_manifest_takes_the_place_of_an_owners_key(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml", "--preset", "tiny", "--invited").status == 0
    key = (tmp_path / "my.owner").read_bytes()
    for more in ([], ["--invited"]):
        run("init", "my.owner", "--force", *more).assert_user_error("my.owner: *.owner are owners' keys")
    assert (tmp_path / "my.owner").read_bytes() == key


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


@pytest.mark.parametrize("place", ["folder", "child"])
def test_so_may_one_whose_disk_has_no_room_for_a_manifest_or_a_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def rebuild(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """What runs in a process of its own, in this one."""
        assert command[-2] == "gossamer.node.phi.genesis"
        with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
            patch.setattr("sys.argv", command[-2:])
            patch.setattr(wholefile, "open_aside", full)
            return subprocess.CompletedProcess(command, genesis.main(), "", said.getvalue())

    assert run("init", "my.toml", "--preset", "tiny").status == 0
    if place == "folder":
        monkeypatch.setattr(wholefile, "open_aside", full)
    else:
        monkeypatch.setattr("gossamer.bootstrap.genesis.subprocess.run", rebuild)
    outcome = run("bootstrap", "my.toml", "--dir", "d")
    assert outcome.status == 1
    where = tmp_path / "d" / ("manifest" if place == "folder" else "chunks")
    assert outcome.err == f"gossamer: cannot write {where}: the disk is full; free some space\n"


def test_what_init_writes_may_be_read_by_whom_the_umask_lets(
    run: Run, task_folder: Path, tmp_path: Path
) -> None:
    """A manifest is for everybody: another user runs the node, maybe. The owner's key is for one."""
    before = os.umask(0o022)
    try:
        assert run("init", "own.toml", "--task", write_task(task_folder), "--invited").status == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("own.*")}
    assert modes == {"own.toml": 0o644, "own.genesis.safetensors": 0o644, "own.owner": 0o600}


def test_of_two_inits_at_once_the_second_replaces_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = manifests.create

    def slowly(**options: Any) -> object:
        made = create(**options)
        (tmp_path / "my.toml").write_text("the other's")
        return made

    monkeypatch.setattr("gossamer.bootstrap.manifests.create", slowly)
    run("init", "my.toml", "--preset", "tiny").assert_user_error("my.toml exists", "--force")
    assert entries(tmp_path) == {"my.toml"} and (tmp_path / "my.toml").read_text() == "the other's"


def test_init_keeps_first_parameters_unless_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my.genesis.safetensors").write_text("precious")
    run("init", "my.toml").assert_user_error("my.genesis.safetensors exists", "--force")
    assert run("init", "my.toml", "--force").status == 0
    assert entries(tmp_path) == {"my.toml"}, "of a manifest that is no more"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--option", "width=many"], ["option 'width' of task 'own_line:Line' must be a whole number"]),
        (["--preset", "tiny"], ["has no option 'preset'; choose from bias, lr, note, width"]),
        (["--option", "width=65"], ["refuses its options: width is 64 at most"]),
        (["--option", "lr=1e300"], ["in the optimizer's step"]),
        (["--option", "note=\N{BELL}"], []),
    ],
)
def test_what_an_own_task_is_told(
    run: Run, task_folder: Path, tmp_path: Path, args: list[object], parts: list[str]
) -> None:
    text = write_task(task_folder)
    outcome = run("init", "my.toml", "--task", text, "--invited", *args)
    if not parts:
        assert outcome.status == 0
        assert read(tmp_path / "my.toml").task.options["note"] == "\N{BELL}"
        return
    outcome.assert_user_error(*parts)
    assert entries(tmp_path) == {"own_line.py"}, "nothing half-written"


def test_init_tries_an_own_task_out_where_there_is_data(run: Run, task_folder: Path, tmp_path: Path) -> None:
    text = write_task(
        task_folder, "numbers = stream.generator(stream.skip_batches)", "numbers = open(self.data[0])"
    )
    run("init", "my.toml", "--task", text).assert_user_error(
        "own_line.py:32, in batches: IndexError: tuple index out of range", "--data, or --no-trial"
    )
    run("init", "my.toml", "--task", text, "--data", "x").assert_user_error(
        "x: there is no such file or folder"
    )
    assert run("init", "my.toml", "--task", text, "--no-trial").status == 0


def test_an_own_task_may_go_to_another_folder(run: Run, task_folder: Path, tmp_path: Path) -> None:
    """As scripts do that look for their data beside them."""
    drawn = "numbers = stream.generator(stream.skip_batches)"
    text = write_task(task_folder, drawn, f"import os; os.chdir('/'); open(self.data[0]).close(); {drawn}")
    (tmp_path / "x").touch()
    assert run("init", "my.toml", "--task", text, "--data", "x").status == 0
    assert {"my.toml", "my.genesis.safetensors"} <= entries(tmp_path)


# -- letting people in

NODE_ID = "ab" * 32


def test_an_invited_swarm_from_init_to_invitation(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--invited")
    assert outcome.status == 0 and "my.owner" in outcome.out
    assert entries(tmp_path) == {"my.toml", "my.owner"}
    assert (tmp_path / "my.owner").stat().st_mode & 0o777 == 0o600
    manifest = read(tmp_path / "my.toml")
    owner = Identity.from_seed((tmp_path / "my.owner").read_bytes())
    assert f"as admission.owners names it:  {owner.public_key.hex()}\n" in outcome.out
    assert manifest.admission.mode == "invited" and manifest.admission.owners == (owner.public_key.hex(),)
    assert manifest.outer.weight_cap == 0
    node_id = run("id").out.strip()
    assert run("id").out.strip() == node_id, "always the same"
    contact = f"gossamer://{NODE_ID}@my.host:7700"
    outcome = run("invite", node_id, "--join", contact, "--days", 3, "--role", "observe")
    said = f"to observe in swarm 'my' ({manifest.swarm_id.hex()[:12]}) for 3 days; on that machine"
    assert outcome.status == 0 and outcome.err.startswith(said)
    found = read_invitation(outcome.out)
    assert found.swarm_id == manifest.swarm_id and found.contacts == (contact,)
    assert (found.grant.node_id.hex(), found.grant.role) == (node_id, Role.OBSERVE)


def test_one_owner_may_own_several_swarms(run: Run, tmp_path: Path) -> None:
    assert run("init", "one.toml", "--invited").status == 0
    assert run("init", "two.toml", "--invited", "--owner-key", "one.owner").status == 0
    assert run("init", "open.toml", "--owner-key", "one.owner").status == 0
    one, two, open_ = (read(tmp_path / f"{name}.toml").admission for name in ("one", "two", "open"))
    assert one.owners == two.owners == open_.owners
    assert (one.mode, two.mode, open_.mode) == ("invited", "invited", "open")
    assert run("invite", NODE_ID, "--manifest", "two.toml", "--owner-key", "one.owner").status == 0
    run("invite", NODE_ID, "--manifest", "two.toml").assert_user_error("two.owner")
    assert entries(tmp_path) == {"one.toml", "one.owner", "two.toml", "open.toml"}


def test_an_init_that_fails_leaves_no_key(run: Run, tmp_path: Path) -> None:
    run("init", "my.toml", "--invited", "--preset", "huge").assert_user_error("huge")
    assert entries(tmp_path) == set()
    (tmp_path / "my.owner").write_bytes(bytes(32))
    run("init", "my.toml", "--invited").assert_user_error("my.owner exists", "--owner-key")
    assert entries(tmp_path) == {"my.owner"}


def test_an_init_that_is_interrupted_leaves_no_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.bootstrap.manifests.create", interrupt)
    assert run("init", "my.toml", "--invited").status == 130
    assert entries(tmp_path) == set()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["invite", "xyz"], "64 hex digits"),
        (["invite", NODE_ID, "--role", "rule"], "'rule' is none of train, observe"),
        (["invite", NODE_ID, "--days", -1], "--days"),
        (["invite", NODE_ID, "--days", 99_999], "--days"),
        (["invite", NODE_ID, "--join", "nowhere"], "nowhere"),
        (["invite", NODE_ID, "--join", "gossamer://abc@host:1"], "64 hex digits"),
        (["invite", NODE_ID, "--owner-key", "no.owner"], "no.owner"),
        (["invite", NODE_ID, "--manifest", "no.toml"], "no.toml"),
        (["invite", NODE_ID, "--tell", "127.0.0.1:1"], "nobody useful answers"),
        (["revoke", NODE_ID], "--to"),
        (["revoke", "xyz", "--to", "127.0.0.1:1"], "64 hex digits"),
        (["revoke", NODE_ID, "--to", "127.0.0.1:1"], "nobody useful answers"),
        (["revoke", NODE_ID, "--to", "nowhere"], "nowhere"),
        (["node", "--invite", "gossamer-invitation:AAAA"], "damaged"),
        (["node", "--invite", "no-such-file"], "no-such-file"),
        (["node", "--invite", "my.toml"], "no invitation"),
    ],
)
def test_mistakes_of_owners_and_the_invited(run: Run, args: list[object], part: str) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    run(*args).assert_user_error(part)


@pytest.fixture
def told(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whoever was told of a credential, of nodes of which those at port 1 do not answer."""
    addresses: list[str] = []

    def check(address: str) -> None:
        if address.endswith(":1"):
            raise NobodyThereError(f"nobody useful answers at {address}")
        if address.endswith(":9"):
            raise NotAnsweredError(f"{address} refuses: node abab was revoked by an owner of this swarm")

    async def fetch_status(address: str, **_: object) -> dict[str, Any]:
        check(address)
        swarm_id = read(Path("my.toml")).swarm_id.hex()
        return {"swarm_id": swarm_id, "node_id": NODE_ID, "clock": 7, "sealed_round": 4, "closed_round": None}

    async def deliver(address: str, *_: object, **__: object) -> None:
        check(address)
        addresses.append(address)

    monkeypatch.setattr("gossamer.node.network.client.fetch_status", fetch_status)
    monkeypatch.setattr("gossamer.node.network.client.deliver", deliver)
    assert run("init", "my.toml", "--invited").status == 0
    return addresses


def test_who_does_not_answer_does_not_keep_an_owners_word_from_the_others(run: Run, told: list[str]) -> None:
    outcome = run("revoke", NODE_ID, "--to", "a:1", "--to", "b:2", "--to", "c:3")
    assert (outcome.status, told) == (0, ["b:2", "c:3"])
    assert outcome.err == "gossamer: nobody useful answers at a:1\n"
    assert "after round 7 are void" in outcome.out
    outcome = run("invite", NODE_ID, "--tell", "b:2", "--tell", "a:1", "--tell", "c:3")
    assert (outcome.status, told[2:]) == (0, ["b:2", "c:3"])
    assert outcome.err.startswith("gossamer: nobody useful answers at a:1\n")
    assert read_invitation(outcome.out)


def test_where_nobody_answers_an_owner_fails_and_the_invitation_is_there(run: Run, told: list[str]) -> None:
    for command, flag in (("revoke", "--to"), ("invite", "--tell")):
        outcome = run(command, NODE_ID, flag, "a:1", flag, "b:1")
        assert outcome.status == 2 and sorted(outcome.err.splitlines()) == [
            f"gossamer: nobody useful answers at {address}:1" for address in "ab"
        ]
    assert read_invitation(outcome.out) and not told


def test_an_owner_is_told_that_a_node_was_revoked(run: Run, told: list[str]) -> None:
    outcome = run("invite", NODE_ID, "--tell", "a:9")
    assert outcome.status == 2
    assert outcome.err == "gossamer: a:9 refuses: node abab was revoked by an owner of this swarm\n"


def test_an_owner_is_asked_which_swarm_is_meant(run: Run) -> None:
    run("invite", NODE_ID).assert_user_error("which swarm?", "--manifest")
    assert run("init", "one.toml", "--invited").status == 0
    assert run("init", "two.toml", "--invited", "--seed", 1).status == 0
    run("invite", NODE_ID).assert_user_error("which swarm?", "--manifest")
    run("invite", NODE_ID, "--manifest", "one.toml", "--owner-key", "two.owner").assert_user_error(
        "no owner's"
    )


def test_an_invitation_for_another_node_or_without_an_address(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    text = run("invite", NODE_ID).out
    (tmp_path / "letter").write_text(f"\n{text[:50]}\n{text[50:]}\n")
    for given in (text, "letter"):
        run("node", "--invite", given, "--dir", "d").assert_user_error(f"is for node {NODE_ID}")
    mine = run("invite", run("id", "--dir", "e").out.strip()).out
    run("node", "--invite", mine, "--dir", "e").assert_user_error("names no address", "--join")


def test_a_promoted_node_trains_though_it_is_started_with_its_first_invitation(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose node file holds that; and `config check` says no more that it has run out."""
    started: list[DaemonOptions] = []

    class Supervisor:
        def __init__(self, daemon: DaemonOptions, _: object) -> None:
            started.append(daemon)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("gossamer.node.supervisor.Supervisor", Supervisor)
    assert run("init", "my.toml", "--invited").status == 0
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(read(tmp_path / "my.toml"))
    to = run("id", "--dir", "d").out.strip(), "--join", "127.0.0.1:1"
    first, soon = (run("invite", *to, "--role", "observe", "--days", days).out for days in (30, 0.000001))
    (tmp_path / "node.toml").write_text(f'[node]\ndir = "d"\ninvite = "{first.strip()}"\n')
    assert run("node", "--config", "node.toml").status == 0
    promotion = read_invitation(run("invite", *to).out)
    keep_grant(home, promotion.swarm_id, promotion.grant)
    assert run("node", "--config", "node.toml").status == 0
    assert run("node", "--dir", "d", *to[1:]).status == 0
    assert run("node", "--dir", "d", *to[1:], "--observe").status == 0
    assert [options.trains for options in started] == [False, True, True, False]
    (tmp_path / "node.toml").write_text(f'[node]\ndir = "d"\ninvite = "{soon.strip()}"\n')
    checked = run("config", "check", "node.toml", "--offline").out
    assert "invited to train" in checked and "has run out" not in checked


STATUS = {"node_id": NODE_ID, "clock": 40, "sealed_round": 16, "closed_round": 0}


@pytest.mark.parametrize(
    ("changes", "args", "parts"),
    [
        ({}, ["--after-round", 15], ["rounds up to 16 are sealed", "at least 16"]),
        ({"closed_round": 32}, ["--after-round", 31], ["at least 32"]),
        ({"swarm_id": "cd" * 32}, [], ["belongs to swarm cdcdcdcdcdcd, not to this one"]),
        ({"clock": "soon"}, [], ["cannot be read"]),
        ({"clock": True}, [], ["cannot be read"]),
        ({"clock": 2**31}, [], ["cannot be read"]),
        ({}, ["--reason", "two\nlines"], ["--reason"]),
        ({}, ["--after-round", 2**31], ["--after-round", "2147483648 is more than 2147483647"]),
    ],
)
def test_a_revocation_that_cannot_be(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    args: list[object],
    parts: list[str],
) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    answer = {"swarm_id": read(tmp_path / "my.toml").swarm_id.hex(), **STATUS, **changes}
    delivered = _answering(monkeypatch, answer)
    run("revoke", NODE_ID, "--to", "host:1", *args).assert_user_error(*parts)
    assert delivered == []


@pytest.mark.parametrize(("args", "last_round"), [([], 40), (["--after-round", 16], 16)])
def test_a_revocation_is_handed_to_all_nodes_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], last_round: int
) -> None:
    assert run("init", "my.toml", "--invited").status == 0
    manifest = read(tmp_path / "my.toml")
    delivered = _answering(monkeypatch, {"swarm_id": manifest.swarm_id.hex(), **STATUS})
    outcome = run("revoke", NODE_ID, "--to", "a:1", "--to", "b:1", "--reason", "key stolen", *args)
    assert outcome.status == 0 and f"after round {last_round} are void" in outcome.out
    assert [address for address, _ in delivered] == ["a:1", "b:1"]
    charter = Charter(manifest.admission, manifest.swarm_id)
    found = charter.learn(delivered[0][1])
    assert isinstance(found, Revocation)
    assert (found.node_id.hex(), found.last_round, found.reason) == (NODE_ID, last_round, "key stolen")


def _answering(monkeypatch: pytest.MonkeyPatch, status: dict[str, object]) -> list[tuple[str, bytes]]:
    """Stands in for running nodes; returns what is handed to them."""
    delivered: list[tuple[str, bytes]] = []

    async def fetch_status(address: str, **_: object) -> dict[str, object]:
        return status

    async def deliver(address: str, credential: bytes, **_: object) -> None:
        delivered.append((address, credential))

    monkeypatch.setattr("gossamer.node.network.client.fetch_status", fetch_status)
    monkeypatch.setattr("gossamer.node.network.client.deliver", deliver)
    return delivered


@pytest.mark.parametrize(
    "part",
    [{"trainer": [1]}, {"members": [{"health": 5}]}, {"members": 5}, {"conduct": {}}, {"agreement": 10**400}],
)
@pytest.mark.parametrize("command", ["status", "peers"])
def test_an_answer_of_the_wrong_shape_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, part: dict[str, object], command: str
) -> None:
    whole = {"swarm": "s", "swarm_id": "ab", "node_id": "cd", "name": "", "state": "x\x1b", "round": 1}
    whole |= {"clock": 1, "records": 1, "members": [], "links": [], "agreement": None}

    async def fetch_status(*_: object, **__: object) -> dict[str, object]:
        return whole | {"conduct": {"verdict": None}} | part

    monkeypatch.setattr("gossamer.node.network.client.fetch_status", fetch_status)
    outcome = run(command, "127.0.0.1:1", "--insecure-plaintext")
    assert "a bug" not in outcome.err and "\x1b" not in outcome.out + outcome.err
    if (command, *part) not in {("status", "conduct"), ("status", "agreement")}:
        outcome.assert_user_error("gossamer: 127.0.0.1:1 ")


def test_no_mistake_commands_a_terminal(run: Run) -> None:
    run("init", "m.toml", "--from", "gone\x1b[2J").assert_user_error(
        "--from gone\N{REPLACEMENT CHARACTER}[2J"
    )
    assert "\x1b" not in run("swarm", "--\x1b[2J").err
