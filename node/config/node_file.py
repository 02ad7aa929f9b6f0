"""The node file: flags of commands, written down as TOML.

::

    [node]
    join = ["192.168.1.5:7700"]
    listen = "[::]:7701"
    data = ["texts"]            # relative to this file

A section is a command, a key is one of its flags without the dashes. Which values are allowed follows from
the command's own parameters.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gossamer.node.config.settings import Parameter, key_of, settable
from gossamer.node.textfile import read_text
from gossamer.node.tilde import expanded
from gossamer.protocol.errors import ConfigError

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
            from gossamer.protocol.admission.invitation import PREFIX

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
