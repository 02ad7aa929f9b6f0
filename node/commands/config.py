"""`gossamer config`: what a node would run with, and whether it would run."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.node.config import settings
from gossamer.node.config.command import App, Command, command_named, sections
from gossamer.node.dashboard.shown import UNBOUNDED

FAULTY = 1
"""Exit status of a check that found an error."""

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


class ConfigCommand(Command):
    """A command about node files, which does not take one itself."""

    takes_file = False


app = App(add_completion=False, help="Check or show a node's settings before it runs.")


@app.command(cls=ConfigCommand)
def check(
    ctx: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A node file, a manifest, or a node's folder. Default: the environment's settings.",
        ),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact the nodes to join.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report what would go wrong, without starting anything.

    For a node file it checks keys and values, the folder and its contents, free disk space, ports, the
    device, and whether the nodes to join answer, belong to the right swarm and agree on the time. For a
    manifest it reports values that are wrong, and values that are allowed but seldom intended. The exit
    status is 1 if there is an error.

        gossamer config check node.toml
        gossamer config check my.toml
        gossamer config check ~/.gossamer/0f2aa9b7d875 --offline
    """
    from gossamer.node.config.config_check import check as look_over

    found = []
    root: Any = ctx.find_root()
    for finding in look_over(root, path, offline):
        found.append(finding)
        if not as_json:
            _print(finding.level, finding.subject, finding.text)
    counts = Counter(finding.level for finding in found)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        typer.echo(f"errors: {counts['error']}, warnings: {counts['warning']}")
    raise typer.Exit(FAULTY if counts["error"] else 0)


@app.command(
    cls=ConfigCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
)
def show(
    ctx: typer.Context,
    command: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND",
            help="The command, followed by the flags that it would be given.",
            autocompletion=sections,
        ),
    ] = "node",
    as_json: AsJson = False,
) -> None:
    """Print the values a command would run with, and their sources.

    A source is a flag, an environment variable, the node file, or the default. Options of this command
    itself come before COMMAND, and flags of COMMAND after it.

        gossamer config show node --config node.toml --threads 2
        gossamer config show bootstrap my.toml
        gossamer config show --json node
    """
    target: Any = command_named(command, ctx)
    values = settings.settings_of(target.make_context(command, list(ctx.args), parent=ctx.find_root()))
    if as_json:
        typer.echo(json.dumps([asdict(setting) for setting in values], indent=2, default=str))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("setting", "value", "source"):
        table.add_column(heading, overflow="fold")  # a truncated address or path is of no use
    for setting in values:
        source = f"{setting.source} {setting.where}" if setting.where != "" else setting.source
        table.add_row(setting.key, Text(_in_words(setting.value)), Text(source))
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED
    console.print(table)


def _in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)


def _print(level: str, subject: str, text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)  # other nodes wrote some of it
    line = Text.assemble((f"{level:8}", _STYLES[level]), f"{subject:12}  {shown}")
    Console().print(line, soft_wrap=True)
