"""Flags: those of a node, made from `NodeOptions`, and those that several other commands share.

`gossamer node` and `gossamer bootstrap` take a value from the flag, else from the environment
(``GOSSAMER_NODE_JOIN`` for ``--join``), else from the TOML file that ``--config`` names, whose keys are the
flags without dashes. Click looks in that order; `NodeOptions` checks the values, wherever they come from.
"""

import inspect
import os
import tomllib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.node.options import NodeOptions, flags
from gossamer.protocol.errors import ConfigError


def takes_options(*fields: str, **defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these fields of `NodeOptions` (of all, if none is named), and ``--config``.

    Its parameter `options` is filled with what was given. `defaults` replace those of the fields.
    """
    names: dict[str, str] = {}
    parameters: list[inspect.Parameter] = []
    for field, flag in flags().items():
        if fields and field not in fields:
            continue
        name = flag.name.replace("-", "_")
        names[name] = field
        default = defaults.get(field, NodeOptions.model_fields[field].default)
        metavar = "" if isinstance(default, bool) else flag.metavar
        option = typer.Option(f"--{flag.name}", help=flag.help, metavar=metavar, show_envvar=False)
        kind: Any = {bool: bool, tuple: list[str], int: str, str: str}.get(type(default), str | None)
        value = list(default) if isinstance(default, tuple) else default
        parameters.append(_parameter(name, Annotated[kind, option], value))
    parameters.append(_parameter("config", _Config, None))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            given = {field: values.pop(name) for name, field in names.items()}
            values.pop("config")
            command(options=NodeOptions.of(**given), **values)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
        everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *parameters)]
        run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in everything}
        return run

    return decorate


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Have click take values that are given in no other way from a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # tomllib lets ValueErrors of int() through
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    known = {str(p.name).replace("_", "-"): str(p.name) for p in ctx.command.params if p.name != "config"}
    for key in found:
        if key not in known:
            raise ConfigError(f"{path}: {ctx.command_path} has no flag --{key}")
    ctx.default_map = {known[key]: value for key, value in found.items()}
    return path


_Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        callback=_read_config,
        show_envvar=False,
        help="A TOML file with values for flags that are given neither here nor in the environment, where"
        " `GOSSAMER_NODE_JOIN` stands for `gossamer node --join`.",
    ),
]


# --- Of several other commands.


def a_path(text: str) -> Path:
    """Read a path: not an empty one, as from an unset variable; a shell leaves the tilde of ``--dir=~/d``."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(os.path.expanduser(text))


def a_folder(help_: str) -> Any:
    """The flag --dir."""
    return typer.Option("--dir", metavar="FOLDER", parser=a_path, help=help_)


Plaintext = Annotated[
    bool,
    typer.Option(
        "--insecure-plaintext", help="Do not use TLS. For tests on loopback; all nodes must do the same."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything, and show tracebacks.")]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="A running node: HOST:PORT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
Member = Annotated[
    Path | None, a_folder("Ask as the node in this folder: an invited swarm answers members only.")
]
Used = Annotated[
    Path | None,
    a_folder("A node's folder; the node may be running. Default: the only one on this machine."),
]
ManifestPath = Annotated[
    Path | None,
    typer.Option(
        "--manifest",
        help="The swarm's manifest: my.toml, or the file named manifest in any member's folder. Default: the"
        " only manifest in the current folder with an owner's key beside it.",
    ),
]
OwnerKey = Annotated[
    Path | None, typer.Option("--owner-key", help="The owner's key. Default: my.owner beside my.toml.")
]
TaskName = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="NAME|FILE.py:CLASS",
        help="The task to train: text, or a task of your own, whose file is executed.",
    ),
]
TaskSettings = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the task. May be repeated."),
]
Preset = Annotated[
    str | None, typer.Option(help="Size of the built-in GPT: tiny, small, medium or 124m. Default: tiny.")
]
Data = Annotated[
    list[Path] | None,
    typer.Option(exists=True, help="Files or folders to train on. Default: the task's own."),
]
Codec = Annotated[
    str, typer.Option(help="How deltas are compressed: exact, int8, int4, int2, topk ... (docs/protocol.md).")
]
EverySteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000,
        help="Inner steps per window, that is, between two deltas of a fragment. Default: the swarm sets its"
        " own pace (30 in `gossamer swarm`).",
    ),
]
FRAGMENTS = typer.Option(min=1, max=256, help="Number of parts the model is split into; they take turns.")
Seed = Annotated[
    int, typer.Option(min=0, max=2**62, help="Seed of the initial parameters and of the order of the data.")
]


def all_settings(settings: list[str] | None, preset: str | None) -> list[str]:
    """The values of --option, with that of --preset."""
    return [*(settings or ()), *([f"preset={preset}"] if preset is not None else ())]
