"""`gossamer config check`: it says what would go wrong, and changes nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gossamer.bootstrap.cli import main as cli
from gossamer.node.home import Home
from tests.node.findings import invited_home, look


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return invited_home(tmp_path, monkeypatch)


def test_all_faults_of_a_file_are_told_at_once(home: Home, tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text(
        '[node]\ndir = "d"\njion = 1\nthreads = "4"\nrounds = -1\nlisten = "x"\nobserve = true\n'
    )
    said = look(tmp_path / "n.toml")
    faults = [text for level, text in said["node"] if level == "error"]
    assert len(faults) == 4
    for fault, part in zip(faults, ("join?", "a whole number", "listen in", "rounds in"), strict=True):
        assert part in fault and "n.toml" in fault
    assert "listen" not in said, "what is wrong is not looked at further"


def test_a_section_that_is_no_command_hides_no_other_fault(home: Home, tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text(
        "[nodes]\nrounds = 1\n[status]\njion = 1\n[stauts]\n[node]\nthreads = -1\n"
    )
    said = look(tmp_path / "n.toml")
    (_, first), (_, second) = said["config"]
    assert first == f"{tmp_path / 'n.toml'}: [nodes] is not a gossamer command; did you mean node?"
    assert "[stauts]" in second
    assert said["status"][0][0] == said["node"][0][0] == "error"


def test_a_file_that_is_none_is_a_fault_like_any_other(home: Home, tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text("[node\n")
    for name in ("n.toml", "nowhere.toml"):
        ((level, text),) = look(tmp_path / name)["config"]
        assert level == "error" and name in text


def test_paths_that_cannot_even_be_looked_at_are_faults_like_any_other(home: Home, tmp_path: Path) -> None:
    """As behind another user's folder, where a service runs as a user of its own; root sees it with names
    that are too long."""
    long = "x" * 300
    (tmp_path / "n.toml").write_text(f'[node]\ndir = "{long}/d"\ndata = ["{long}"]\njoin = ["a:1"]\n')
    said = look(tmp_path / "n.toml")
    assert said["node"][0][0] == "error" and said["node"][0][1].endswith("File name too long")
    ((level, text),) = said["dir"]
    assert level == "error" and text.startswith(f"cannot read {tmp_path / long / 'd'}: File name too long")
    assert said["disk"] and said["files"], "the rest was looked at too"
    ((level, text),) = look(tmp_path / long)["config"]
    assert level == "error" and text.startswith(f"cannot read {tmp_path / long}: File name too long")


def test_a_file_in_the_environment_may_be_in_the_home_folder(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell has seen the tilde where systemd, say, reads the environment from a file."""
    (tmp_path / "n.toml").write_text("[node]\nobserve = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GOSSAMER_CONFIG", "~/n.toml")
    assert look(None)["node"] == [("ok", "1 settings: observe")]


def test_a_members_copy_of_a_manifest_is_looked_over_as_one(home: Home) -> None:
    assert "manifest" in look(home.manifest_path)


def test_the_example_in_the_documents_is_one(home: Home, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text("utf-8")
    example = re.search(r"^    \[node\]\n(    .*\n|\n)+", text, re.MULTILINE)
    assert example is not None
    (tmp_path / "node.toml").write_text(textwrap.dedent(example[0]))
    (tmp_path / "texts").mkdir()
    said = look(tmp_path / "node.toml")
    assert said["node"] == [
        ("ok", "10 settings: join, dir, swarm-id, data, listen, name, device, threads, admin, log-json")
    ]
    assert [level for level, _ in said["bootstrap"]] == ["ok"]


def test_a_folder_brings_its_file(home: Home) -> None:
    (home.root / "node.toml").write_text("[node]\nobserve = true\nname = 'n'\n")
    said = look(home.root)
    assert "observe, dir, name" not in said["node"][0][1] and "observe, name" in said["node"][0][1]
    assert str(home.root) in said["dir"][0][1] and "device" not in said
    (home.root / "node.toml").write_text("[init]\npreset = 'small'\n[generate]\nlength = 5\n")
    said = look(home.root)
    assert said["init"] == [("ok", "1 settings: preset")] and said["generate"][0][1] == "1 settings: length"


def test_a_variable_that_sets_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_NODE_OBSERVE", "1")
    monkeypatch.setenv("GOSSAMER_NODE_LISTN", "127.0.0.1:1")
    said = look(None)
    assert said["environment"] == [
        ("warning", "GOSSAMER_NODE_LISTN sets nothing; did you mean GOSSAMER_NODE_LISTEN?")
    ]
    assert "bootstrap" not in said, "nothing says that there is to be one"
    assert said["join"][0][0] == "error" and "which swarm?" in said["join"][0][1]


def test_the_command(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["gossamer", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), capsys.readouterr().out

    (tmp_path / "n.toml").write_text('[node]\ndir = "d"\nobserve = true\n[status]\naddress = "a:1"\n')
    status, text = run("config", "check", "n.toml", "--offline")
    assert status == 1 and "error   join" in text and "errors: 1, warnings: 2" in text
    assert "ok      status" in text, "every section is looked at"
    status, text = run("config", "check", "n.toml", "--offline", "--json")
    assert status == 1 and '"level": "error"' in text
    status, text = run("config", "show", "node", "--config", "n.toml", "--name", "x")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["observe"] == ["yes", "file", "n.toml"] and rows["name"] == ["x", "flag", "--name"]
    assert rows["threads"] == ["0", "default"]


@pytest.mark.parametrize("columns", [None, 40, 80])
def test_what_is_in_force_is_shown_whole(
    home: Home, columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, however narrow, and in one line where programs read it."""
    if columns is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))
    address = f"gossamer://{'ab' * 32}@my.host.example.org:7700"
    monkeypatch.setattr("sys.argv", ["gossamer", "config", "show", "node", "--join", address])
    with pytest.raises(SystemExit):
        cli.main()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    of_join = lines[1 : next(number for number, line in enumerate(lines) if line.startswith("invite"))]
    if columns is None:
        assert of_join[0].split() == ["join", address, "flag", "--join"]
    else:
        assert max(map(len, lines)) <= columns
        start = lines[0].index("value")
        value = "".join(line[start : lines[0].index("source")].strip() for line in of_join)
        assert value == address


@pytest.mark.parametrize(("variable", "text"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_colours_are_for_those_who_want_them(home: Home, variable: str, text: str) -> None:
    """On a terminal, which a pseudo-terminal is."""
    (home.root / "node.toml").write_text("[init]\npreset = 'small'\n")
    ours, theirs = os.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run(
            [sys.executable, "-m", "gossamer.bootstrap.cli.main", "config", "check", str(home.root)],
            env={**env, "TERM": "xterm", variable: text},
            stdin=theirs,
            stdout=theirs,
            check=True,
            timeout=60,
        )
        os.close(theirs)
        shown = screen.read(4096)
    assert b"1 settings: preset" in shown
    assert (b"\x1b[3" in shown) is (text == "xterm")
