"""Records as they come from links: known ones are passed over, new ones are checked and taken in.

The checks come in the order signature, bounds, admission, plausibility, set rules; length and form of the
message were checked before. For rows, admission comes before bounds; for credentials, even before the
signature. A record that fails any check but admission costs its sender a `Blame`, and goes no further. The
other records of the same message are judged on their own.
"""

from dataclasses import dataclass, field

from gossamer.protocol.admission.charter import Charter
from gossamer.protocol.admission.vetting import Vetting
from gossamer.protocol.core.credentials import Credentials
from gossamer.protocol.effects import Blame, Effect
from gossamer.protocol.envelope import Envelope, Kind, open_envelope
from gossamer.protocol.errors import ImplausibleError, MalformedError, NoRoomError, PeerError
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.gossip.push import Push
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.presence import Presence
from gossamer.protocol.messages import Records
from gossamer.protocol.offence import offence_in_record
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import Delta, parse_delta, parse_row

_ROW = int(Kind.ROW)
_CREDENTIALS = frozenset(map(int, (Kind.GRANT, Kind.REVOCATION)))


def _kind(data: bytes) -> int:
    """What a record says that it is: the value of a `Kind`, unless the record is to be refused."""
    return data[0]


@dataclass(slots=True)
class _Delivery:
    """One message of records: where it came from, and the deltas in it."""

    link: int
    now: float
    record_ids: list[bytes] = field(default_factory=list)
    fresh: list[Delta] = field(default_factory=list)
    """The deltas that were new to us."""
    is_held: bool = False
    """Whether the sender holds the payload of the last delta."""


class Intake:
    """Takes in records of every kind."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        charter: Charter,
        links: Links,
        vetting: Vetting,
        presence: Presence,
        ledger: Ledger,
        holdings: Holdings,
        push: Push,
        anti_entropy: AntiEntropy,
        clock: SwarmClock,
        credentials: Credentials,
    ) -> None:
        self._swarm_id = manifest.swarm_id
        self._codec = manifest.outer.codec
        self._layout = layout
        self._charter = charter
        self._links = links
        self._vetting = vetting
        self._presence = presence
        self._ledger = ledger
        self._holdings = holdings
        self._push = push
        self._anti_entropy = anti_entropy
        self._clock = clock
        self._credentials = credentials

    def received(self, link: int, message: Records, now: float) -> list[Effect]:
        """Take in the records of a message, and relay the deltas among them that are new."""
        is_known_row = self._presence.is_known
        entries = [
            (data, held)
            for data, held in message.entries
            if _kind(data) != _ROW or not is_known_row(data, link)  # most rows are known
        ]
        if not entries:
            return []
        delivery = _Delivery(link, now)
        result: list[Effect] = []
        for data, held in entries:
            if result and self._links.get(link) is None:  # the record before this one revoked the link's peer
                break
            if _kind(data) == _ROW or not self._is_known(data, held, delivery):
                result += self._judge(data, held, delivery)
        result += self._pass_on(delivery, is_push=len(message.entries) == 1)
        return result + self._anti_entropy.received(link, delivery.record_ids)

    def _pass_on(self, delivery: _Delivery, *, is_push: bool) -> list[Effect]:
        """Relay what was new. A message of a single record is taken for a push."""
        fresh = [delta for delta in delivery.fresh if delta.record_id in self._ledger]
        if not fresh:
            return []
        if is_push and delivery.is_held:
            return self._push.relay(fresh[0], delivery.link, delivery.now)
        # All others know already what a node learns just after its start.
        if is_push or self._anti_entropy.synced_once:
            return self._push.tell(fresh, {delivery.link})
        return []

    def _is_known(self, data: bytes, held: bool, delivery: _Delivery) -> bool:
        """Whether these very bytes were taken in before. Most were, and need no second signature check."""
        record_id = self._ledger.id_of(data)
        if record_id is None:
            return False
        self._note(record_id, held, delivery)
        return True

    def _note(self, record_id: bytes, held: bool, delivery: _Delivery) -> None:
        delivery.record_ids.append(record_id)
        self._hint(record_id, held, delivery)
        self._push.known_to(record_id, delivery.link)

    def _hint(self, record_id: bytes, held: bool, delivery: _Delivery) -> None:
        if held:
            self._holdings.hint(record_id, delivery.link)
        else:
            self._holdings.lacks(record_id, delivery.link, delivery.now)

    def _judge(self, data: bytes, held: bool, delivery: _Delivery) -> list[Effect]:
        """Take in a record if it is valid, blame its sender if not."""
        envelope = None
        try:
            if _kind(data) in _CREDENTIALS:
                return self._credentials.received(data, delivery.link, delivery.now)
            envelope = open_envelope(data, self._swarm_id)
            if envelope.kind is Kind.ROW:
                return self._membership_row(envelope, delivery)
            return self._delta(envelope, held, delivery)
        except NoRoomError:
            return []
        except PeerError as error:
            is_others = envelope is not None and not self._is_author(envelope, delivery.link)
            relayed = is_others or _kind(data) in _CREDENTIALS  # owners sign these, and members hand them on
            return [Blame(delivery.link, str(error), offence_in_record(error, relayed=relayed))]

    def _is_author(self, envelope: Envelope, number: int) -> bool:
        link = self._links.get(number)
        return link is not None and link.node_id == envelope.author

    def _membership_row(self, envelope: Envelope, delivery: _Delivery) -> list[Effect]:
        if self._charter.role_of(envelope.author) is None:
            return self._vetting.stranger(delivery.link, delivery.now)
        return self._presence.received(parse_row(envelope), delivery.link, delivery.now)

    def _delta(self, envelope: Envelope, held: bool, delivery: _Delivery) -> list[Effect]:
        delivery.record_ids.append(envelope.record_id)
        result = [] if envelope.record_id in self._ledger else self._new_delta(envelope, delivery)
        delivery.is_held = held
        self._hint(envelope.record_id, held, delivery)
        return result

    def _new_delta(self, envelope: Envelope, delivery: _Delivery) -> list[Effect]:
        delta = parse_delta(envelope, self._layout)
        if delta.body.codec != self._codec:  # another codec could multiply everybody's traffic
            raise MalformedError(f"codec {delta.body.codec}, where the manifest says {self._codec}")
        if not self._charter.counts(delta.author, delta.round):
            return self._vetting.stranger(delivery.link, delivery.now)
        if delta.round <= self._ledger.floor:
            self._ledger.note_last(delta.author, delta.round, delta.record_id)  # its author does take part
            return []
        if not self._clock.allows(delta.round, delivery.now):
            raise ImplausibleError(f"round {delta.round} is too early for this swarm's age")
        if not self._clock.is_near(delta.round, delivery.now):
            return []
        result = self._holdings.add(delta, delivery.link, delivery.now)
        if result:
            delivery.fresh.append(delta)
        return result
