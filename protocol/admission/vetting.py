"""Keeping strangers out, and the charter the same everywhere.

A grant or revocation that is new goes to *all* links at once, not to a few: whoever hears of a member's
records has then, on the same link, heard of the member first. What is lost on the way, comparing digests
brings, when a link comes up and with one random link every 10 s. Links of members whose grant has run out
are cut.
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
"""A link that brings records of somebody unknown is asked for its charter, but not for each of them."""


class Vetting:
    """Asks the charter who may speak, and exchanges it over the links: never in a swarm without owners."""

    def __init__(self, charter: Charter, links: Links, rng: RandomSource, unix_time: UnixTime) -> None:
        self._charter = charter
        self._links = links
        self._rng = rng
        self._unix_time = unix_time
        self._next_exchange = 0.0
        self._next_look = 0.0
        self._strangers: dict[int, float] = {}
        """Links that brought records of somebody unknown, and when their charter was last asked for."""

    # -- who is let in

    def vet(self, node_id: bytes, credential: bytes, now: float) -> None:
        """May this node, showing this credential, speak to us? Raises RefusedError."""
        self._charter.vet(node_id, self._unix_time.at(now), credential)

    def vet_question(self, node_id: bytes, credential: bytes, now: float) -> None:
        """May it ask how we are doing? Owners may, besides members. Raises RefusedError."""
        if not self._charter.is_owner(node_id):
            self.vet(node_id, credential, now)

    def credential_of(self, node_id: bytes, now: float) -> bytes:
        """What a node shows at doors, as far as we know; empty where none is needed."""
        return self._charter.credential_of(node_id, self._unix_time.at(now))

    # -- the charter over the links

    def link_up(self, link: int) -> list[Effect]:
        return self._summary(link) if self._charter.has_owners else []

    def link_down(self, link: int) -> None:
        self._strangers.pop(link, None)

    def wake(self, now: float) -> list[Effect]:
        """Compare charters with one random link, and look whose grant has run out."""
        result: list[Effect] = []
        if not self._charter.has_owners:
            return result
        if now >= self._next_exchange:
            self._next_exchange = now + limits.ANTI_ENTROPY_INTERVAL_S * (0.5 + 0.5 * self._rng.random())
            for number in sample(self._links.numbers, 1, self._rng):
                result += self._summary(number)
        if now >= self._next_look:
            self._next_look = now + limits.EXPIRY_LOOK_S
            result += self._cut_expired(now)
        return result

    def spread(self, record: Grant | Revocation, source: int | None) -> list[Effect]:
        """Tell every link of a record that is new to us."""
        message = Records(((record.data, False),))
        return [Send(link.number, message) for link in self._links.all() if link.number != source]

    def stranger(self, link: int, now: float) -> list[Effect]:
        """A link brought a record of somebody who is not let in: one of us has not heard of a grant, or of a
        revocation."""
        if now < self._strangers.get(link, float("-inf")) + STRANGER_INTERVAL_S:
            return []
        self._strangers[link] = now
        return self._summary(link)

    def met_strangers(self) -> list[int]:
        """Links whose records were passed over for want of a grant; each is named once."""
        links, self._strangers = list(self._strangers), {}
        return links

    def exchange(self, link: int, message: CharterSummary) -> list[Effect]:
        """Send what the other's charter lacks, and let it do the same."""
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
