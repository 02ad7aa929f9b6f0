"""`gossamer node` and `gossamer id`: being a node."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.bootstrap.cli import values as option_values
from gossamer.bootstrap.cli.flags import (
    AdminAddress,
    Advertise,
    Data,
    Debug,
    Dir,
    Invite,
    Join,
    Listen,
    LogJson,
    LogLevel,
    Name,
    OwnTask,
    Plaintext,
)
from gossamer.node import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from gossamer.node.home import Home


log = logging.getLogger("gossamer.node")


def node(
    join: Join = None,
    invite: Invite = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="If no node to join answers, keep trying until one does."),
    ] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="Do not train: hold a replica and serve it to others.")
    ] = False,
    folder: Dir = None,
    swarm_id: Annotated[
        str | None,
        typer.Option(
            callback=option_values.swarm_id_start(),
            help="Refuse any swarm but this one (its id, or the beginning of it).",
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE_ID",
            callback=option_values.node_ids(),
            help="When joining, believe this node about the model, whatever others say. May be repeated.",
        ),
    ] = None,
    data: Data = None,
    task: OwnTask = None,
    listen: Listen = "[::]:0",
    advertise: Advertise = None,
    name: Name = "",
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Where to train: auto, cpu, cuda, cuda:1, mps ...",
            autocompletion=option_values.devices,
        ),
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, max=1024, help="CPU threads for training; 0 for all.")] = 0,
    rounds: Annotated[int, typer.Option(min=0, help="Stop training after this round; 0 for never.")] = 0,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Evaluate every N rounds; 0 for never.")] = 5,
    plaintext: Plaintext = False,
    admin: AdminAddress = "",
    debug: Debug = False,
    log_json: LogJson = False,
    log_level: LogLevel = logs.INFO,
) -> None:
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

    With all settings in a file, which gossamer config check can check first:

        gossamer node --config node.toml
    """
    from gossamer.node.inputs import checked_advertise, checked_join, checked_trust, given_invitation
    from gossamer.node.join import enter_invited, enter_swarm, once_somebody_is_there
    from gossamer.node.options import NodeOptions
    from gossamer.node.processes import Supervisor
    from gossamer.node.trainer.data import check_trainable, remember_task
    from gossamer.protocol.access.acl import Role

    logs.configure(level=log_level, debug=debug, as_json=log_json)
    addresses = checked_join(join)
    trusted = checked_trust(trust)
    invitation = given_invitation(invite)
    enter: Callable[[], Home]
    if invitation is not None:
        addresses = addresses or checked_join(list(invitation.contacts))
        enter = partial(enter_invited, invitation, addresses, folder, plaintext, swarm_id=swarm_id)
    else:
        enter = partial(enter_swarm, addresses, folder, swarm_id, plaintext)
    home = once_somebody_is_there(enter) if wait else enter()
    kept = home.invitation()
    if kept is not None and kept.grant.role is Role.OBSERVE:
        log.info("this node is invited to observe: it holds and serves a replica, and does not train")
        observe = True
    if task is not None:
        remember_task(home, task)
    if not observe:
        check_trainable(home)
    supervisor = Supervisor(
        NodeOptions.of(
            folder=home.root,
            listen=listen,
            advertise=checked_advertise(advertise),
            join=addresses,
            trust=trusted,
            name=name,
            observe=observe,
            plaintext=plaintext,
            admin=admin,
            debug=debug,
            log_json=log_json,
            log_level=log_level,
            data=tuple(path.absolute() for path in data or ()),
            threads=threads,
            device=device,
            stop_round=rounds,
            evaluate_every=evaluate_every,
        )
    )
    raise typer.Exit(supervisor.run())


def show_id(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A node's folder. Default: ~/.gossamer, whose key nodes without --dir use.",
            autocompletion=option_values.node_folders,
        ),
    ] = None,
) -> None:
    """Print this machine's node id, for an owner to invite.

    It creates a key if there is none yet. A bootstrap peer has its own key, in its folder.

        gossamer id
        gossamer id --dir ~/.gossamer/0f2aa9b7d875-bootstrap
    """
    from gossamer.node.home import own_id

    typer.echo(own_id(folder))
