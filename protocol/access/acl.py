"""Which nodes are let in: grants and revocations, signed by a swarm's owners.

A *grant* gives a node id a role until it expires. A *revocation* excludes a node id for good, and voids the
deltas that it signed for rounds later than the one named. Both are records and are gossiped like any other.
The `AccessList` is the set of them. It is a semilattice, so nodes that have the same records, got in
whatever order, decide alike.

Two questions are kept apart, since replicas must stay bit-identical. Whether a *record counts* depends on
the access list alone, never on a clock. Whether a *node may speak to us* depends on the time too: a node
whose grant has expired is turned away, but its deltas still count.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from math import inf
from typing import Any

from gossamer.protocol import limits
from gossamer.protocol.effects import Hangup, Outbox
from gossamer.protocol.errors import (
    ConfigError,
    MalformedError,
    NoRoomError,
    PeerError,
    RefusedError,
    SignatureError,
)
from gossamer.protocol.identity import NODE_ID_BYTES, PUBLIC_KEY_BYTES, node_id_of, short
from gossamer.protocol.manifest import AdmissionSection
from gossamer.protocol.membership.links import Links
from gossamer.protocol.messages import AclSummary, Records
from gossamer.protocol.records import HEADER_BYTES, Envelope, RecordKind, open_envelope
from gossamer.protocol.sampling import RandomSource, sample
from gossamer.protocol.unix_time import UnixTime, moment, span
from gossamer.protocol.wire import array, blob, integer, pack, take, text, unpack


class Role(IntEnum):
    """What a member may do. Each role includes the ones before it."""

    OBSERVE = 1
    """Hold a full replica and serve it: bootstrap peers, mirrors, readers."""
    TRAIN = 2
    """Publish deltas."""


@dataclass(frozen=True, slots=True)
class Grant:
    """An owner's word that a node may take part. Times are Unix seconds."""

    record_id: bytes
    data: bytes
    """The envelope's exact bytes."""
    node_id: bytes
    role: Role
    expires: int
    """0 for never."""

    @property
    def end(self) -> float:
        """Unix seconds; infinite if the grant does not expire."""
        return self.expires or inf

    @property
    def rights(self) -> tuple[Role, float, bytes]:
        """The higher role counts for more, then the later end. Ids decide between equals."""
        return self.role, self.end, self.record_id


@dataclass(frozen=True, slots=True)
class Revocation:
    """An owner's word that a node is out: its deltas after round `last_round` are void."""

    record_id: bytes
    data: bytes
    node_id: bytes
    last_round: int
    reason: str

    @property
    def rights(self) -> tuple[int, bytes]:
        """What voids more counts for more."""
        return -self.last_round, self.record_id


def grant_body(node_id: bytes, role: Role, issued: int, expires: int) -> bytes:
    """The body of a grant; `issued` makes two grants of the same content different records."""
    return pack([node_id, int(role), issued, expires])


def revocation_body(node_id: bytes, last_round: int, issued: int, reason: str) -> bytes:
    """The body of a revocation."""
    return pack([node_id, last_round, issued, reason])


_NODE_ID, _ROLE = blob(NODE_ID_BYTES), integer(Role.OBSERVE, Role.TRAIN)
_ROUND, _UNIX_S = integer(0, limits.ROUND_MAX), integer(0, limits.UNIX_S_MAX)
_REASON = text(limits.REASON_BYTES_MAX)


def parse_grant(envelope: Envelope) -> Grant:
    """Check a grant's body. Raises MalformedError."""
    node_id, role, _, expires = take(
        unpack(envelope.body, limits.CREDENTIAL_BYTES_MAX), "grant", _NODE_ID, _ROLE, _UNIX_S, _UNIX_S
    )
    return Grant(envelope.record_id, envelope.data, node_id, Role(role), expires)


def parse_revocation(envelope: Envelope) -> Revocation:
    """Check a revocation's body. Raises MalformedError."""
    node_id, last_round, _, reason = take(
        unpack(envelope.body, limits.CREDENTIAL_BYTES_MAX), "revocation", _NODE_ID, _ROUND, _UNIX_S, _REASON
    )
    return Revocation(envelope.record_id, envelope.data, node_id, last_round, reason)


