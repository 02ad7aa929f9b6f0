"""`gossamer node` and `gossamer id`: being a node."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from gossamer.bootstrap.cli.flags import a_folder, takes_options
from gossamer.node.options import NodeOptions

log = logging.getLogger("gossamer.node")


@takes_options()
def node(options: NodeOptions) -> None:
    """Join a swarm and train on this machine.

    It fetches the swarm's manifest and model from the given node and trains until you stop it. It survives
    the deaths of other nodes, partitions, and its own restarts, which resume from its folder. Ctrl-C stops it
    cleanly. Its log says where to watch it.

    Join, and resume later from the folder that this creates:

        gossamer node --join 192.168.1.5:7700
        gossamer node --dir ~/.gossamer/0f2aa9b7d875

    A long-lived node, with its own data and a port where others find it again:

        gossamer node --join my.host:7700 --listen 0.0.0.0:7701 --data texts

    In an invited swarm, with what gossamer invite printed, or a file that holds it:

        gossamer node --invite invitation.txt

    With all settings in a file, first only to see whether it could start:

        gossamer node --config node.toml --check
        gossamer node --config node.toml
    """
    from gossamer.node import logs
    from gossamer.node.join import enter
    from gossamer.node.trainer.data import check_trainable, remember_task
    from gossamer.protocol.access.acl import Role
    from gossamer.protocol.errors import ConfigError

    logs.configure(level=options.log_level, debug=options.debug, as_json=options.log_json)
    for path in options.data:
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file or folder")
    home, join = enter(options)
    kept = home.invitation()
    observe = options.observe
    if not observe and kept is not None and kept.grant.role is Role.OBSERVE:
        log.info("this node is invited to observe: it holds and serves a replica, and does not train")
        observe = True
    if options.task is not None:
        remember_task(home, options.task)
    if not observe:
        check_trainable(home)
    data = tuple(path.absolute() for path in options.data)
    run(options.model_copy(update={"folder": home.root, "join": join, "observe": observe, "data": data}))


def run(options: NodeOptions) -> None:
    """Run a node in its folder until it is told to stop, or see whether it can start. Raises typer.Exit."""
    from gossamer.node.processes import Supervisor, check

    if not options.check:
        raise typer.Exit(Supervisor(options).run())
    status = check(options)
    if not status:
        typer.echo(f"this node can start, in {options.root}")
    raise typer.Exit(status)


def show_id(
    folder: Annotated[
        Path | None, a_folder("A node's folder. Default: ~/.gossamer, whose key nodes without --dir use.")
    ] = None,
) -> None:
    """Print this machine's node id, for an owner to invite.

    It creates a key if there is none yet.

        gossamer id

    A bootstrap peer has its own key, in its folder:

        gossamer id --dir ~/.gossamer/0f2aa9b7d875-bootstrap
    """
    from gossamer.node.home import own_id

    typer.echo(own_id(folder))
