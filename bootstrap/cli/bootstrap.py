"""`gossamer bootstrap`: a peer where others can join."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.bootstrap.cli.config import Command
from gossamer.bootstrap.cli.flags import (
    AdminAddress,
    Advertise,
    Debug,
    Dir,
    Invite,
    Join,
    Listen,
    LogJson,
    LogLevel,
    Name,
    Plaintext,
)
from gossamer.node import logs
from gossamer.node.address import WILDCARDS, format_address, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gossamer.bootstrap.cli.config_check import NodeCheck
    from gossamer.bootstrap.cli.values import Finding
    from gossamer.node.home import Home
    from gossamer.protocol.access.acl import Invitation
    from gossamer.protocol.manifest import Manifest


class BootstrapCommand(Command):
    """The command with its part of `gossamer config check`."""

    def findings(self, node: "NodeCheck") -> "Iterable[Finding]":
        """What a bootstrap peer needs besides the manifest."""
        from gossamer.bootstrap.cli.config_check import check_bootstrap

        path = node.params.get("path")
        if path is None or node.manifest is None or node.home is None:
            return ()  # reported already
        is_invited = node.invitation is not None
        joins = bool(node.params.get("join"))
        return check_bootstrap(node.home, node.manifest, path, joins=joins, is_invited=is_invited)


def bootstrap(
    path: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The manifest that gossamer init wrote.")],
    listen: Listen = "[::]:7700",
    advertise: Advertise = None,
    join: Join = None,
    invite: Invite = None,
    folder: Dir = None,
    name: Name = "bootstrap",
    plaintext: Plaintext = False,
    admin: AdminAddress = "",
    debug: Debug = False,
    log_json: LogJson = False,
    log_level: LogLevel = logs.INFO,
) -> None:
    """Run a bootstrap peer: a replica through which others can join.

    It does not train; it holds everything the swarm has and serves it to newcomers. A swarm's first one
    begins its history. Others can join through any further one too, and through any node. In an invited
    swarm it invites itself if the owner's key, my.owner, is beside my.toml.

    Start the first on a machine that others reach as my.host, then a second one elsewhere:

        gossamer bootstrap my.toml --advertise my.host:7700
        gossamer bootstrap my.toml --join my.host:7700
    """
    from gossamer.bootstrap import manifests
    from gossamer.bootstrap.genesis import ensure_genesis
    from gossamer.node.home import Home, default_folder
    from gossamer.node.inputs import checked_advertise, checked_join, given_invitation
    from gossamer.node.options import NodeOptions
    from gossamer.node.processes import Supervisor

    logs.configure(level=log_level, debug=debug, as_json=log_json)
    manifest = manifests.read(path)
    home = Home((folder or default_folder(manifest.swarm_id, "-bootstrap")).absolute())
    addresses = checked_join(join)
    home.create()
    is_new = home.manifest() is None
    home.adopt(manifest)
    if not addresses:
        try:
            ensure_genesis(home, manifest, path)
        except BaseException:  # also Ctrl-C
            if is_new:  # otherwise the folder would refuse the manifest once it has been corrected
                home.manifest_path.unlink(missing_ok=True)
            raise
    _let_in(home, manifest, path, given_invitation(invite))
    _tell_how_to_join(home, manifest, advertise or [listen])
    supervisor = Supervisor(
        NodeOptions.of(
            folder=home.root,
            listen=listen,
            advertise=checked_advertise(advertise),
            join=addresses,
            name=name,
            observe=True,
            plaintext=plaintext,
            admin=admin,
            debug=debug,
            log_json=log_json,
            log_level=log_level,
        )
    )
    raise typer.Exit(supervisor.run())


def _let_in(home: "Home", manifest: "Manifest", path: Path, invitation: "Invitation | None") -> None:
    """Keep an invitation, or make one if the owner's key is at hand. Raises ConfigError."""
    from gossamer.bootstrap import invites as owners
    from gossamer.node.home import keep_better
    from gossamer.protocol.access.acl import Role

    if invitation is not None:
        keep_better(home, invitation)
        return
    key = path.with_suffix(owners.SUFFIX)
    if manifest.admission.mode == "open" or home.invitation() is not None or not key.exists():
        return  # without a key, the daemon will say what is missing
    owner = owners.owner_of(manifest, path, None)
    own_id = home.identity().node_id
    home.keep_invitation(
        owners.invite(owner, manifest.swarm_id, own_id, role=Role.OBSERVE, days=0, contacts=())
    )
    typer.echo(f"this bootstrap peer is invited to observe, by the owner's key {key}", err=True)


def _tell_how_to_join(home: "Home", manifest: "Manifest", addresses: list[str]) -> None:
    from gossamer.models.task_file import flag_for, is_own_name

    host, port = parse_address(addresses[0], port_min=0)
    where = format_address("THIS_MACHINE" if host in WILDCARDS else host, port) if port else "ADDRESS"
    contact = f"gossamer://{home.identity().node_id.hex()}@{where}"
    typer.echo(f"swarm {manifest.swarm_id.hex()}", err=True)
    if manifest.admission.mode == "invited":
        typer.echo(f"invite others with  gossamer invite NODE_ID --join {contact}", err=True)
    else:
        task = manifest.task.name
        flag = f" {flag_for(task)}" if is_own_name(task) else ""
        typer.echo(f"others join with  gossamer node --join {contact}{flag}", err=True)
