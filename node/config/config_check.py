"""`gossamer config check`: finds what would go wrong with a node, or is odd, without starting it."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer

from gossamer.node.config import node_file, settings
from gossamer.node.config.check_manifest import check_manifest
from gossamer.node.config.check_node import NodeCheck
from gossamer.node.config.command import command_named, sections
from gossamer.node.config.findings import Finding, error, ok, warning
from gossamer.node.given import read_manifest
from gossamer.node.tilde import expanded
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import is_canonical

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
