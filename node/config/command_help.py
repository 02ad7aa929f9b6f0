"""The layout of commands' help: paragraphs fit any width, examples stay as they are."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperOption

from gossamer.node.config.settings import CONFIG, CONFIG_VARIABLE, flag_of, settable, variable_of

INDENT = "    "
_VALUES = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}


def unwrapped(text: str) -> str:
    """A docstring with each paragraph on one line, for the terminal to wrap; indented blocks are kept."""
    return "\n\n".join(
        _as_it_stands(paragraph) if paragraph.startswith(INDENT) else " ".join(paragraph.split("\n"))
        for paragraph in text.strip("\n").split("\n\n")
    )


def _as_it_stands(block: str) -> str:
    """An indented block in bold. (Typer would remove the indentation of the last one.)"""
    return "\n".join(f"[bold]{escape(line)}[/bold]" for line in block.split("\n"))


def examples(text: str) -> list[str]:
    """The command lines that a docstring shows."""
    lines = [line.strip() for line in text.split("\n") if line.startswith(INDENT)]
    return [line for line in lines if line.startswith("gossamer")]


def name_values(parameters: Iterable[Any]) -> None:
    """Give each option whose value has no name a short one."""
    for option in parameters:
        if (
            isinstance(option, TyperOption)
            and option.metavar is None
            and not option.type_descriptor.is_choice
        ):
            annotation: Any = option.type_descriptor.annotation
            if option.type_descriptor.is_list:
                annotation = annotation.__args__[0]
            option.metavar = _VALUES.get(annotation)


def foot(ctx: typer.Context) -> str:
    """The text below all options of a command: how else they can be given."""
    first = next((p for p in settable(ctx) if isinstance(p, TyperOption)), None)
    if first is None:
        return ""
    variable = variable_of(ctx, first)
    said = f"Every option can also be set by an environment variable ({flag_of(first)} by {variable})"
    if all(parameter.name != CONFIG for parameter in ctx.command.params):
        return f"{said}."
    section = ctx.command_path.partition(" ")[2]
    return (
        f"{said}, or under \\[{section}] in a node file (--{CONFIG} or {CONFIG_VARIABLE})."
        " Flags override variables, and variables override the file."
    )
