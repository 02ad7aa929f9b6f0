"""`gossamer config`: what a node would run with, and whether it would run."""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.bootstrap import settings
from gossamer.bootstrap.cli import config as node_file
from gossamer.bootstrap.cli.config import App, Command, command_named, sections
from gossamer.bootstrap.cli.config_check import NodeCheck, check_manifest
from gossamer.bootstrap.cli.values import Finding, error, ok, warning
from gossamer.node.formatting import UNBOUNDED
from gossamer.node.inputs import expanded, read_manifest
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import is_canonical

# --- `gossamer config check`: finds what would go wrong with a node, or is odd, without starting it.

RUNS_A_NODE = ("node", "bootstrap")
_MANIFEST_SECTIONS = frozenset({"genesis", "layout", "task"})


def check(root: typer.Context, path: Path | None, offline: bool) -> Iterator[Finding]:
    """Check a node file, a manifest, a node's folder, or the environment. Raises ConfigError.

    `root` is the context of the `gossamer` command, whose commands determine what a node file may hold.
    """
    if path is not None and os.path.isfile(path) and _is_manifest(path):
        try:
            yield from check_manifest(read_manifest(path))
        except ConfigError as problem:
            yield error("manifest", str(problem))
        return
    try:
        file = _node_file(path)
    except ConfigError as problem:
        yield error(settings.CONFIG, str(problem))
        return
    known = sections(root)
    for fault in file.section_faults(known) if file is not None else ():
        yield error(settings.CONFIG, fault)
    for name, args in _commands(path, file):
        if name in known:
            yield from _check_command(root, name, args, offline)


def _is_manifest(path: Path) -> bool:
    try:
        data = path.read_bytes()
        return is_canonical(data) or bool(_MANIFEST_SECTIONS & tomllib.loads(data.decode("utf-8-sig")).keys())
    except (OSError, ValueError, RecursionError):
        return False  # reading it as a node file will say what is wrong


def _node_file(path: Path | None) -> node_file.NodeFile | None:
    """The node file to check: the given one, that of a node's folder, or the environment's. Raises
    ConfigError."""
    if path is not None and os.path.isdir(path):
        path = path / node_file.FILE_NAME
        return node_file.read(path) if os.path.exists(path) else None
    given = path or os.environ.get(settings.CONFIG_VARIABLE)
    return node_file.read(expanded(Path(given))) if given else None


def _commands(path: Path | None, file: node_file.NodeFile | None) -> list[tuple[str, list[str]]]:
    """Names and arguments of the commands to check."""
    folder = ["--dir", str(path)] if path is not None and os.path.isdir(path) else []
    if file is not None:
        config = [f"--{settings.CONFIG}", str(file.path)]
        return [
            (name, [*config, *folder] if name in RUNS_A_NODE else config)
            for name in file.sections or RUNS_A_NODE[:1]
        ]
    if folder:
        return [("node", folder)]
    is_set = [name for name in RUNS_A_NODE if any(v.startswith(_prefix(name)) for v in os.environ)]
    return [(name, []) for name in is_set or ["node"]]


def _prefix(command: str) -> str:
    return f"GOSSAMER_{command.upper()}_"


def _check_command(root: typer.Context, name: str, args: list[str], offline: bool) -> Iterator[Finding]:
    command = command_named(name, root)
    ctx, faults = command.look_over(name, args, root)
    for fault in faults:
        yield error(name, fault)
    given = [setting for setting in settings.settings_of(ctx) if setting.source in ("environment", "file")]
    yield ok(name, f"{len(given)} settings: {', '.join(setting.key for setting in given) or 'all defaults'}")
    yield from _unknown_variables(ctx, name)
    if name in RUNS_A_NODE:
        wrong = frozenset(setting.key for setting in given if setting.value is None)
        node = NodeCheck(ctx.params, wrong, is_bootstrap=name == "bootstrap", offline=offline)
        yield from node.findings()
        yield from command.findings(node)


def _unknown_variables(ctx: typer.Context, name: str) -> Iterator[Finding]:
    known = [settings.variable_of(ctx, parameter) for parameter in settings.settable(ctx)]
    for variable in sorted(os.environ):
        if variable.startswith(_prefix(name)) and variable not in known:
            meant = node_file.did_you_mean(variable, known)
            yield warning("environment", f"{variable} sets nothing{meant}")


FAULTY = 1
"""Exit status of a check that found an error."""

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}

AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


class ConfigCommand(Command):
    """A command about node files, which does not take one itself."""

    takes_file = False


app = App(add_completion=False, help="Check or show a node's settings before it runs.")


@app.command(cls=ConfigCommand)
def check_config(
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

    found = []
    root: Any = ctx.find_root()
    for finding in check(root, path, offline):
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
