"""Which invitation a node's folder goes by: the one kept there or another, whichever grants more.

An owner may have renewed the invitation, or promoted the node, while the node ran (`gossamer invite --tell`),
and the command that starts the node may still name the first one.
"""

import time
from contextlib import suppress

from gossamer.node.storage.home import Home
from gossamer.protocol.admission.charter import Charter, Grant
from gossamer.protocol.admission.invitation import Invitation
from gossamer.protocol.errors import PeerError, StorageError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.unix_time import span

EXPIRES_SOON_S = 3 * 86_400.0


def runs_out_soon(expires: int | None, unix_s: float) -> str | None:
    """A warning for an invitation that ends within days, at `expires` in Unix seconds; None for any other."""
    if not expires or not 0.0 < expires - unix_s < EXPIRES_SOON_S:
        return None
    return f"the invitation runs out in {span(expires - unix_s)}; have it renewed"


def better_invitation(home: Home, offered: Invitation) -> Invitation:
    """The invitation kept in a folder if it is valid now and grants its node more; else the offered one,
    whose addresses are newer."""
    try:
        manifest, kept = home.manifest(), home.invitation()
    except StorageError:
        return offered
    if manifest is None or kept is None or not kept.swarm_id == offered.swarm_id == manifest.swarm_id:
        return offered
    node_id = offered.grant.node_id
    return kept if _rights(kept, manifest, node_id) > _rights(offered, manifest, node_id) else offered


def _rights(invitation: Invitation, manifest: Manifest, node_id: bytes) -> tuple[int, float]:
    """The `Grant.rights` that an invitation gives a node now, (0, 0.0) for none; greater means more."""
    charter = Charter(manifest.admission, manifest.swarm_id)
    with suppress(PeerError):  # not signed by an owner of this swarm
        charter.learn(invitation.grant.data)
    return invitation.grant.rights if charter.credential_of(node_id, time.time()) else (0, 0.0)


def keep_better(home: Home, offered: Invitation) -> None:
    """Keep an invitation unless a folder's own gives more. Raises what `Home.keep_invitation` does."""
    if better_invitation(home, offered) is offered:
        home.keep_invitation(offered)


def keep_grant(home: Home, swarm_id: bytes, grant: Grant) -> None:
    """Put a grant that came without addresses into a folder's invitation. Raises as `keep_better` does."""
    try:
        kept = home.invitation()
    except StorageError:
        kept = None  # damaged, and of no more use
    keep_better(home, Invitation(swarm_id, grant, kept.contacts if kept else ()))
