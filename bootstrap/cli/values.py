"""Values of commands' options: checked as they are read, and completed by the shell.

A check made here, and not later, can say where a wrong value comes from: flag, variable or node file. All
commands import this module, so it imports little.
"""

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import typer

from gossamer.node.address import check_node_name, check_swarm_id, parse_address, parse_contact, parse_node_id
from gossamer.node.inputs import expanded
from gossamer.protocol.errors import ConfigError, LocalError

ADMIN_OFF = "off"

# --- What `gossamer config check` finds: one line each, with what to do.


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check."""

    level: str
    """ok, warning (the node would run) or error (it would not)."""
    subject: str
    """What was checked: a key, a file, a device ..."""
    text: str


ok: Callable[[str, str], Finding] = partial(Finding, "ok")
warning: Callable[[str, str], Finding] = partial(Finding, "warning")
error: Callable[[str, str], Finding] = partial(Finding, "error")


def told(subject: str, look: Callable[[], str]) -> Iterator[Finding]:
    """Ok with what `look` returns, or an error with the message of the LocalError that it raises."""
    try:
        yield ok(subject, look())
    except LocalError as problem:
        yield error(subject, str(problem))


class OptionValues(TypedDict):
    """Arguments for `typer.Option` or `typer.Argument`."""

    callback: Callable[[Any], Any]
    autocompletion: Callable[[], list[str]]


def _checked(check: Callable[[str], object]) -> Callable[[Any], Any]:
    """A callback that checks each value; a failure becomes one line that names the option and the fault."""

    def callback(value: Any) -> Any:
        for text in value if isinstance(value, list | tuple) else [value]:
            try:
                if text is not None:
                    check(str(text))
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return callback


def one_of(names: Iterable[str]) -> OptionValues:
    """One of a few words."""
    known = list(names)

    def check(text: str) -> None:
        if text not in known:
            raise ConfigError(f"{text!r} is not one of {', '.join(known)}")

    return {"callback": _checked(check), "autocompletion": lambda: known}


def contacts() -> OptionValues:
    """HOST:PORT or gossamer://NODE_ID@HOST:PORT; completed with this machine's nodes."""
    return {"callback": _checked(parse_contact), "autocompletion": _own_addresses}


def address(*, port_min: int = 1) -> OptionValues:
    """HOST:PORT of this machine."""
    return {
        "callback": _checked(lambda text: parse_address(text, port_min=port_min)),
        "autocompletion": lambda: ["[::]:7700", "127.0.0.1:0"] if not port_min else [],
    }


def check_admin(text: str) -> None:
    """Raise ConfigError unless this is an admin address, "off" or empty."""
    if text not in ("", ADMIN_OFF):
        parse_address(text, port_min=0)


def admin_address() -> OptionValues:
    """HOST:PORT of the admin server, or "off"."""
    return {"callback": _checked(check_admin), "autocompletion": lambda: [ADMIN_OFF, "127.0.0.1:7780"]}


def node_ids() -> Callable[[Any], Any]:
    """Node ids."""
    return _checked(parse_node_id)


def swarm_id_start() -> Callable[[Any], Any]:
    """A swarm id, or its beginning."""
    return _checked(check_swarm_id)


def shown_name() -> Callable[[Any], Any]:
    """A node's name in displays."""
    return _checked(check_node_name)


def existing_path() -> Callable[[Any], Any]:
    """Existing files or folders; the shell completes them by itself."""

    def check(text: str) -> None:
        try:
            expanded(Path(text)).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{text}: no such file or folder") from None
        except OSError as error:
            raise ConfigError(f"{text}: {error.strerror}") from None

    return _checked(check)


def at_most(bound: int) -> Callable[[Any], Any]:
    """A number with an upper bound that is too long to show in the help."""

    def check(text: str) -> None:
        if int(text) > bound:
            raise ConfigError(f"{text} is more than {bound}")

    return _checked(check)


def node_folders() -> list[str]:
    """Folders of this machine's nodes."""
    from gossamer.node.home import nodes_root

    return sorted(str(path.parent) for path in nodes_root().glob("*/manifest"))


def admin_addresses() -> list[str]:
    """The admin addresses of this machine's nodes, now or when they last ran."""
    from gossamer.node.daemon.dashboard.client import admin_of  # slow to import

    return [found for folder in node_folders() if (found := admin_of(Path(folder)))]


def devices() -> list[str]:
    """Devices that may exist, found without torch."""
    gpus = range(len(glob.glob("/dev/nvidia[0-9]*")))
    return ["auto", "cpu", "cuda", "mps", *(f"cuda:{number}" for number in gpus)]


def _own_addresses() -> list[str]:
    from gossamer.node.home import Home

    facts = [Home(Path(folder)).read_daemon() or {} for folder in node_folders()]
    return [str(found["address"]) for found in facts if found.get("address")]
