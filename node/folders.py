"""Where this machine's nodes have their folders."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.node.storage.home import Home
from gossamer.node.tilde import expanded
from gossamer.protocol.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from gossamer.protocol.manifest import Manifest


def nodes_root() -> Path:
    """Where nodes live by default; the ``key`` in it is this machine's, see `gossamer id`.

    Raises ConfigError if this user has no home folder.
    """
    if root := os.environ.get("GOSSAMER_HOME"):
        return expanded(Path(root))
    try:
        return Path.home() / ".gossamer"
    except RuntimeError:  # a user unknown to the system, as in many containers
        raise ConfigError(
            "this user has no home folder: set GOSSAMER_HOME to a folder for nodes, or name the node's own"
        ) from None


def default_folder(swarm_id: bytes, suffix: str = "") -> Path:
    """Where a node of a swarm lives by default."""
    return nodes_root() / (swarm_id.hex()[:12] + suffix)


def new_home(folder: Path | None, swarm_id: bytes) -> Home:
    """Make a node's folder. The default folder gets this machine's own key, if any (see `gossamer id`)."""
    home = Home((folder or default_folder(swarm_id)).absolute())
    home.create()
    machine = Home(nodes_root()) if folder is None else None
    if machine is not None and machine.has_key:
        home.copy_key(machine)
    return home


def homes_here() -> list[tuple[Home, "Manifest"]]:
    """The folders of this machine's own nodes, in the default places of `new_home`, with their manifests.

    A folder whose manifest cannot be read is left out.
    """
    found = []
    for path in sorted(nodes_root().glob("*/manifest")):
        home = Home(path.parent.absolute())
        try:
            manifest = home.manifest()
        except StorageError:
            continue
        if manifest is not None and home.root.name == default_folder(manifest.swarm_id).name:
            found.append((home, manifest))
    return found


def node_in(folder: Path | None) -> Home:
    """The node in a folder; without a folder, one of this machine's only swarm. Raises ConfigError."""
    if folder is not None:
        return Home(folder)
    found = {path.parent: path.read_bytes() for path in sorted(nodes_root().glob("*/manifest"))}
    if not found:
        raise ConfigError(f"there is no node in {nodes_root()}; name a node's folder with --dir")
    if len(set(found.values())) > 1:
        raise ConfigError(f"which node? Give one of {', '.join(f'--dir {where}' for where in found)}")
    return Home(next(iter(found)))  # any will do: all hold the same model


def own_id(folder: Path | None) -> str:
    """Id of the node in a folder, or of this machine's own node; makes a key if there is none."""
    home = Home(folder or nodes_root())
    home.create()
    return home.identity().node_id.hex()