class AccessList:
    """The grants and revocations in force, and what follows from them.

    Of each node's grants only the one with the greatest rights is kept, and likewise of its revocations: so
    an observer becomes a trainer by another grant, and a trainer an observer by a new key only.
    """

    def __init__(self, section: AdmissionSection, swarm_id: bytes) -> None:
        self.is_open = section.mode == "open"
        """Whether every node that is not revoked may train."""
        self.owners = frozenset(node_id_of(bytes.fromhex(key)) for key in section.owners)
        """Node ids of the owners' keys. Without any, nobody can grant or revoke, and the list stays empty."""
        self._swarm_id = swarm_id
        self._grants: dict[bytes, Grant] = {}
        self._revocations: dict[bytes, Revocation] = {}
        self._datas: set[bytes] = set()

    # -- the set

    def learn(self, data: bytes) -> Grant | Revocation | None:
        """Unite one record with the set; returns the record if that changed anything.

        Raises MalformedError, SignatureError or NoRoomError.
        """
        if data in self._datas:
            return None
        record = self._open(data)
        in_force: dict[bytes, Any] = self._grants if isinstance(record, Grant) else self._revocations
        before = in_force.get(record.node_id)
        if before is not None and before.rights >= record.rights:
            return None
        if not self._has_room(record.node_id):
            raise NoRoomError("grants and revocations for more nodes than a swarm may have")
        if before is not None:
            self._datas.discard(before.data)
        in_force[record.node_id] = record
        self._datas.add(record.data)
        return record

    def _open(self, data: bytes) -> Grant | Revocation:
        """Check one record. That the key is an owner's is checked before the signature, so that strangers
        cannot make us verify any signatures."""
        if len(data) > limits.CREDENTIAL_BYTES_MAX:
            raise MalformedError(f"a credential of {len(data)} bytes")
        if node_id_of(data[1 : 1 + PUBLIC_KEY_BYTES]) not in self.owners:
            raise SignatureError("a grant or revocation by somebody who is not an owner of this swarm")
        envelope = open_envelope(data, self._swarm_id)
        match envelope.kind:
            case RecordKind.GRANT:
                return parse_grant(envelope)
            case RecordKind.REVOCATION:
                return parse_revocation(envelope)
            case _:
                raise MalformedError("neither a grant nor a revocation")

    def _has_room(self, node_id: bytes) -> bool:
        if node_id in self._grants or node_id in self._revocations:
            return True  # as nearly always: links are vetted again and again
        return len(self._grants.keys() | self._revocations.keys()) < limits.ACL_NODES_MAX

    def records(self) -> list[Grant | Revocation]:
        """All grants and revocations in force, in order of record id."""
        records: list[Grant | Revocation] = [*self._grants.values(), *self._revocations.values()]
        return sorted(records, key=lambda record: record.record_id)

    def ids(self) -> tuple[bytes, ...]:
        """Record ids in order."""
        return tuple(record.record_id for record in self.records())

    @property
    def digest(self) -> bytes:
        """Hash of the set: equal digests mean equal sets."""
        return sha256(b"".join(self.ids())).digest()

    # -- what follows

    def _role_ever(self, node_id: bytes) -> Role | None:
        grant = self._grants.get(node_id)
        return Role.TRAIN if self.is_open else grant.role if grant is not None else None

    def role_of(self, node_id: bytes) -> Role | None:
        """The highest role ever granted, expired or not; None for a stranger or a revoked node."""
        return None if node_id in self._revocations else self._role_ever(node_id)

    def counts(self, author: bytes, round_: int) -> bool:
        """Whether a delta of this author and round belongs to S. Depends on the access list alone."""
        revocation = self._revocations.get(author)
        in_time = revocation is None or round_ <= revocation.last_round
        return in_time and self._role_ever(author) is Role.TRAIN

    def revocation_of(self, node_id: bytes) -> Revocation | None:
        return self._revocations.get(node_id)

    def credential_of(self, node_id: bytes, unix_s: float) -> bytes:
        """The envelope of a node's current grant, which it shows to be let in; empty if it has none."""
        grant = self._grants.get(node_id)
        return grant.data if grant is not None and unix_s < grant.end else b""

    def invited_until(self, node_id: bytes) -> int | None:
        """Unix time at which a node's grant ends or ended; None for no end, no grant, or no need."""
        grant = self._grants.get(node_id)
        return None if self.is_open or grant is None else grant.expires or None

    def vet(self, node_id: bytes, unix_s: float, credential: bytes = b"") -> None:
        """Check that a node that shows this credential (a grant's envelope, or nothing) may speak to us now.

        The credential is judged, but not added to the set. It is worth nothing if the set has no room for it:
        what its node published would count nowhere. Raises RefusedError with what the operator of that node
        should know.
        """
        self._check_not_revoked(node_id)
        if self.is_open:
            return
        grants = [grant for grant in (self._grants.get(node_id), self._shown(node_id, credential)) if grant]
        if not grants:
            raise RefusedError(
                "this swarm lets in invited nodes only; send an owner this node id for gossamer invite: "
                + node_id.hex()
            )
        if unix_s >= (end := max(grant.end for grant in grants)):
            raise RefusedError(
                f"the invitation of node {short(node_id)} ran out {span(unix_s - end)} ago; ask an owner for"
                f" a new one (it was valid until {moment(int(end))}: if that is in the future, set the clock"
                " that is wrong)"
            )
        if not self._has_room(node_id):
            raise RefusedError(
                f"owners have invited or revoked {limits.ACL_NODES_MAX} nodes, which is the limit: there"
                f" is no room for node {short(node_id)}. Start with the key of one that was invited"
            )

    def check_of_use(self, data: bytes) -> None:
        """Refuse a grant that an owner hands over for a node that was revoked: no grant undoes a revocation.

        From members the set still takes such a grant, since the order in which they learn of the two must not
        matter. Raises RefusedError, MalformedError or SignatureError.
        """
        record = self._open(data)
        if isinstance(record, Grant):
            self._check_not_revoked(record.node_id)

    def _check_not_revoked(self, node_id: bytes) -> None:
        revocation = self._revocations.get(node_id)
        if revocation is not None:
            because = f": {revocation.reason}" if revocation.reason else ""
            raise RefusedError(f"node {short(node_id)} was revoked by an owner of this swarm{because}")

    def _shown(self, node_id: bytes, credential: bytes) -> Grant | None:
        if not credential or credential in self._datas:
            return None
        try:
            record = self._open(credential)
        except PeerError as error:
            raise RefusedError(f"the invitation of node {short(node_id)} is not valid: {error}") from None
        return record if isinstance(record, Grant) and record.node_id == node_id else None


