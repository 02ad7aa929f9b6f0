"""Reads a `gossamer` command line without running it, to see whether what documents and help name exists."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from gossamer.bootstrap.cli import main as cli

GOSSAMER: Any = typer.main.get_command(cli.app)


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words after ``gossamer`` call, and its arguments."""
    if not words or words[0].startswith("-"):
        return GOSSAMER, words
    assert words[0] in GOSSAMER.commands, f"there is no command {words[0]!r}"
    return GOSSAMER.commands[words[0]], words[1:]


def parse(line: str) -> Any:
    """Have the called command parse its arguments, without running. Raises what the command would raise."""
    command, arguments = find(shlex.split(line, comments=True)[1:])
    parent = typer.Context(GOSSAMER, info_name="gossamer")
    return command.make_context(command.name, arguments, parent=parent)


def unknown_flags(line: str) -> set[str]:
    """Flags of a line that its command does not have. The line may lack required arguments."""
    command, arguments = find(shlex.split(line, comments=True)[1:])
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in arguments if word.startswith("--")} - known - {"--help"}
