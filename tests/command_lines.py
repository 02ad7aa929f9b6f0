"""Reads a `gossamer` command line without running it, to see whether what documents and help name exists."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from gossamer.bootstrap.cli import main as cli
from gossamer.bootstrap.cli.config import Command

GOSSAMER: Any = typer.main.get_command(cli.app)


def find(words: list[str]) -> tuple[Any, list[str], Any]:
    """The command that the words after ``gossamer`` call, its arguments, and the context of the call."""
    found, ctx = GOSSAMER, typer.Context(GOSSAMER, info_name="gossamer")
    while isinstance(getattr(found, "commands", None), dict) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in found.commands, f"there is no command {name!r}"
        found = found.commands[name]
        if isinstance(found, Command):
            break
        ctx = typer.Context(found, info_name=name, parent=ctx)
    return found, words, ctx


def parse(line: str) -> None:
    """Have the called command parse its arguments, without running. Raises what the command would raise."""
    command, arguments, ctx = find(shlex.split(line, comments=True)[1:])
    command.make_context(command.name, arguments, parent=ctx)


def unknown_flags(line: str) -> set[str]:
    """Flags of a line that its command does not have. The line may lack required arguments."""
    command, arguments, _ = find(shlex.split(line, comments=True)[1:])
    if command.context_settings.get("ignore_unknown_options"):
        return set()  # the flags are another command's
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in arguments if word.startswith("--")} - known - {"--help"}
