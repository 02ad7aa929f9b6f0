"""Whose key asks: an invited swarm answers the questions of its members only."""

from pathlib import Path

from gossamer.node.folders import nodes_root
from gossamer.node.network.client import Asker
from gossamer.node.storage.home import Home
from gossamer.protocol.errors import ConfigError, LocalError


def asker_of(home: Home) -> Asker:
    """Ask as the node in a folder. Raises ConfigError or StorageError."""
    manifest, invitation = home.manifest(), home.invitation()
    if manifest is None and invitation is None:
        raise ConfigError(f"there is no node in {home.root}; give a node's folder with --dir")
    swarm_id = manifest.swarm_id if manifest else invitation.swarm_id if invitation else b""
    return Asker(home.identity(), swarm_id, invitation.grant.data if invitation else b"")


def asker_for(folder: Path | None, address: str) -> Asker | None:
    """Ask as the node in `folder`, or as one of this machine's that runs at `address`, or as nobody."""
    if folder is not None:
        return asker_of(Home(folder))
    try:
        nodes = nodes_root()
    except ConfigError:
        return None  # without a home folder there are no nodes in it
    for found in nodes.glob("*/daemon.json"):
        try:
            home = Home(found.parent)
            if (home.read_daemon() or {}).get("address") == address:
                return asker_of(home)
        except LocalError:
            continue  # not ours to read, or not a node's
    return None
