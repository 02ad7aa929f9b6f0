"""What the machines of the core share: who we are, the sets that all of them read, and one outbox.

A machine takes an event, appends the effects to `outbox`, and returns what happened. The machines of
`membership` and `access`, which the sets below are made by, are handed what they need one by one instead.
"""

from dataclasses import dataclass

from gossamer.protocol.access.acl import AccessList
from gossamer.protocol.effects import Outbox
from gossamer.protocol.identity import Identity
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import NodeInfo, Roster
from gossamer.protocol.sampling import RandomSource


@dataclass(frozen=True, slots=True)
class Context:
    """The shared part of one core."""

    identity: Identity
    manifest: Manifest
    info: NodeInfo
    """What we say of ourselves, and what we were given at our start."""
    acl: AccessList
    links: Links
    roster: Roster
    ledger: Ledger
    rng: RandomSource
    outbox: Outbox