# --- The invitation that an owner hands to a new member: one line of text with everything needed to join.
#
# It is ``gossamer-invitation:`` and base64url of msgpack ``[swarm id, grant's envelope, contacts]``, where
# contacts are members' addresses as `--join` takes them. It is no secret: only the node that it names can use
# it.

PREFIX = "gossamer-invitation:"
INVITATION_BYTES_MAX = 8192
_GRANT = blob(HEADER_BYTES, limits.CREDENTIAL_BYTES_MAX)
_CONTACTS = array(text(), limits.ADDRESSES_PER_PEER_MAX)


@dataclass(frozen=True, slots=True)
class Invitation:
    """A grant, the swarm that it is for, and addresses of members of that swarm."""

    swarm_id: bytes
    grant: Grant
    contacts: tuple[str, ...]

    def to_text(self) -> str:
        packed = pack([self.swarm_id, self.grant.data, self.contacts])
        return PREFIX + urlsafe_b64encode(packed).decode()


def read_invitation(text: str) -> Invitation:
    """Inverse of `Invitation.to_text`. Raises ConfigError.

    The grant's signature is checked here. Whether its signer is an owner can be told only from the manifest.
    """
    words = "".join(text.replace(">", " ").split())  # mail programs break long lines and mark quotes
    if not words.startswith(PREFIX) or len(words) > INVITATION_BYTES_MAX:
        raise ConfigError(f"that is not an invitation; one begins with {PREFIX}")
    try:
        value = unpack(urlsafe_b64decode(words.removeprefix(PREFIX)), INVITATION_BYTES_MAX)
        swarm_id, grant, contacts = take(value, "it", blob(32), _GRANT, _CONTACTS)
        envelope = open_envelope(grant, swarm_id)
        if envelope.kind is not RecordKind.GRANT:
            raise ConfigError("that invitation grants nothing")
        return Invitation(swarm_id, parse_grant(envelope), contacts)
    except (PeerError, binascii.Error, ValueError) as error:
        raise ConfigError(f"that invitation is damaged ({error}); was all of it copied?") from None


