"""What follows from a grant or a revocation that is new: whom to tell, what to ask for again, whom to cut."""

from gossamer.protocol.admission.charter import Charter, Grant, Revocation
from gossamer.protocol.admission.vetting import Vetting
from gossamer.protocol.core.peering import Peering
from gossamer.protocol.effects import Effect, Expelled, Notice, Send, StoreCredential
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.membership.presence import Presence
from gossamer.protocol.membership.roster import Roster


class Credentials:
    """Carries changes of the charter through to the machines that they concern."""

    def __init__(
        self,
        own_id: bytes,
        charter: Charter,
        vetting: Vetting,
        roster: Roster,
        presence: Presence,
        anti_entropy: AntiEntropy,
        holdings: Holdings,
        peering: Peering,
    ) -> None:
        self._own_id = own_id
        self._charter = charter
        self._vetting = vetting
        self._roster = roster
        self._presence = presence
        self._anti_entropy = anti_entropy
        self._holdings = holdings
        self._peering = peering

    def received(self, data: bytes, source: int | None, now: float) -> list[Effect]:
        """Take in a grant or a revocation, and tell everybody of it but its source. Raises PeerError."""
        record = self._charter.learn(data)
        if record is None:
            return []
        told = [StoreCredential(record.record_id, record.data), *self._vetting.spread(record, source)]
        return told + (self._expel(record, now) if isinstance(record, Revocation) else self._admit(record))

    def _admit(self, grant: Grant) -> list[Effect]:
        """Ask again for what was passed over while its author was a stranger."""
        result: list[Effect] = []
        for link in self._vetting.met_strangers():
            result += [
                *self._anti_entropy.open_exchange(link),
                Send(link, self._presence.summary(answer=False)),
            ]
        if self._charter.role_of(grant.node_id) is not grant.role:
            return result  # it was revoked, or may do more already: what members hear of first varies
        return [
            *result,
            Notice(f"{self._roster.label(grant.node_id)} may {grant.role.name.lower()} in this swarm"),
        ]

    def _expel(self, revocation: Revocation, now: float) -> list[Effect]:
        """Cut a revoked member's links, forget it, and merge anew the rounds that it had part in."""
        node_id, last_round = revocation.node_id, revocation.last_round
        if node_id == self._own_id:
            return [Expelled(revocation.reason)]
        label = self._roster.label(node_id)
        voided = self._holdings.revoke(node_id, last_round)
        cut = self._peering.cut(node_id, "revoked", now)
        self._roster.remove(node_id)
        self._presence.forget(node_id)
        text = f"{label} was revoked by an owner: what it signed after round {last_round} is void"
        return [*voided, *cut, Notice(f"{text} ({len(voided)} deltas here)")]
