"""Becoming a node of a swarm: its folder, its manifest, its invitation.

What `gossamer node` and `Peer.attach` have in common before a daemon is started.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gossamer.node.address import parse_address, parse_contact, parse_node_id
from gossamer.node.network.askers import asker_of, nodes_root
from gossamer.node.network.client import fetch_manifest
from gossamer.node.phi.restore import has_model
from gossamer.node.storage.home import Home
from gossamer.node.tilde import expanded
from gossamer.protocol.errors import ConfigError, NobodyThereError, NotAnsweredError
from gossamer.protocol.invitation import INVITATION_BYTES_MAX, PREFIX, Invitation, read_invitation
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, MANIFEST_BYTES_MAX
from gossamer.protocol.manifest import Manifest, from_toml

ASK_AGAIN_S = 5.0
TELL_AGAIN_S = 300.0

log = logging.getLogger("gossamer.node")


def default_folder(swarm_id: bytes, suffix: str = "") -> Path:
    """Where a node of a swarm lives unless told otherwise."""
    return nodes_root() / (swarm_id.hex()[:12] + suffix)


def checked_join(join: Iterable[str] | None) -> tuple[str, ...]:
    """Join addresses. Raises ConfigError for one that is none."""
    return tuple(str(parse_contact(text)) for text in join or ())


def checked_trust(trust: Iterable[str] | None) -> tuple[str, ...]:
    """Node ids in hex, as options hold them. Raises ConfigError for one that is none."""
    return tuple(parse_node_id(text).hex() for text in trust or ())


def checked_advertise(advertise: Sequence[str] | None) -> tuple[str, ...]:
    """Addresses to be dialled at. Raises ConfigError for one that is none, and for more than others take."""
    addresses = tuple(text.strip() for text in advertise or ())
    for address in addresses:
        parse_address(address)
    if len(addresses) > ADDRESSES_PER_PEER_MAX:
        raise ConfigError(
            f"others take {ADDRESSES_PER_PEER_MAX} addresses of a node, and not {len(addresses)}"
        )
    return addresses


def given_invitation(text: str | None) -> Invitation | None:
    """An invitation given as its text, or as a file that holds it. Raises ConfigError."""
    if text is None:
        return None
    if PREFIX not in text:
        try:
            with open(expanded(Path(text)), encoding="utf-8-sig") as file:
                text = file.read(INVITATION_BYTES_MAX)
        except UnicodeDecodeError:
            raise ConfigError(f"{text} is not text; an invitation is, as gossamer invite prints it") from None
        except (OSError, ValueError) as error:  # the latter where there is a null in it
            raise ConfigError(
                f"--invite takes an invitation or a file with one; {text!r:.60}: "
                + (error.strerror if isinstance(error, OSError) and error.strerror else str(error))
            ) from None
    return read_invitation(text)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest that a person has written or edited. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise ConfigError(f"{path} is too large for a manifest")
        return from_toml(data.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; a manifest is TOML, as gossamer init writes it") from None


def once_somebody_is_there(enter: Callable[[], Home]) -> Home:
    """Enter a swarm as soon as a node to join answers. Raises what `enter` does, but for NobodyThereError.

    Of machines that start together, the one to join may be the last; nobody is there to start a node again.
    """
    tell_at = 0.0
    while True:
        try:
            return enter()
        except NobodyThereError as error:
            if time.monotonic() >= tell_at:
                log.warning("%s It is asked again every %.0f s", error, ASK_AGAIN_S)
                tell_at = time.monotonic() + TELL_AGAIN_S
        time.sleep(ASK_AGAIN_S)


def enter_swarm(join: tuple[str, ...], folder: Path | None, swarm_id: str | None, plaintext: bool) -> Home:
    """The folder of the swarm to take part in, made if need be. Raises ConfigError or UnreachableError."""
    known = Home(folder).manifest() if folder is not None else None
    if known is not None:
        if swarm_id is not None and not known.swarm_id.hex().startswith(swarm_id.lower()):
            raise ConfigError(f"{folder} belongs to swarm {known.swarm_id.hex()[:12]}, not {swarm_id}")
        home = Home((folder or Path()).absolute())
        if not join and not home.read_peers() and not has_model(home, known):
            raise ConfigError(f"the node in {home.root} never got the model; give a node with --join ADDRESS")
        return home
    if not join:
        raise ConfigError("which swarm? Give a node of it with --join ADDRESS, or a folder with --dir")
    contacts = tuple(map(parse_contact, join))
    try:
        manifest = fetch_manifest(contacts, swarm_id, plaintext=plaintext)
    except NotAnsweredError as error:
        own = own_id(folder)
        raise ConfigError(
            f"{error}. If it should let this machine in, send an owner of the swarm the node id {own},"
            " and start with --invite and the invitation that comes back"
        ) from None
    if swarm_id is None and not all(contact.node_id for contact in contacts):
        print(
            f"joining swarm {manifest.swarm_id.hex()} (trusted on first use: pin it with --swarm-id, or the"
            " node with gossamer://NODE_ID@HOST:PORT)",
            file=sys.stderr,
        )
    home = new_home(folder, manifest.swarm_id)
    home.adopt(manifest)
    return home


def enter_invited(
    invitation: Invitation,
    join: tuple[str, ...],
    folder: Path | None,
    plaintext: bool,
    manifest: Manifest | None = None,
    swarm_id: str | None = None,
) -> Home:
    """The folder of the swarm that we were invited to; without its `manifest` we fetch that.

    Raises ConfigError, also if that swarm's id does not begin with `swarm_id`, or UnreachableError.
    """
    if swarm_id is not None and not invitation.swarm_id.hex().startswith(swarm_id.lower()):
        raise ConfigError(f"the invitation is for swarm {invitation.swarm_id.hex()[:12]}, not {swarm_id}")
    if manifest is not None and manifest.swarm_id != invitation.swarm_id:
        raise ConfigError(
            f"the invitation is for swarm {invitation.swarm_id.hex()[:12]}, and the manifest describes swarm"
            f" {manifest.swarm_id.hex()[:12]}"
        )
    home = new_home(folder, invitation.swarm_id)
    known = home.manifest()
    if known is not None and known.swarm_id != invitation.swarm_id:
        raise ConfigError(f"{home.root} belongs to another swarm than the invitation; choose another --dir")
    home.keep_invitation(invitation)
    if known is None and manifest is not None:
        home.adopt(manifest)
    elif known is None:
        if not join:
            raise ConfigError("the invitation names no address; give a node of the swarm with --join ADDRESS")
        contacts = tuple(map(parse_contact, join))
        asker = asker_of(home)
        home.adopt(fetch_manifest(contacts, invitation.swarm_id.hex(), plaintext=plaintext, asker=asker))
    return home


def new_home(folder: Path | None, swarm_id: bytes) -> Home:
    """A folder for a node; the default one becomes this machine's own node (see `gossamer id`)."""
    home = Home((folder or default_folder(swarm_id)).absolute())
    home.create()
    machine = Home(nodes_root()) if folder is None else None
    if machine is not None and machine.has_key:
        home.copy_key(machine)
    return home


def node_in(folder: Path | None) -> Home:
    """The node in a folder; without one, that of the only swarm of this machine. Raises ConfigError."""
    if folder is not None:
        return Home(folder)
    found = {path.parent: path.read_bytes() for path in sorted(nodes_root().glob("*/manifest"))}
    if not found:
        raise ConfigError(f"there is no node in {nodes_root()}; give one's folder with --dir")
    if len(set(found.values())) > 1:
        raise ConfigError(f"which node? Give one of {', '.join(f'--dir {where}' for where in found)}")
    return Home(next(iter(found)))  # any will do: they hold one model


def own_id(folder: Path | None) -> str:
    """Id of the node in a folder, or of this machine's node; a key is made if there is none."""
    home = Home(folder or nodes_root())
    home.create()
    return home.identity().node_id.hex()
