"""Keeps strangers out, and the charter the same on all nodes.

A new grant or revocation goes to *all* links at once, not to a few: so a peer hears of a member, on the same
link, before it hears of that member's records. Comparing digests brings what is lost on the way: when a link
comes up, and every 5 to 10 s with one random link. Links of members whose grant has expired are cut.
"""

from gossamer.protocol import limits
from gossamer.protocol.admission.charter import Charter, Grant, Revocation
from gossamer.protocol.effects import Effect, Hangup, Send
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.membership.links import Links
from gossamer.protocol.messages import CharterSummary, Records
from gossamer.protocol.sampling import RandomSource, sample
from gossamer.protocol.unix_time import UnixTime

STRANGER_INTERVAL_S = 1.0
"""A link that brings records of unknown authors is asked for its charter no more often than this."""


class Vetting:
    """Asks the charter which nodes may speak. Exchanges it over the links, unless the swarm has no owners."""

    def __init__(self, charter: Charter, links: Links, rng: RandomSource, unix_time: UnixTime) -> None:
        self._charter = charter
        self._links = links
        self._rng = rng
        self._unix_time = unix_time
        self._next_exchange = 0.0
        self._next_look = 0.0
        self._strangers: dict[int, float] = {}
        """Links that brought records of unknown authors, and when their charters were last asked for."""

    # -- who is let in

    def vet(self, node_id: bytes, credential: bytes, now: float) -> None:
        """Check that a node that shows this credential may speak to us now. Raises RefusedError."""
        self._charter.vet(node_id, self._unix_time.at(now), credential)

    def vet_question(self, node_id: bytes, credential: bytes, now: float) -> None:
        """Check that a node may ask how we are doing: members and owners may. Raises RefusedError."""
        if not self._charter.is_owner(node_id):
            self.vet(node_id, credential, now)

    def credential_of(self, node_id: bytes, now: float) -> bytes:
        """The credential that a node shows to be let in, as far as we know; empty if none is needed."""
        return self._charter.credential_of(node_id, self._unix_time.at(now))

    # -- the charter over the links

    def link_up(self, link: int) -> list[Effect]:
        return self._summary(link) if self._charter.has_owners else []

    def link_down(self, link: int) -> None:
        self._strangers.pop(link, None)

    def wake(self, now: float) -> list[Effect]:
        """Compare charters with one random link, and cut links of members whose grant has expired."""
        result: list[Effect] = []
        if not self._charter.has_owners:
            return result
        if now >= self._next_exchange:
            self._next_exchange = now + limits.ANTI_ENTROPY_INTERVAL_S * (0.5 + 0.5 * self._rng.random())
            for number in sample(self._links.numbers, 1, self._rng):
                result += self._summary(number)
        if now >= self._next_look:
            self._next_look = now + limits.EXPIRY_CHECK_INTERVAL_S
            result += self._cut_expired(now)
        return result

    def spread(self, record: Grant | Revocation, source: int | None) -> list[Effect]:
        """Tell every link of a record that is new to us."""
        message = Records(((record.data, False),))
        return [Send(link.number, message) for link in self._links.all() if link.number != source]

    def stranger(self, link: int, now: float) -> list[Effect]:
        """A link brought a record of a node that is not let in: either we or the peer have not heard of some
        grant or revocation."""
        if now < self._strangers.get(link, float("-inf")) + STRANGER_INTERVAL_S:
            return []
        self._strangers[link] = now
        return self._summary(link)

    def met_strangers(self) -> list[int]:
        """Links whose records were passed over for lack of a grant since the last call."""
        links, self._strangers = list(self._strangers), {}
        return links

    def exchange(self, link: int, message: CharterSummary) -> list[Effect]:
        """Send the records that the peer's charter lacks, and let the peer do the same."""
        if message.digest == self._charter.digest:
            return []
        if not message.record_ids and not message.answer:
            return self._listing(link, answer=False)
        theirs = set(message.record_ids)
        lacking = [record for record in self._charter.records() if record.record_id not in theirs]
        entries = [(record.data, False) for record in sorted(lacking, key=lambda record: record.record_id)]
        result: list[Effect] = [Send(link, records) for records in Records.batches(entries)]
        if not message.answer and not theirs <= set(self._charter.ids()):
            result += self._listing(link, answer=True)
        return result

    def _summary(self, link: int) -> list[Effect]:
        return [Send(link, CharterSummary(self._charter.digest))]

    def _listing(self, link: int, *, answer: bool) -> list[Effect]:
        return [Send(link, CharterSummary(self._charter.digest, self._charter.ids(), answer))]

    def _cut_expired(self, now: float) -> list[Effect]:
        result: list[Effect] = []
        for link in self._links.all():
            try:
                self.vet(link.node_id, b"", now)
            except RefusedError as error:
                result.append(Hangup(link.number, str(error)))
        return result
