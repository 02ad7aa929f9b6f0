"""`gossamer invite` and `gossamer revoke`: what an owner decides about nodes."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from gossamer.bootstrap import invites
from gossamer.bootstrap.cli.flags import ManifestPath, OwnerKey, Plaintext
from gossamer.node import processes as exit_status
from gossamer.node.address import parse_contact, parse_node_id
from gossamer.protocol.errors import ConfigError, UnreachableError
from gossamer.protocol.limits import ROUND_MAX

if TYPE_CHECKING:
    from gossamer.protocol.identity import Identity
    from gossamer.protocol.manifest import Manifest

T = TypeVar("T")


def invite(
    node_id: Annotated[str, typer.Argument(metavar="NODE_ID", help="The id that gossamer id prints there.")],
    days: Annotated[float, typer.Option(min=0, max=36_500, help="How long it is valid; 0 for ever.")] = 30,
    role: Annotated[
        Literal["train", "observe"],
        typer.Option(help="train, or observe: hold and serve a replica but publish nothing."),
    ] = "train",
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="A node that it can join, to be named in the invitation."),
    ] = None,
    tell: Annotated[
        list[str] | None,
        typer.Option(
            "--tell",
            metavar="ADDRESS",
            help="Also hand it to this running node, to renew an invitation before it expires.",
        ),
    ] = None,
    manifest_path: ManifestPath = None,
    owner_key: OwnerKey = None,
    plaintext: Plaintext = False,
) -> None:
    """Invite a node: print an invitation for it.

    Send the printed line there by mail or chat. It need not stay secret: only that node can use it. NODE_ID
    is what gossamer id prints there. Run this where the manifest and the owner's key are.

        gossamer invite NODE_ID --join my.host:7700
        gossamer invite NODE_ID --days 0 --role observe --join my.host:7700

    To renew an invitation while its node runs, hand the new one to any running node:

        gossamer invite NODE_ID --days 30 --tell my.host:7700
    """
    from gossamer.node.daemon.network.rpc import deliver
    from gossamer.protocol.access.acl import Role

    manifest, owner = _owned(manifest_path, owner_key)
    invitation = invites.invite(
        owner,
        manifest.swarm_id,
        parse_node_id(node_id),
        role=Role[role.upper()],
        days=days,
        contacts=tuple(str(parse_contact(text)) for text in join or ()),
    )
    typer.echo(invitation.to_text())
    _from_each(tell or (), lambda address: deliver(address, invitation.grant.data, plaintext=plaintext))
    until = f"for {days:g} days" if days else "for ever"
    swarm = f"{manifest.swarm.name!r} ({manifest.swarm_id.hex()[:12]})"
    what = f"an invitation to {role} in swarm {swarm} {until}"
    typer.echo(f"{what}; on that machine, run:  gossamer node --invite INVITATION", err=True)


def revoke(
    node_id: Annotated[str, typer.Argument(metavar="NODE_ID", help="The node to remove, for good.")],
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="ADDRESS",
            help="A running node, which tells the others.",
        ),
    ],
    after_round: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=ROUND_MAX,
            help="Void its deltas after this round. Default: the swarm's current round.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; shown in logs and to that node.")] = "",
    manifest_path: ManifestPath = None,
    owner_key: OwnerKey = None,
    plaintext: Plaintext = False,
) -> None:
    """Remove a node from the swarm, everywhere and for good.

    Its links are cut, and its deltas after the swarm's current round become void. Run this where the manifest
    and the owner's key are.

        gossamer revoke NODE_ID --to my.host:7700 --reason "key stolen"
    """
    from gossamer.node.daemon.network.rpc import Asker, deliver, fetch_status

    manifest, owner = _owned(manifest_path, owner_key)
    target = parse_node_id(node_id)
    asker = Asker(owner, manifest.swarm_id)

    async def rounds_of(address: str) -> tuple[int, int]:
        """A node's clock, and the newest round that it has sealed or closed."""
        status = await fetch_status(address, plaintext=plaintext, asker=asker)
        if status["swarm_id"] != manifest.swarm_id.hex():
            raise ConfigError(f"{address} belongs to swarm {str(status['swarm_id'])[:12]}, not to this one")
        rounds = [status.get(key) or 0 for key in ("clock", "sealed_round", "closed_round")]
        if not all(type(round_) is int and 0 <= round_ <= ROUND_MAX for round_ in rounds):
            raise UnreachableError(f"{address} sent a status that cannot be read")
        return rounds[0], max(rounds[1:])

    found = _from_each(to, rounds_of)
    clock, sealed = map(max, zip(*found.values(), strict=True))
    last_round = clock if after_round is None else after_round
    if last_round < sealed:
        raise ConfigError(
            f"rounds up to {sealed} are sealed: newcomers may have started from a snapshot of them, which"
            f" cannot be changed; --after-round must be at least {sealed}"
        )
    if last_round > clock:
        raise ConfigError(
            f"the swarm is at round {clock}: everything this key signs up to round {last_round} would still"
            " count; leave --after-round out, or give an earlier round"
        )
    record = invites.revoke(owner, manifest.swarm_id, target, last_round=last_round, reason=reason)
    _from_each(found, lambda address: deliver(address, record, plaintext=plaintext))
    typer.echo(f"revoked {target.hex()}: its deltas after round {last_round} are void")


def _from_each(addresses: Collection[str], ask: Callable[[str], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The answers of the nodes that answer; prints a line for each other. Raises typer.Exit if none do."""
    answers: dict[str, T] = {}
    for address in addresses:
        try:
            answers[address] = asyncio.run(ask(address))
        except UnreachableError as error:
            typer.echo(f"gossamer: {error}", err=True)
    if addresses and not answers:
        raise typer.Exit(exit_status.USER_ERROR)
    return answers


def _owned(manifest_path: Path | None, owner_key: Path | None) -> "tuple[Manifest, Identity]":
    """A manifest and its owner's key. Raises ConfigError."""
    from gossamer.node.inputs import read_manifest

    path = invites.find_manifest(manifest_path)
    manifest = read_manifest(path)
    return manifest, invites.owner_of(manifest, path, owner_key)
