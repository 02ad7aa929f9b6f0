"""What all `gossamer` commands have in common: where their values come from, and their help."""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup, TyperOption

from gossamer.bootstrap import settings
from gossamer.bootstrap.settings import (
    CONFIG,
    CONFIG_VARIABLE,
    Parameter,
    flag_of,
    key_of,
    settable,
    variable_of,
)
from gossamer.node.inputs import expanded, read_text
from gossamer.protocol.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.bootstrap.cli.config_check import NodeCheck
    from gossamer.bootstrap.cli.values import Finding


# --- The node file: flags of commands, written down as TOML.
#
# ::
#
#     [node]
#     join = ["192.168.1.5:7700"]
#     listen = "[::]:7701"
#     data = ["texts"]            # relative to this file
#
# A section is a command, a key is one of its flags without the dashes. Which values are allowed follows from
# the command's own parameters.

FILE_NAME = "node.toml"
"""The name under which it is looked for in the folder that --dir names."""

BYTES_MAX = 1024 * 1024

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path in quotes",
}


@dataclass(frozen=True, slots=True)
class NodeFile:
    """What a node file says, by command."""

    path: Path
    sections: dict[str, dict[str, Any]]

    def values_for(self, ctx: typer.Context) -> dict[str, Any]:
        """Values of the command's section by parameter name. Raises ConfigError for the first fault."""
        for fault in self.faults_for(ctx):
            raise ConfigError(fault)
        return self.usable_for(ctx)

    def usable_for(self, ctx: typer.Context) -> dict[str, Any]:
        """Like `values_for`, with faulty keys left out."""
        parameters = {key_of(parameter): parameter for parameter in settable(ctx)}
        return {
            str(parameter.name): self._absolute(parameter, value)
            for key, value in self.sections.get(_section_of(ctx), {}).items()
            if (parameter := parameters.get(key)) is not None and _fits(value, parameter)
        }

    def faults_for(self, ctx: typer.Context) -> Iterator[str]:
        """What is wrong with the command's section, one line each."""
        section = _section_of(ctx)
        parameters = {key_of(parameter): parameter for parameter in settable(ctx)}
        for key, value in self.sections.get(section, {}).items():
            where = f"{self.path}: [{section}] {key}"
            parameter = parameters.get(key)
            if parameter is None:
                yield f"{where}: gossamer {section} has no such flag{did_you_mean(key, parameters)}"
            elif not _fits(value, parameter):
                yield f"{where} must be {_wanted(parameter)}"

    def check_sections(self, commands: Iterable[str]) -> None:
        """Raise ConfigError for the first section that is not a command."""
        for fault in self.section_faults(commands):
            raise ConfigError(fault)

    def section_faults(self, commands: Iterable[str]) -> Iterator[str]:
        """One line for each section that is not a command."""
        known = list(commands)
        for section in self.sections:
            if section not in known:
                yield f"{self.path}: [{section}] is not a gossamer command{did_you_mean(section, known)}"

    def _absolute(self, parameter: Parameter, value: Any) -> Any:
        """A value with its paths made absolute: paths in a node file are relative to it."""
        if isinstance(value, list):
            return [self._absolute(parameter, item) for item in value]
        is_path = kind_of(parameter) is Path
        if parameter.name == "invite":  # an invitation, or a file that holds one
            from gossamer.protocol.access.acl import PREFIX

            is_path = PREFIX not in value
        elif parameter.name == "task":  # FILE.py:CLASS, or a task that comes with Gossamer
            from gossamer.models.task_file import names_file

            is_path = names_file(value)
        return str(self.path.absolute().parent / expanded(Path(value))) if is_path else value


def read(path: Path) -> NodeFile:
    """Read a node file. Raises ConfigError."""
    try:
        found = tomllib.loads(read_text(path, BYTES_MAX, kind="node file", hint="TOML"))
    except (ValueError, RecursionError) as error:  # tomllib lets ValueErrors of int() through
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key, value in found.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path}: {key} is not in a section; put it under [node], or under the command it is for"
            )
    return NodeFile(path, found)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that does not exist."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _section_of(ctx: typer.Context) -> str:
    return ctx.command_path.partition(" ")[2]


def kind_of(parameter: Parameter) -> type:
    """The type of one value of a parameter: bool, int, float, str or Path."""
    annotation: Any = parameter.type_descriptor.annotation
    if parameter.type_descriptor.is_list:
        annotation = annotation.__args__[0]
    return annotation if annotation in _WORDS else str


def _fits(value: Any, parameter: Parameter) -> bool:
    kind = kind_of(parameter)
    accepted = {float: (int, float), Path: (str,)}.get(kind, (kind,))

    def fits(item: Any) -> bool:
        # An empty path would mean the file's own folder.
        return type(item) in accepted and not (kind is Path and item == "")

    if parameter.type_descriptor.is_list:
        return isinstance(value, list) and all(map(fits, value))
    return fits(value)


def _wanted(parameter: Parameter) -> str:
    words = _WORDS[kind_of(parameter)]
    return f'a list such as ["..."], each item {words}' if parameter.type_descriptor.is_list else words


# --- The layout of commands' help: paragraphs fit any width, examples stay as they are.

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


_CONFIG_HELP = "Node file with values for flags that are not given."

_ConfigFile = Annotated[
    Path | None,
    typer.Option(
        f"--{settings.CONFIG}",
        metavar="FILE",
        envvar=settings.CONFIG_VARIABLE,
        show_envvar=False,  # the end of the help names it
        expose_value=False,
        help=_CONFIG_HELP,
    ),
]


