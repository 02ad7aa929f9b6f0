"""`gossamer node`, `gossamer bootstrap` and `gossamer id`: being a node, and a peer where others can join."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.bootstrap.cli.flags import a_folder, takes_options
from gossamer.node.address import WILDCARDS, format_address, parse_address
from gossamer.node.options import NodeOptions

if TYPE_CHECKING:
    from gossamer.node.home import Home
    from gossamer.protocol.manifest import Manifest

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


@takes_options(
    *("listen", "advertise", "join", "invite", "check", "folder", "name", "plaintext", "admin"),
    *("debug", "log_json", "log_level"),
    listen="[::]:7700",
    name="bootstrap",
)
def bootstrap(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="What gossamer init wrote.")],
    options: NodeOptions,
) -> None:
    """Run a bootstrap peer: a replica through which others can join.

    It does not train; it holds everything the swarm has and serves it to newcomers. A swarm's first one
    begins its history. Others can join through any further one too, and through any node. In an invited
    swarm it invites itself if the owner's key, my.owner, is beside my.toml.

    Start the first on a machine that others reach as my.host, then a second one elsewhere:

        gossamer bootstrap my.toml --advertise my.host:7700
        gossamer bootstrap my.toml --join my.host:7700
    """
    from gossamer.bootstrap.genesis import ensure_genesis
    from gossamer.node import logs
    from gossamer.node.home import Home, default_folder
    from gossamer.node.inputs import read_manifest

    logs.configure(level=options.log_level, debug=options.debug, as_json=options.log_json)
    swarm = read_manifest(manifest)
    home = Home((options.folder or default_folder(swarm.swarm_id, "-bootstrap")).absolute())
    home.create()
    is_new = home.manifest() is None
    home.adopt(swarm)
    if not options.join:
        try:
            ensure_genesis(home, swarm, manifest)
        except BaseException:  # also Ctrl-C
            if is_new:  # otherwise the folder would refuse the manifest once it has been corrected
                home.manifest_path.unlink(missing_ok=True)
            raise
    _let_in(home, swarm, manifest, options.invite)
    if not options.check:
        _say_how_to_join(home, swarm, (options.advertise or (options.listen,))[0])
    run(options.model_copy(update={"folder": home.root, "observe": True}))


def _let_in(home: "Home", manifest: "Manifest", path: Path, invite: str | None) -> None:
    """Keep an invitation, or make one if the owner's key is at hand. Raises ConfigError."""
    from gossamer.bootstrap import invites
    from gossamer.node.home import keep_better
    from gossamer.node.inputs import given_invitation
    from gossamer.protocol.access.acl import Role

    invitation = given_invitation(invite)
    if invitation is not None:
        keep_better(home, invitation)
        return
    key = path.with_suffix(invites.SUFFIX)
    if manifest.admission.mode == "open" or home.invitation() is not None or not key.exists():
        return  # without a key, the daemon will say what is missing
    owner = invites.owner_of(manifest, path, None)
    own_id = home.identity().node_id
    home.keep_invitation(
        invites.invite(owner, manifest.swarm_id, own_id, role=Role.OBSERVE, days=0, contacts=())
    )
    typer.echo(f"this bootstrap peer is invited to observe, by the owner's key {key}", err=True)


def _say_how_to_join(home: "Home", manifest: "Manifest", address: str) -> None:
    from gossamer.models.task_file import flag_for, is_own_name

    host, port = parse_address(address, port_min=0)
    where = format_address("THIS_MACHINE" if host in WILDCARDS else host, port) if port else "ADDRESS"
    contact = f"gossamer://{home.identity().node_id.hex()}@{where}"
    typer.echo(f"swarm {manifest.swarm_id.hex()}", err=True)
    if manifest.admission.mode == "invited":
        typer.echo(f"invite others with  gossamer invite NODE_ID --join {contact}", err=True)
    else:
        task = manifest.task.name
        flag = f" {flag_for(task)}" if is_own_name(task) else ""
        typer.echo(f"others join with  gossamer node --join {contact}{flag}", err=True)


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
