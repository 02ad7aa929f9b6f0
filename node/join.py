"""Becoming a node of a swarm: its folder, its manifest, its invitation.

This is what `gossamer node` and `Peer.attach` have in common before a daemon is started.
"""

import logging
import time
from contextlib import suppress
from pathlib import Path

from gossamer.node.address import Contact, check_is_swarm, is_swarm, parse_contact
from gossamer.node.daemon.network.address_book import whom_to_join
from gossamer.node.daemon.network.rpc import asker_of, fetch_manifest
from gossamer.node.daemon.phi.restore import has_model
from gossamer.node.home import Home, default_folder, keep_better, new_home, nodes_root, own_id
from gossamer.node.inputs import given_invitation
from gossamer.node.logs import RateLimit
from gossamer.node.options import NodeOptions
from gossamer.protocol.access.acl import Invitation
from gossamer.protocol.errors import ConfigError, NobodyThereError, NotAnsweredError, StorageError
from gossamer.protocol.manifest import Manifest

ASK_AGAIN_S = 5.0

log = logging.getLogger("gossamer.node")


def enter(options: NodeOptions, manifest: Manifest | None = None) -> tuple[Home, tuple[str, ...]]:
    """The folder of the swarm to take part in, made if needed, and the addresses of the nodes to join.

    Which swarm that is, the given `manifest` decides, or else the one in the folder, or else the nodes to
    join. If none of those answers and no folder was given, this machine's own node goes on, if it is clear
    which one is meant. With `options.wait`, waits until one answers: when machines start together, the one to
    join may be the last.

    Raises ConfigError, StorageError or UnreachableError.
    """
    invitation = given_invitation(options.invite)
    joins = options.join or (invitation.contacts if invitation else ())
    limit = RateLimit()
    while True:
        try:
            return _enter(options, joins, invitation, manifest), joins
        except NobodyThereError as error:
            if not options.wait:
                raise
            if limit.allows("nobody"):
                log.warning("%s Trying again every %.0f s", error, ASK_AGAIN_S)
        time.sleep(ASK_AGAIN_S)


def _enter(
    options: NodeOptions, joins: tuple[str, ...], invitation: Invitation | None, manifest: Manifest | None
) -> Home:
    folder = options.folder.absolute() if options.folder else None
    home = Home(folder) if folder else None
    if invitation is not None:
        check_is_swarm(invitation.swarm_id, options.swarm_id, "the invitation is for")
        home = new_home(folder, invitation.swarm_id)
    known = manifest or (home.manifest() if home else None)
    whose = f"{home.root} belongs to" if home and not manifest else "the manifest describes"
    if known is None:
        if invitation is not None and home is not None:
            home.keep_invitation(invitation)  # with which we ask
        found = _asked(options, joins, folder, invitation)
        if isinstance(found, Home):
            return found
        known = found
    check_is_swarm(known.swarm_id, options.swarm_id, whose)
    if invitation is not None:
        invited = invitation.swarm_id.hex()
        check_is_swarm(known.swarm_id, invited, f"the invitation is for another swarm: {whose}")
    home = new_home(folder, known.swarm_id)
    home.adopt(known)
    if invitation is not None:
        keep_better(home, invitation)
    if not (manifest or joins or home.read_peers() or has_model(home, known)):
        raise ConfigError(f"the node in {home.root} has no model yet; name another node with --join ADDRESS")
    return home


def _asked(
    options: NodeOptions, joins: tuple[str, ...], folder: Path | None, invitation: Invitation | None
) -> Manifest | Home:
    """The manifest that the nodes to join have; or this machine's own node, if it goes on without them."""
    if not joins:
        where = "the invitation names no address" if invitation else "which swarm?"
        raise ConfigError(
            f"{where}: name one of its nodes with --join ADDRESS, or a node's folder with --dir"
        )
    contacts = tuple(map(parse_contact, joins))
    asker = asker_of(new_home(folder, invitation.swarm_id)) if invitation else None
    swarm_id = invitation.swarm_id.hex() if invitation else options.swarm_id
    try:
        manifest = fetch_manifest(contacts, swarm_id, plaintext=options.plaintext, asker=asker)
    except NobodyThereError as error:
        own = _own_home(contacts, swarm_id) if folder is None else None
        if own is None:
            raise
        log.warning("%s Continuing with this machine's node in %s", error, own.root)
        return own
    except NotAnsweredError as error:
        if invitation is not None:
            raise
        raise ConfigError(
            f"{error}. To be let in, send the node id {own_id(folder)} to an owner of the swarm, and start"
            " with --invite and the invitation that comes back"
        ) from None
    if swarm_id is None and not all(contact.node_id for contact in contacts):
        log.info(
            "joining swarm %s (trusted on first use: pin it with --swarm-id, or the node with"
            " gossamer://NODE_ID@HOST:PORT)",
            manifest.swarm_id.hex(),
        )
    return manifest


def _own_home(contacts: tuple[Contact, ...], swarm_id: str | None) -> Home | None:
    """The node of this machine that must be meant and has a model to go on from; None if none or several do.

    That is a node of the swarm `swarm_id` or, if none is given, one that knows a node at the same addresses.
    """
    addresses = {contact.address for contact in contacts}
    meant = []
    for path in sorted(nodes_root().glob("*/manifest")):
        home = Home(path.parent.absolute())
        with suppress(StorageError):  # a damaged folder
            manifest = home.manifest()
            if manifest is None or home.root.name != default_folder(manifest.swarm_id).name:
                continue  # a bootstrap peer's, for example
            known = {contact.address for contact in whom_to_join((), home)}
            is_meant = is_swarm(manifest.swarm_id, swarm_id) if swarm_id else bool(addresses & known)
            if is_meant and has_model(home, manifest):
                meant.append(home)
    return meant[0] if len(meant) == 1 else None
