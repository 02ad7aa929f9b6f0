"""Checks of `gossamer config check` for a bootstrap peer only: has it a first model, and is it let in."""

from collections.abc import Iterator
from pathlib import Path

from gossamer.bootstrap import owners
from gossamer.bootstrap.first_model import check_genesis
from gossamer.node.config.findings import Finding, error, told
from gossamer.node.storage.home import Home
from gossamer.protocol.manifest import Manifest


def check_bootstrap(
    home: Home, manifest: Manifest, path: Path, *, joins: bool, is_invited: bool
) -> Iterator[Finding]:
    """Check without changing anything. `path` is the manifest's; `is_invited`: it has an invitation, given or
    kept."""
    if not joins:
        yield from told("genesis", lambda: check_genesis(home, manifest, path))
    if manifest.admission.mode == "open" or is_invited:
        return
    key = path.with_suffix(owners.SUFFIX)
    if key.exists():
        yield from told("invite", lambda: _invited_by(key, manifest, path))
    else:
        yield error(
            "invite",
            f"swarm {manifest.swarm.name!r} lets in invited nodes only: put the owner's key at {key}, or"
            " start with --invite and what gossamer invite prints for this node, whose id"
            f" gossamer id --dir {home.root} prints",
        )


def _invited_by(key: Path, manifest: Manifest, path: Path) -> str:
    owners.owner_of(manifest, path, None)
    return f"the owner's key {key} invites this peer"
