"""Becoming a node of a swarm: its folder, its manifest, its invitation.

This is what `gossamer node` and `Peer.attach` have in common before a daemon is started.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gossamer.node.address import Contact, check_is_swarm, is_swarm, parse_contact
from gossamer.node.daemon.network.address_book import whom_to_join
from gossamer.node.daemon.network.rpc import asker_of, fetch_manifest
from gossamer.node.daemon.phi.restore import has_model
from gossamer.node.home import Home, homes_here, keep_better, new_home, own_id
from gossamer.node.logs import RateLimit
from gossamer.protocol.access.acl import Invitation
from gossamer.protocol.errors import ConfigError, NobodyThereError, NotAnsweredError
from gossamer.protocol.manifest import Manifest

ASK_AGAIN_S = 5.0

log = logging.getLogger("gossamer.node")


def once_somebody_is_there(enter: Callable[[], Home]) -> Home:
    """Enter a swarm as soon as a node to join answers. Raises what `enter` does, except NobodyThereError.

    When machines start together, the one to join may be the last, and nobody may be there to try again.
    """
    limit = RateLimit()
    while True:
        try:
            return enter()
        except NobodyThereError as error:
            if limit.allows("nobody"):
                log.warning("%s Trying again every %.0f s", error, ASK_AGAIN_S)
        time.sleep(ASK_AGAIN_S)


def _tell_terminal(text: str) -> None:
    print(text, file=sys.stderr)


def enter_swarm(
    join: tuple[str, ...],
    folder: Path | None,
    swarm_id: str | None,
    plaintext: bool,
    tell: Callable[[str], object] = _tell_terminal,
) -> Home:
    """The folder of the swarm to take part in, made if needed. Raises ConfigError or UnreachableError.

    If `folder` has a manifest, that decides which swarm it is; otherwise the nodes to `join` do. If none of
    them answers and no folder was given, this machine's own node goes on, if it is clear which one is meant
    (see `_home_of`). `tell` is called with what a person should know.
    """
    known = Home(folder).manifest() if folder is not None else None
    if folder is not None and known is not None:
        check_is_swarm(known.swarm_id, swarm_id, f"{folder} belongs to")
        return _home_to_go_on_in(folder.absolute(), known, can_join=bool(join))
    if not join:
        raise _nothing_to_enter(folder)
    contacts = tuple(map(parse_contact, join))
    try:
        manifest = fetch_manifest(contacts, swarm_id, plaintext=plaintext)
    except NobodyThereError as error:
        own_home = _home_of(contacts, swarm_id) if folder is None else None
        if own_home is None:
            raise
        tell(f"{error} Continuing with this machine's node in {own_home.root}")
        return own_home
    except NotAnsweredError as error:
        own = own_id(folder)
        raise ConfigError(
            f"{error}. To be let in, send the node id {own} to an owner of the swarm, and start with"
            " --invite and the invitation that comes back"
        ) from None
    if swarm_id is None and not all(contact.node_id for contact in contacts):
        tell(
            f"joining swarm {manifest.swarm_id.hex()} (trusted on first use: pin it with --swarm-id, or the"
            " node with gossamer://NODE_ID@HOST:PORT)"
        )
    home = new_home(folder, manifest.swarm_id)
    home.adopt(manifest)
    return home


def _home_to_go_on_in(folder: Path, manifest: Manifest, *, can_join: bool) -> Home:
    """An existing node's folder. Raises ConfigError if it lacks the model and knows no node that has it."""
    home = Home(folder)
    if not can_join and not home.read_peers() and not has_model(home, manifest):
        raise ConfigError(f"the node in {home.root} has no model yet; name another node with --join ADDRESS")
    return home


def _nothing_to_enter(folder: Path | None) -> ConfigError:
    """The error when no node can be asked which swarm is meant, and no folder says it."""
    if folder is None:
        return ConfigError("which swarm? Name one of its nodes with --join ADDRESS, or a folder with --dir")
    lacks = "has no manifest" if folder.exists() else "is not there"
    return ConfigError(f"{folder} {lacks}: fetch the manifest with --join ADDRESS (or --invite)")


def _home_of(contacts: tuple[Contact, ...], swarm_id: str | None) -> Home | None:
    """The node of this machine that must be meant and has a model to go on from; None if none or several do.

    That is a node of the swarm `swarm_id` or, if none is given, one that knows a node at the same addresses.
    """
    told = {contact.address for contact in contacts}
    meant = []
    for home, manifest in homes_here():
        known = {contact.address for contact in whom_to_join((), home)}
        is_meant = is_swarm(manifest.swarm_id, swarm_id) if swarm_id else bool(told & known)
        if is_meant and has_model(home, manifest):
            meant.append(home)
    return meant[0] if len(meant) == 1 else None


def enter_invited(
    invitation: Invitation,
    join: tuple[str, ...],
    folder: Path | None,
    plaintext: bool,
    manifest: Manifest | None = None,
    swarm_id: str | None = None,
) -> Home:
    """The folder of the swarm that we were invited to; its `manifest` is fetched if not given.

    Raises ConfigError (also if that swarm's id does not begin with `swarm_id`) or UnreachableError.
    """
    check_is_swarm(invitation.swarm_id, swarm_id, "the invitation is for")
    if manifest is not None and manifest.swarm_id != invitation.swarm_id:
        raise ConfigError(
            f"the invitation is for swarm {invitation.swarm_id.hex()[:12]}, and the manifest describes swarm"
            f" {manifest.swarm_id.hex()[:12]}"
        )
    home = new_home(folder, invitation.swarm_id)
    known = home.manifest()
    if known is not None and known.swarm_id != invitation.swarm_id:
        raise ConfigError(f"{home.root} belongs to another swarm than the invitation; choose another --dir")
    keep_better(home, invitation)
    if known is None and manifest is not None:
        home.adopt(manifest)
    elif known is None:
        if not join:
            raise ConfigError("the invitation names no address; name one of a node with --join ADDRESS")
        contacts = tuple(map(parse_contact, join))
        asker = asker_of(home)
        home.adopt(fetch_manifest(contacts, invitation.swarm_id.hex(), plaintext=plaintext, asker=asker))
    return home
