"""Whether a node can live in its folder: writable, not in use, its files whole and of one swarm."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from gossamer.node.config.findings import Finding, error, ok, told, warning
from gossamer.node.phi.restore import has_model
from gossamer.node.renewal import runs_out_soon
from gossamer.node.storage.database import PATH_BYTES_MAX
from gossamer.node.storage.home import Home, unreadable
from gossamer.protocol.admission.invitation import Invitation
from gossamer.protocol.errors import LocalError
from gossamer.protocol.identity import short


def check_folder(home: Home, joins: bool) -> Iterator[Finding]:
    """Look at a node's folder and change nothing; `joins` says whether the node has anybody to join."""
    if len(os.fsencode(home.chronicle_path.absolute())) > PATH_BYTES_MAX:
        most = PATH_BYTES_MAX - len(f"/{home.chronicle_path.name}")
        yield error("dir", f"the path {home.root} is too long for SQLite (over {most} bytes); choose another")
        return
    try:
        home.root.stat()
    except (FileNotFoundError, NotADirectoryError):
        if home.root.is_symlink():
            yield error("dir", f"{home.root} is a link to nothing: is its disk mounted?")
        else:
            yield _would_be_made(home.root)
        return
    except OSError as problem:
        yield error("dir", unreadable(home.root, problem))
        return
    if not home.root.is_dir() or not os.access(home.root, os.W_OK | os.X_OK):
        yield error("dir", f"{home.root} is not a writable folder; choose another --dir")
        return
    yield (
        warning("dir", f"a node is running in {home.root}; changes take effect at its next start")
        if home.lock.is_taken()
        else ok("dir", f"{home.root} exists, and no node is running in it")
    )
    if home.has_key:
        yield from told("key", lambda: f"this node is {short(home.identity().node_id)}")
    yield from _check_swarm(home, joins)


def _would_be_made(root: Path) -> Finding:
    above = next(folder for folder in root.absolute().parents if os.path.lexists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return error("dir", f"cannot create {root}: {above} is not a writable folder; choose another --dir")
    return ok("dir", f"{root} will be created")


def _check_swarm(home: Home, joins: bool) -> Iterator[Finding]:
    """Manifest, model and invitation in the folder."""
    try:
        manifest = home.manifest()
        if manifest is not None:
            name = manifest.swarm.name
            yield ok("manifest", f"the folder belongs to swarm {name!r} ({manifest.swarm_id.hex()[:12]})")
            has_begun = has_model(home, manifest)  # raises for a damaged ledger, which would end the node
            if not joins and not home.read_peers() and not has_begun:
                yield error("join", "the folder never got a model: name a node of the swarm with --join")
        invitation = home.invitation()
    except LocalError as problem:
        yield error("dir", str(problem))
        return
    if invitation is not None and home.has_key:
        try:
            own = home.identity().node_id
        except LocalError:
            return  # reported under "key"
        yield from check_invitation(invitation, own, manifest.swarm_id if manifest else None)


def check_invitation(invitation: Invitation, own: bytes, swarm_id: bytes | None) -> Iterator[Finding]:
    """Whether an invitation is for the node `own` and this swarm, and is still valid."""
    grant = invitation.grant
    if swarm_id is not None and invitation.swarm_id != swarm_id:
        yield error("invite", "the invitation is for a different swarm than the folder; choose another --dir")
    elif grant.node_id != own:
        yield error(
            "invite",
            f"the invitation is for node {grant.node_id.hex()}; ask an owner for one for {own.hex()}",
        )
    elif not grant.is_current(time.time()):
        yield error("invite", "the invitation has run out; ask an owner to renew it")
    elif (said := runs_out_soon(grant.expires, time.time())) is not None:
        yield warning("invite", said)
    else:
        yield ok("invite", f"this node is invited to {grant.role.name.lower()}")
