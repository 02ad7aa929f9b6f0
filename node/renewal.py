"""Which invitation a node's folder goes by: of the one kept there and another, the one that gives more.

An owner may have renewed it, or promoted the node, while the node ran (`gossamer invite --tell`), and who
starts the node may still give it the first one.
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
    """What to say of an invitation that ends within days, at `expires` in Unix seconds; None of any other."""
    if not expires or not 0.0 < expires - unix_s < EXPIRES_SOON_S:
        return None
    return f"the invitation runs out in {span(expires - unix_s)}; have it renewed"


def better_invitation(home: Home, offered: Invitation) -> Invitation:
    """The one kept in a folder if it holds now and gives its node more; else the one that is offered, whose
    addresses are the newer ones."""
    try:
        manifest, kept = home.manifest(), home.invitation()
    except StorageError:
        return offered
    if manifest is None or kept is None or not kept.swarm_id == offered.swarm_id == manifest.swarm_id:
        return offered
    node_id = offered.grant.node_id
    return kept if _rights(kept, manifest, node_id) > _rights(offered, manifest, node_id) else offered


def _rights(invitation: Invitation, manifest: Manifest, node_id: bytes) -> tuple[int, float]:
    """`Grant.rights` that it gives a node now, (0, 0.0) for none; the greater gives more."""
    charter = Charter(manifest.admission, manifest.swarm_id)
    with suppress(PeerError):  # signed by nobody who owns this swarm
        charter.learn(invitation.grant.data)
    return invitation.grant.rights if charter.credential_of(node_id, time.time()) else (0, 0.0)


def keep_better(home: Home, offered: Invitation) -> None:
    """Keep an invitation unless a folder's own gives more. Raises what `Home.keep_invitation` does."""
    if better_invitation(home, offered) is offered:
        home.keep_invitation(offered)


def keep_grant(home: Home, swarm_id: bytes, grant: Grant) -> None:
    """Have a folder's invitation hold a grant that came without addresses. Raises as `keep_better` does."""
    try:
        kept = home.invitation()
    except StorageError:
        kept = None  # damaged: it is of no use any more
    keep_better(home, Invitation(swarm_id, grant, kept.contacts if kept else ()))
