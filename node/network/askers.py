"""Whose key to ask questions with: an invited swarm answers only its members and owners."""

from pathlib import Path

from gossamer.node.address import parse_address, parse_contact
from gossamer.node.folders import nodes_root
from gossamer.node.network.asking import Asker
from gossamer.node.storage.home import Home
from gossamer.protocol.errors import ConfigError, LocalError, StorageError


def asker_of(home: Home) -> Asker:
    """Ask as the node in a folder. Raises ConfigError or StorageError."""
    manifest = home.manifest()
    try:
        invitation = home.invitation()
    except StorageError:
        if manifest is None:
            raise
        invitation = None  # usually members have seen it
    if manifest is None and invitation is None:
        raise ConfigError(f"there is no node in {home.root}; name a node's folder with --dir")
    swarm_id = manifest.swarm_id if manifest else invitation.swarm_id if invitation else b""
    return Asker(home.identity(), swarm_id, invitation.grant.data if invitation else b"")


def asker_for(folder: Path | None, address: str) -> Asker | None:
    """Ask as the node in `folder`, or as the node of this machine that runs at `address`, or as nobody.

    Raises ConfigError or StorageError.
    """
    if folder is not None:
        return asker_of(Home(folder))
    asked = _host_and_port(address)
    try:
        nodes = nodes_root()
    except ConfigError:
        return None  # without a home folder there are no nodes in it
    for found in nodes.glob("*/daemon.json"):
        home = Home(found.parent)
        if not home.lock.is_taken():
            continue  # it ran there once, and another node may run there now
        try:
            if _host_and_port(str((home.read_daemon() or {}).get("address"))) == asked:
                return asker_of(home)
        except LocalError:
            continue  # not ours to read, or not a node's
    return None


def _host_and_port(text: str) -> tuple[str, int]:
    """Host and port, the same for every spelling of an address. Raises ConfigError."""
    host, port = parse_address(parse_contact(text).address)
    return "127.0.0.1" if host.lower() == "localhost" else host.lower(), port
