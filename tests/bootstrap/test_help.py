"""The help: its examples are real commands, it fits a terminal, and mistakes are met with what was meant."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from gossamer.bootstrap.cli import main as cli
from gossamer.bootstrap.cli.main import PANELS
from tests.command_lines import GOSSAMER, parse

ALL: dict[str, Any] = {"gossamer": GOSSAMER, **{f"gossamer {n}": c for n, c in GOSSAMER.commands.items()}}


def examples(command: Any) -> list[str]:
    """The command lines that a docstring shows."""
    lines = (inspect.getdoc(command.callback) or "").split("\n")
    return [line.strip() for line in lines if line.startswith("    gossamer")]


def shown(path: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    """The help's lines on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    root = typer.Context(GOSSAMER, info_name="gossamer")
    name = path.partition(" ")[2]
    ALL[path].get_help(typer.Context(ALL[path], info_name=name, parent=root) if name else root)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("path", ALL)
def test_a_command_explains_itself_with_examples_that_are_commands(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.toml").touch()
    command = ALL[path]
    summary = (inspect.getdoc(command.callback) or "").split("\n\n")[0]
    assert "\n" not in summary and summary.endswith("."), summary
    assert 1 <= len(examples(command)) <= 7
    for line in examples(command):
        assert line.startswith(path) and len(line) <= 76, "it would break on a terminal of 80 columns"
        parse(line)
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{path} {parameter.name} has no help"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", ALL)
def test_the_help_fits_the_terminal(
    path: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(path, columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns
    for example in examples(ALL[path]):
        assert f"  {example}" in lines, "examples stay whole, on a line of their own"
    text = "\n".join(lines)
    for parameter in ALL[path].params:
        is_option = parameter.param_type_name == "option"
        assert (max(parameter.opts, key=len) if is_option else parameter.metavar) in text


def test_the_commands_are_in_the_order_of_their_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("gossamer", 80, monkeypatch, capsys)
    heads = [line.strip("╭─╮ ") for line in lines if line.startswith("╭─")]
    assert heads == ["Options", *PANELS]
    rows = [line.strip("│ ").split()[0] for line in lines if line.startswith("│ ")]
    assert [name for name in rows if name in GOSSAMER.commands] == [n for c in PANELS.values() for n in c]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["nod"], ["'nod'", "Did you mean 'node'?", "(see gossamer --help)"]),
        (["node", "--jion", "a:1"], ["--jion; did you mean --join?", "(see gossamer node --help)"]),
        (["status"], ["ADDRESS", "(see gossamer status --help)"]),
    ],
)
def test_a_mistake_is_met_with_what_was_meant(
    args: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gossamer", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    for part in parts:
        assert part in printed
