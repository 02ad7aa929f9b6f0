"""The `gossamer` command: all its subcommands, and how errors are reported."""

import atexit
import gc
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.init import init
from gossamer.bootstrap.cli.node import bootstrap, node, show_id
from gossamer.bootstrap.cli.owner import invite, revoke
from gossamer.bootstrap.cli.swarm import swarm
from gossamer.bootstrap.cli.use import export, generate
from gossamer.bootstrap.cli.watch import peers, status, top, verify
from gossamer.node import __version__
from gossamer.node import processes as exit_status
from gossamer.node.formatting import harmless
from gossamer.protocol.errors import DiskFullError, LocalError

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {
        "swarm": swarm,
        "init": init,
        "bootstrap": bootstrap,
        "id": show_id,
        "invite": invite,
        "revoke": revoke,
    },
    "Train": {"node": node},
    "Watch": {"top": top, "status": status, "peers": peers, "verify": verify},
    "Use": {"generate": generate, "export": export},
}
"""All commands as the help shows them, in the order in which a person needs them."""

OF_THE_ENVIRONMENT = ("node", "bootstrap")
"""Commands whose flags are also environment variables, since they run as services."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
for panel, commands in PANELS.items():
    for name, command in commands.items():
        prefix = {"auto_envvar_prefix": f"GOSSAMER_{name.upper()}"} if name in OF_THE_ENVIRONMENT else None
        app.command(name, rich_help_panel=panel, context_settings=prefix)(command)


def _show_version(asked: bool) -> None:
    if asked:
        from gossamer.protocol.access.handshake import PROTOCOL_VERSION

        typer.echo(f"gossamer {__version__}, wire protocol {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def _gossamer(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Show the version of this release and of its wire protocol.",
        ),
    ] = False,
) -> None:
    """Train one PyTorch model on many machines, with no server in the middle.

    Try it on this machine, with four nodes and real text:

        gossamer swarm

    To train for real, write the swarm's manifest and start a bootstrap peer, which the others join:

        gossamer init my.toml
        gossamer bootstrap my.toml

    On every machine that trains, join at that peer's address. Then watch the swarm and use the model:

        gossamer node --join 192.168.1.5:7700
        gossamer top
        gossamer generate --prompt "def "

    Nodes may join, leave and crash at any time. Every command has its own help: gossamer node --help.
    """


def main() -> None:
    """Entry point. An error is one clear line; exit status 2 for what a person can fix, 1 for a bug of ours.

    A full disk also gives 1, as in a daemon, so that systemd, say, starts the command again.
    """
    atexit.register(gc.freeze)  # with torch loaded, the last garbage collection takes up to a second
    try:
        status = app(standalone_mode=False, prog_name="gossamer")
    except typer.TyperException as error:
        if error.format_message():  # empty if no command was given, and help has been printed
            print(f"gossamer: {harmless(_usage_error(error))}", file=sys.stderr)
        status = exit_status.USER_ERROR
    except (typer.Abort, KeyboardInterrupt):
        status = exit_status.INTERRUPTED
    except Exception as error:
        if "--debug" in sys.argv or logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"gossamer: {harmless(_in_one_line(error))}", file=sys.stderr)
        is_ours = not isinstance(error, LocalError | OSError | MemoryError)
        failed = is_ours or isinstance(error, DiskFullError)
        status = exit_status.FAILED if failed else exit_status.USER_ERROR
    sys.exit(status if isinstance(status, int) else 0)


def _in_one_line(error: Exception) -> str:
    """What to say of an error, even an unforeseen one."""
    if isinstance(error, LocalError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    at = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{Path(at.filename).name}:{at.lineno}"
    return f"a bug in gossamer: {what} ({where}); run it again with --debug and report it"


def _usage_error(error: typer.TyperException) -> str:
    """One line: what is wrong, what may have been meant, and where to find help."""
    known, ctx = getattr(error, "possibilities", None), getattr(error, "ctx", None)
    what = f"{error.args[0]}; did you mean {known[0]}?" if known else error.format_message()
    return f"{' '.join(what.split())} (see {ctx.command_path if ctx else 'gossamer'} --help)"


if __name__ == "__main__":
    main()
