"""What follows from a new grant or revocation: whom to tell, what to ask for again, whom to cut off."""

from gossamer.protocol.admission.charter import Charter, Grant, Revocation
from gossamer.protocol.admission.vetting import Vetting
from gossamer.protocol.core.peering import Peering
from gossamer.protocol.effects import Effect, Expelled, Notice, Send, StoreCredential
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.membership.presence import Presence
from gossamer.protocol.membership.roster import Roster


class Credentials:
    """Carries changes of the charter to the state machines that they concern."""

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
        """Take in a grant or a revocation, and tell it to everybody but its source. Raises PeerError."""
        record = self._charter.learn(data)
        if record is None:
            return []
        told = [StoreCredential(record.record_id, record.data), *self._vetting.spread(record, source)]
        return told + (self._expel(record, now) if isinstance(record, Revocation) else self._admit(record))

    def _admit(self, grant: Grant) -> list[Effect]:
        """Ask again for the records that were passed over while their author was a stranger."""
        result: list[Effect] = []
        for link in self._vetting.met_strangers():
            result += [
                *self._anti_entropy.open_exchange(link),
                Send(link, self._presence.summary(answer=False)),
            ]
        if self._charter.role_of(grant.node_id) is not grant.role:
            return result  # the node was revoked, or may do more already: what members hear first varies
        return [
            *result,
            Notice(f"{self._roster.label(grant.node_id)} may {grant.role.name.lower()} in this swarm"),
        ]

    def _expel(self, revocation: Revocation, now: float) -> list[Effect]:
        """Cut a revoked member's links, forget the member, and merge the rounds again that it was part of."""
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
