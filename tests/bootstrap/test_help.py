"""The help: its examples are real commands, it fits a terminal, and the shell completes what it names."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gossamer.bootstrap.cli import main as cli
from gossamer.bootstrap.cli.config import Command, examples
from gossamer.bootstrap.cli.main import PANELS
from gossamer.node.home import Home
from tests.command_lines import GOSSAMER, parse


def commands() -> Iterator[tuple[str, Any]]:
    """All commands with what is typed to call them, the groups too."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield path, command
        for name, found in getattr(command, "commands", {}).items():
            yield from walk(f"{path} {name}", found)

    return walk("gossamer", GOSSAMER)


ALL = dict(commands())
LEAVES = {path: command for path, command in ALL.items() if isinstance(command, Command)}
SHOWN = [
    (path, line) for path, command in ALL.items() for line in examples(inspect.getdoc(command.callback) or "")
]


def context(path: str) -> Any:
    """Of a command that has not been parsed."""
    ctx: Any = None
    for end in range(1, len(path.split()) + 1):
        words = path.split()[:end]
        ctx = typer.Context(ALL[" ".join(words)], info_name=words[-1], parent=ctx)
    return ctx


def shown(path: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    """The help's lines on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ALL[path].get_help(context(path))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("path", "line"), SHOWN, ids=[line for _, line in SHOWN])
def test_an_example_is_a_command(
    path: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an example names is there; then it is parsed by the command it calls, which is not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "node.toml").write_text("[node]\n")
    parse(line)
    assert len(line) <= 76, "it would break on a terminal of 80 columns"


@pytest.mark.parametrize("path", LEAVES)
def test_a_command_explains_itself(path: str) -> None:
    text = inspect.getdoc(LEAVES[path].callback) or ""
    summary = text.split("\n\n")[0].strip()
    assert len(summary) <= 62 and "\n" not in summary and summary.endswith("."), summary
    own = [line for where, line in SHOWN if where == path]
    assert 1 <= len(own) <= 6 and all(line.startswith(path) for line in own)
    for parameter in LEAVES[path].params:
        assert getattr(parameter, "help", None), f"{path} {parameter.name} has no help"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", ALL)
def test_the_help_fits_the_terminal(
    path: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(path, columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns
    for where, example in SHOWN:
        if where == path:
            assert f"     {example}" in lines, "examples stay whole, on a line of their own"
    text = "\n".join(lines)
    for parameter in ALL[path].params:
        is_option = parameter.param_type_name == "option"
        assert (max(parameter.opts, key=len) if is_option else parameter.metavar) in text
    assert "[bold]" not in text
    if path in LEAVES:
        assert path.replace(" ", "_").upper() + "_" in text, "the environment is spoken of"


def test_the_commands_are_in_the_order_of_their_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("gossamer", 80, monkeypatch, capsys)
    heads = [line.strip("╭─╮ ") for line in lines if line.startswith("╭─")]
    assert heads == ["Options", *PANELS, "Configure"]
    rows = {line.strip("│ ").split()[0]: line for line in lines if line.startswith("│ ")}
    names = [name for name in rows if name in GOSSAMER.commands]
    assert names[:3] == ["swarm", "init", "bootstrap"] and set(names) == set(GOSSAMER.commands)
    for name in names:
        summary = (ALL[f"gossamer {name}"].help or "").split("\n")[0]
        assert summary in rows[name], "one line each"


# -- mistakes


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["nod"], ["'nod'", "Did you mean 'node'?", "(see gossamer --help)"]),
        (["node", "--jion", "a:1"], ["--jion; did you mean --join?", "(see gossamer node --help)"]),
        (["config", "chek"], ["Did you mean 'check'?", "(see gossamer config --help)"]),
        (["config", "show", "nod"], ["did you mean node?"]),
        (["status"], ["ADDRESS", "(see gossamer status --help)"]),
    ],
)
def test_what_was_meant(
    args: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gossamer", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in parts:
        assert part in said


# -- completion


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """What a shell is offered for a line, as it asks for it."""
    home = Home(tmp_path / "home" / "0f2a")
    home.create()
    home.manifest_path.touch()
    home.write_daemon(address="127.0.0.1:7701", admin="127.0.0.1:7781")
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))

    def ask(line: str) -> set[str]:
        monkeypatch.setenv("_GOSSAMER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        monkeypatch.setattr("sys.argv", ["gossamer"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
        return set(capsys.readouterr().out.split())

    return ask


def test_a_shell_completes_commands_flags_and_values(complete: Any, tmp_path: Path) -> None:
    assert complete("gossamer no") == {"node"}
    assert complete("gossamer config ") == {"check", "show"}
    assert {"--join", "--log-level", "--config"} <= complete("gossamer node --")
    assert complete("gossamer init m --codec int") == {"int8", "int4", "int2"}
    assert complete("gossamer init m --averaging ") == {"rda", "mean", "centered-clip"}
    assert complete("gossamer swarm --preset s") == {"small"}
    assert complete("gossamer init m --task ") >= {"text"}
    assert complete("gossamer invite x --role ") == {"train", "observe"}
    assert complete("gossamer node --device c") >= {"cpu", "cuda"}
    assert complete("gossamer node --log-level d") == {"debug"}
    assert complete("gossamer generate --dir ") == {str(tmp_path / "home" / "0f2a")}
    assert complete("gossamer status ") == {"127.0.0.1:7701"}
    assert complete("gossamer top ") == {"127.0.0.1:7781"}
    assert complete("gossamer config show boo") == {"bootstrap"}
    assert complete("gossamer node --data ") == set(), "paths are left to the shell"


def test_a_broken_node_file_is_no_hindrance(complete: Any, tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text("junk")
    assert complete(f"gossamer node --config {tmp_path}/n.toml --observ") == {"--observe"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_itself(tmp_path: Path) -> None:
    command = tmp_path / "gossamer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gossamer.bootstrap.cli.main "$@"\n')
    command.chmod(0o755)
    script = f"""
        eval "$(_GOSSAMER_COMPLETE=source_bash {command})"
        COMP_WORDS=(gossamer init m --codec t) COMP_CWORD=4
        _gossamer_completion {command}
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("topk\n", "")


@pytest.mark.parametrize("path", [path for path, command in LEAVES.items() if command.takes_file])
def test_a_node_file_in_a_folder_is_spoken_of_where_a_folder_can_be_given(path: str) -> None:
    options = {option: found for found in LEAVES[path].params for option in found.opts}
    assert ("in --dir" in options["--config"].help) == ("--dir" in options)
