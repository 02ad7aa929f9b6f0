"""Where the value of a flag comes from: the flag, its environment variable, the node file, or the default.

Click looks in that order. This module gives every flag and argument its variable and its key, from the
command's own parameters, so that there is no second list of options.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer
from typer.core import TyperArgument, TyperOption

Parameter: TypeAlias = TyperOption | TyperArgument

CONFIG_VARIABLE = "GOSSAMER_CONFIG"
CONFIG = "config"
"""Name of the option that every command has: the node file."""

_FILE = "gossamer.node_file"
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective value of a command."""

    key: str
    value: Any
    source: str
    """flag, environment, file or default."""
    where: str
    """The flag, the variable or the file that it comes from; empty for a default."""


def flag_of(parameter: Parameter) -> str:
    """A parameter as written on the command line; an argument has its name in the help."""
    return max(parameter.opts, key=len) if isinstance(parameter, TyperOption) else key_of(parameter).upper()


def key_of(parameter: Parameter) -> str:
    """A parameter's key in a node file: the flag without its leading dashes, or the name of the argument."""
    if isinstance(parameter, TyperOption):
        return max(parameter.opts, key=len).lstrip("-")
    named = parameter.metavar or ""
    return named.lower() if named.isidentifier() else str(parameter.name)


def variable_of(ctx: typer.Context, parameter: Parameter) -> str:
    """A parameter's environment variable: GOSSAMER, the command and the flag."""
    return "_".join([*ctx.command_path.split(), key_of(parameter)]).replace("-", "_").upper()


def settable(ctx: typer.Context) -> Iterator[Parameter]:
    """The parameters that variables and files may set: all but the node file itself and --help."""
    for parameter in ctx.command.params:
        if isinstance(parameter, Parameter) and parameter.name != CONFIG:
            yield parameter


def name_variables(ctx: typer.Context) -> None:
    """Make click look into the environment. The help gives the rule for the names, and not every name."""
    for parameter in settable(ctx):
        parameter.envvar = variable_of(ctx, parameter)
        parameter.show_envvar = False


def use_file(ctx: typer.Context, path: Path, values: dict[str, Any]) -> None:
    """Make click take values that are given in no other way from a node file; `values` by parameter name."""
    ctx.default_map = values
    ctx.meta[_FILE] = path


def source_of(ctx: typer.Context, parameter: Parameter) -> tuple[str, str]:
    """The `source` and `where` of a value that has been looked up, see `Setting`."""
    found = ctx.get_parameter_source(str(parameter.name))
    source = _SOURCES.get(found.name if found else "", "default")
    where = {
        "flag": flag_of(parameter),
        "environment": variable_of(ctx, parameter),
        "file": str(ctx.meta.get(_FILE, "")),
    }
    return source, where.get(source, "")


def settings_of(ctx: typer.Context) -> tuple[Setting, ...]:
    """All values of a command that has been parsed."""
    return tuple(
        Setting(key_of(parameter), ctx.params.get(str(parameter.name)), *source_of(ctx, parameter))
        for parameter in settable(ctx)
    )
