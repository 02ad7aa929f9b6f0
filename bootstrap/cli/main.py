"""The `gossamer` command: all its subcommands, and how errors are reported."""

import atexit
import codecs
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli import config_command as config
from gossamer.bootstrap.cli.bootstrap import BootstrapCommand, bootstrap
from gossamer.bootstrap.cli.config import App, Command
from gossamer.bootstrap.cli.init import init
from gossamer.bootstrap.cli.node import node, show_id
from gossamer.bootstrap.cli.owner import invite, revoke
from gossamer.bootstrap.cli.swarm import swarm
from gossamer.bootstrap.cli.use import export, generate
from gossamer.bootstrap.cli.watch import peers, status, top, verify
from gossamer.node import __version__
from gossamer.node import processes as exit_status
from gossamer.node.formatting import harmless
from gossamer.protocol.errors import ConfigError, DiskFullError, LocalError

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

CLASSES: dict[str, type[Command]] = {"bootstrap": BootstrapCommand}

app = App()
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, cls=CLASSES.get(name, Command), rich_help_panel=panel)(command)
app.add_typer(config.app, name="config", rich_help_panel="Configure")


def _tell_version(asked: bool) -> None:
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
            callback=_tell_version,
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
    try:
        Path.cwd()
    except FileNotFoundError:  # torch would fail on it without a helpful message
        raise ConfigError("the current folder no longer exists: cd to one that does") from None


def main() -> None:
    """Entry point. An error is one clear line; exit status 2 for what a person can fix, 1 for a bug of ours.

    A full disk also gives 1, as in a daemon, so that systemd, say, starts the command again.
    """
    _print_what_the_terminal_has()
    _forget_sizes_of_nothing()
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
        print(f"gossamer: {harmless(_in_words(error))}", file=sys.stderr)
        status = _status_of(error)
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(error: Exception) -> int:
    if isinstance(error, DiskFullError) or not isinstance(error, LocalError | OSError | MemoryError):
        return exit_status.FAILED
    return exit_status.USER_ERROR


def _print_what_the_terminal_has() -> None:
    """Print characters that the terminal's encoding lacks (frames in ISO 8859-1, say) as question marks.

    Otherwise they would raise an error. In the C locale, Python's standard output is lenient only about file
    names that are not text.
    """
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        has_all = codecs.lookup(stream.encoding).name == "utf-8"
        if stream.errors == "strict" or (stream.errors == "surrogateescape" and not has_all):
            stream.reconfigure(errors="replace")


def _forget_sizes_of_nothing() -> None:
    """Drop COLUMNS and LINES if they are 0: that means an unknown size, and nothing could be drawn on it."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0"):
            del os.environ[name]


def _in_words(error: Exception) -> str:
    """One line for an error, even an unforeseen one."""
    if isinstance(error, LocalError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    at = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    where = f"{Path(at.filename).name}:{at.lineno}"
    return f"a bug in gossamer: {said} ({where}); run it again with --debug and report it"


def _usage_error(error: typer.TyperException) -> str:
    """One line: what is wrong, what may have been meant, and where to find help."""
    known, ctx = getattr(error, "possibilities", None), getattr(error, "ctx", None)
    said = f"{error.args[0]}; did you mean {known[0]}?" if known else error.format_message()
    return f"{' '.join(said.split())} (see {ctx.command_path if ctx else 'gossamer'} --help)"


if __name__ == "__main__":
    main()


# --- The first code that the installed `gossamer` script calls.
#
# Python takes half a second to import the command. Ctrl-C in that time ends it as it ends any program,
# without
# a message: there is nothing to clean up yet.


def main_entry() -> None:
    """Import the command, and run it."""
    if sys.platform == "win32":
        sys.exit("Gossamer does not run on Windows: install it inside WSL 2")
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored with a shell's `&`
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    main_entry()
