"""What all `gossamer` commands have in common: where their values come from, and their help."""

import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gossamer.node.config import command_help, node_file, settings
from gossamer.node.tilde import expanded
from gossamer.protocol.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.node.config.check_node import NodeCheck
    from gossamer.node.config.findings import Finding

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
        option.help = f"{_CONFIG_HELP} Default: {node_file.FILE_NAME} in --dir."
    return option


class Command(TyperCommand):
    """A command whose flags may also come from the environment or a node file.

    Click's contexts are typed `Any` in overridden methods, since their type's name is private in Typer.
    """

    takes_file = True
    """Whether it has the option --config."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = command_help.unwrapped(self.help or "")
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
        command_help.name_values(found)
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.epilog = command_help.foot(ctx)
        super().format_help(ctx, formatter)


class Commands(TyperGroup):
    """A group of commands."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = command_help.unwrapped(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with short names for their values in the help."""
        found = super().get_params(ctx)
        command_help.name_values(found)
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
        if node_file.kind_of(parameter) is Path and "" in _as_list(given.get(str(parameter.name))):
            raise typer.BadParameter("the path is empty", ctx=ctx, param=parameter)


def _put_home_for_tildes(ctx: typer.Context) -> None:
    """Expand tildes: a shell leaves the one in ``--dir=~/d`` alone, and so do readers of environment
    files."""
    for parameter in settings.settable(ctx):
        name = str(parameter.name)
        if node_file.kind_of(parameter) is Path and ctx.params.get(name):
            found = [expanded(path) for path in _as_list(ctx.params[name])]
            ctx.params[name] = found if isinstance(ctx.params[name], list) else found[0]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def find_file(ctx: typer.Context, given: dict[str, Any]) -> node_file.NodeFile | None:
    """The node file that --config names, or the one in the folder of --dir. Raises ConfigError.

    `given` holds the values on the command line, by parameter name.
    """
    named = given.get(settings.CONFIG) or os.environ.get(settings.CONFIG_VARIABLE)
    path = expanded(Path(named)) if named else None
    if path is None:
        folder = _given_folder(ctx, given)
        path = folder / node_file.FILE_NAME if folder is not None else None
        if path is None or not os.path.isfile(path):  # also if we may not look into the folder
            return None
    return node_file.read(path)


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
        raise ConfigError(f"gossamer has no command {name!r}{node_file.did_you_mean(name, sections(ctx))}")
    return found


def name_source(ctx: typer.Context, error: typer.BadParameter) -> None:
    """Make a message about a bad value say where the value comes from."""
    if isinstance(error.param, settings.Parameter):
        source, where = settings.source_of(ctx, error.param)
        if source == "environment":
            error.param_hint = where
        elif source == "file":
            error.param_hint = f"{settings.key_of(error.param)} in {where}"