@cache
def _config_option(has_folder: bool) -> TyperOption:
    """The option --config, which every command has. Commands with a --dir also look for the file there."""
    holder = typer.Typer(add_completion=False)

    @holder.command()
    def _holder(config: _ConfigFile = None) -> None:
        pass

    option = typer.main.get_command(holder).params[0]
    assert isinstance(option, TyperOption)
    if has_folder:
        option.help = f"{_CONFIG_HELP} Default: {FILE_NAME} in --dir."
    return option


class Command(TyperCommand):
    """A command whose flags may also come from the environment or a node file.

    Click's contexts are typed `Any` in overridden methods, since their type's name is private in Typer.
    """

    takes_file = True
    """Whether it has the option --config."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = unwrapped(self.help or "")
        if self.takes_file:
            self.params.append(_config_option(any("--dir" in parameter.opts for parameter in self.params)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Determine every value. Raises ConfigError for a node file that cannot be used."""
        settings.name_variables(ctx)
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        _refuse_empty_paths(ctx, given)
        if self.takes_file:
            file = None if given.get("help") else find_file(ctx, given)
            if file is not None:
                file.check_sections(sections(ctx))
                settings.use_file(ctx, file.path, file.values_for(ctx))
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name_source(ctx, error)
            raise
        _put_home_for_tildes(ctx)
        return rest

    def look_over(self, name: str, args: list[str], parent: Any) -> tuple[typer.Context, list[str]]:
        """Determine every value, as `parse_args` does, and return a line for each one that is wrong. A wrong
        value becomes None.

        Raises ConfigError for a node file that cannot be read.
        """
        ctx: Any = self.make_context(name, list(args), parent=parent, resilient_parsing=True)
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        file = find_file(ctx, given)
        faults = [] if file is None else list(file.faults_for(ctx))
        if file is not None:
            settings.use_file(ctx, file.path, file.usable_for(ctx))
        ctx.resilient_parsing = False
        for parameter in settings.settable(ctx):
            try:
                parameter.handle_parse_result(ctx, given, [])
            except typer.BadParameter as error:
                ctx.params[str(parameter.name)] = None
                if settings.source_of(ctx, parameter)[0] != "default":  # else it may still be given
                    name_source(ctx, error)
                    faults.append(error.format_message())
        _put_home_for_tildes(ctx)
        return ctx, faults

    def findings(self, node: "NodeCheck") -> "Iterable[Finding]":
        """What `gossamer config check` says about this command alone, after what it says about any node."""
        return ()

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with short names for their values in the help."""
        found = super().get_params(ctx)
        name_values(found)
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.epilog = foot(ctx)
        super().format_help(ctx, formatter)


class Commands(TyperGroup):
    """A group of commands."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = unwrapped(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with short names for their values in the help."""
        found = super().get_params(ctx)
        name_values(found)
        return found


class App(typer.Typer):
    """A `typer.Typer` whose commands are `Command` and whose group is `Commands`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(
            cls=Commands,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode="rich",
            **attributes,
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **attributes: Any
    ) -> Callable[[Any], Any]:
        """As Typer's, but makes a `Command`."""
        return super().command(name, cls=cls, **attributes)


def _refuse_empty_paths(ctx: typer.Context, given: dict[str, Any]) -> None:
    """Refuse an empty path: it comes from an unset shell variable, and would mean the current folder."""
    for parameter in settings.settable(ctx):
        if kind_of(parameter) is Path and "" in _as_list(given.get(str(parameter.name))):
            raise typer.BadParameter("the path is empty", ctx=ctx, param=parameter)


def _put_home_for_tildes(ctx: typer.Context) -> None:
    """Expand tildes: a shell leaves the one in ``--dir=~/d`` alone, and so do readers of environment
    files."""
    for parameter in settings.settable(ctx):
        name = str(parameter.name)
        if kind_of(parameter) is Path and ctx.params.get(name):
            found = [expanded(path) for path in _as_list(ctx.params[name])]
            ctx.params[name] = found if isinstance(ctx.params[name], list) else found[0]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def find_file(ctx: typer.Context, given: dict[str, Any]) -> NodeFile | None:
    """The node file that --config names, or the one in the folder of --dir. Raises ConfigError.

    `given` holds the values on the command line, by parameter name.
    """
    named = given.get(settings.CONFIG) or os.environ.get(settings.CONFIG_VARIABLE)
    path = expanded(Path(named)) if named else None
    if path is None:
        folder = _given_folder(ctx, given)
        path = folder / FILE_NAME if folder is not None else None
        if path is None or not os.path.isfile(path):  # also if we may not look into the folder
            return None
    return read(path)


def _given_folder(ctx: typer.Context, given: dict[str, Any]) -> Path | None:
    for parameter in settings.settable(ctx):
        if settings.flag_of(parameter) == "--dir":
            folder = given.get(str(parameter.name)) or os.environ.get(settings.variable_of(ctx, parameter))
            return expanded(Path(folder)) if folder else None
    return None


def sections(ctx: typer.Context) -> list[str]:
    """The sections that a node file may have: all commands."""
    root: Any = ctx.find_root().command
    return [name for name, found in root.commands.items() if isinstance(found, Command)]


def command_named(name: str, ctx: typer.Context) -> Command:
    """The command of that name. Raises ConfigError if there is none."""
    root: Any = ctx.find_root().command
    found = root.commands.get(name)
    if not isinstance(found, Command):
        raise ConfigError(f"gossamer has no command {name!r}{did_you_mean(name, sections(ctx))}")
    return found


def name_source(ctx: typer.Context, error: typer.BadParameter) -> None:
    """Make a message about a bad value say where the value comes from."""
    if isinstance(error.param, settings.Parameter):
        source, where = settings.source_of(ctx, error.param)
        if source == "environment":
            error.param_hint = where
        elif source == "file":
            error.param_hint = f"{settings.key_of(error.param)} in {where}"