# --- Keeps strangers out, and the access list the same on all nodes.
#
# A new grant or revocation goes to *all* links at once, not to a few: so it comes, on each link, before any
# record of that member. Comparing digests brings what is lost on the way: when a link comes up, and every 5
# to 10 s with one random link. Links of members whose grant has expired are cut.

STRANGER_INTERVAL_S = 1.0
"""A link that brings records of unknown authors is asked for its access list no more often than this."""


class Access:
    """Asks the access list which nodes may speak, and exchanges it over the links if the swarm has owners."""

    def __init__(
        self, acl: AccessList, links: Links, rng: RandomSource, unix_time: UnixTime, outbox: Outbox
    ) -> None:
        self._acl = acl
        self._links = links
        self._rng = rng
        self._unix_time = unix_time
        self._outbox = outbox
        self._next_exchange = 0.0
        self._next_look = 0.0
        self._strangers: dict[int, float] = {}
        """Links that brought records of unknown authors, and when their access lists were last asked for."""

    # -- who is let in

    def vet(self, node_id: bytes, credential: bytes, now: float) -> None:
        """Check that a node that shows this credential may speak to us now. Raises RefusedError."""
        self._acl.vet(node_id, self._unix_time.at(now), credential)

    def vet_question(self, node_id: bytes, credential: bytes, now: float) -> None:
        """Check that a node may ask how we are doing: members and owners may. Raises RefusedError."""
        if node_id not in self._acl.owners:
            self.vet(node_id, credential, now)

    def credential_of(self, node_id: bytes, now: float) -> bytes:
        """The credential that a node shows to be let in, as far as we know; empty if none is needed."""
        return self._acl.credential_of(node_id, self._unix_time.at(now))

    # -- the access list over the links

    def link_up(self, link: int) -> None:
        if self._acl.owners:
            self._outbox.send(link, AclSummary(self._acl.digest))

    def link_down(self, link: int) -> None:
        self._strangers.pop(link, None)

    def wake(self, now: float) -> None:
        """Compare access lists with one random link, and cut links of members whose grant has expired."""
        if not self._acl.owners:
            return
        if now >= self._next_exchange:
            self._next_exchange = now + limits.ANTI_ENTROPY_INTERVAL_S * (0.5 + 0.5 * self._rng.random())
            for number in sample(self._links.numbers, 1, self._rng):
                self._outbox.send(number, AclSummary(self._acl.digest))
        if now >= self._next_look:
            self._next_look = now + limits.EXPIRY_CHECK_INTERVAL_S
            self._cut_expired(now)

    def _cut_expired(self, now: float) -> None:
        for link in self._links.all():
            try:
                self.vet(link.node_id, b"", now)
            except RefusedError as error:
                self._outbox.append(Hangup(link.number, str(error)))

    def spread(self, record: Grant | Revocation, source: int | None) -> None:
        """Send every link a record that is new to us."""
        message = Records(((record.data, False),))
        for link in self._links.all():
            if link.number != source:
                self._outbox.send(link.number, message)

    def stranger(self, link: int, now: float) -> None:
        """A link brought a record of a node that is not let in: we or the peer lack a grant or revocation."""
        if now >= self._strangers.get(link, -inf) + STRANGER_INTERVAL_S:
            self._strangers[link] = now
            self._outbox.send(link, AclSummary(self._acl.digest))

    def met_strangers(self) -> list[int]:
        """Links whose records were passed over for lack of a grant since the last call."""
        links, self._strangers = list(self._strangers), {}
        return links

    def exchange(self, link: int, message: AclSummary) -> None:
        """Send the records that the peer's access list lacks, and let the peer do the same."""
        if message.digest == self._acl.digest:
            return
        listing = AclSummary(self._acl.digest, self._acl.ids(), answer=bool(message.record_ids))
        if not message.record_ids and not message.answer:
            self._outbox.send(link, listing)
            return
        theirs = set(message.record_ids)
        entries = [(r.data, False) for r in self._acl.records() if r.record_id not in theirs]
        for records in Records.batches(entries):
            self._outbox.send(link, records)
        if not message.answer and not theirs <= set(self._acl.ids()):
            self._outbox.send(link, listing)
