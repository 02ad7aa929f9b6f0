"""One node's protocol core: the ledger and the state machines around it, behind one door.

`handle(event, now)` takes one event and returns the effects to carry out, in order; `next_wake` says when
to send a Wake. `now` is seconds of a monotonic clock. The daemon and the simulator drive the same object.

Inbound bytes are checked in the order length, signature, admission, bounds, plausibility, set rules; what
fails any of them costs its sender a `Blame` and reaches nothing else.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from gossamer.protocol import effects as fx
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.admission import Charter, Revocation, Role
from gossamer.protocol.chunks import chunk_sizes
from gossamer.protocol.effects import Effect, Event, RandomSource
from gossamer.protocol.envelope import Envelope, Kind, open_envelope, seal
from gossamer.protocol.errors import (
    ImplausibleError,
    MalformedError,
    PeerError,
    RefusedError,
    UnsupportedError,
)
from gossamer.protocol.fetch import Fetcher
from gossamer.protocol.gossip import Gossip
from gossamer.protocol.greylist import Offence, offence_in_record
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.ledger import Added, Ledger
from gossamer.protocol.links import Links
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership import Membership
from gossamer.protocol.offers import Offers
from gossamer.protocol.pace import is_plausible, round_clock
from gossamer.protocol.presence import NodeInfo, Presence
from gossamer.protocol.records import Delta, PeerBody, parse_delta, parse_peer
from gossamer.protocol.roster import Health, Roster
from gossamer.protocol.sealing import Claims, Sealing
from gossamer.protocol.vetting import Vetting


class Replica:
    """The core of one node."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        info: NodeInfo,
        has_chunk: Callable[[bytes], bool],
        unix_offset_s: float,
        rng: RandomSource,
    ) -> None:
        self.identity = identity
        self.manifest = manifest
        self.info = info
        self.layout = manifest.plan()
        self.swarm_id = manifest.swarm_id
        self.ledger = Ledger()
        self.charter = Charter(manifest.admission, manifest.swarm_id)
        self.roster = Roster(identity.node_id)
        self.links = Links(identity.node_id, self.roster, info.bootstrap, rng, pins=info.pins)
        self.vetting = Vetting(self.charter, self.links, rng, unix_offset_s)
        self.membership = Membership(self.roster, rng)
        self.offers = Offers()
        self.gossip = Gossip(self.ledger, self.holds, rng, self.offers.promise)
        self.fetcher = Fetcher(has_chunk, rng)
        self.sealing = Sealing(manifest, is_first=not info.bootstrap)
        self._rng = rng
        self._unix_offset_s = unix_offset_s
        self._held: set[bytes] = set()
        self._voided: list[Delta] = []
        """What revocations took out of the ledger. It stays on disk until its round closes: Phi may hold it
        still, and can only be rid of it with its payload."""
        self._now = 0.0
        self._began = math.inf
        self._signing: int = 0
        self._own_last_id = b""
        self.own_last_spread = True
        """Whether somebody else holds our last delta, payload and all: we may go without losing it."""
        self._synced_at: float | None = None
        self.presence = Presence(
            identity,
            self.swarm_id,
            info,
            self.roster,
            self.links,
            rng,
            standing=lambda: (self.own_last, self.sealing.claims),
        )

    # -- what others ask

    def holds(self, record_id: bytes) -> bool:
        """Whether a delta's payload is here, all of it."""
        return record_id in self._held

    @property
    def own_last(self) -> int:
        """The highest round we have signed a delta for, 0 if none."""
        return max(self._signing, self.ledger.last_round(self.identity.node_id))

    @property
    def clock(self) -> int:
        """The swarm's round clock as we see it. Who has never published has no say in it yet, but counts.

        A claim of the far future is nobody's: to follow it would be to sign what all others refuse.
        """
        last_round = self.ledger.last_round
        rounds = [
            max(peer.body.round, last_round(peer.node_id))
            for peer in [member.peer for member in self.roster.live()]
            if peer.body.trains and self.charter.role_of(peer.node_id) is Role.TRAIN
        ]
        said = [r for r in (*rounds, self.own_last) if r > 0]
        unix_s = self._now + self._unix_offset_s
        if said and not is_plausible(max(said), self.manifest, unix_s):
            said = [r for r in said if is_plausible(r, self.manifest, unix_s)]
        return round_clock(said, members=len(rounds) + self.info.trains)

    @property
    def horizon(self) -> int:
        """The newest round that the swarm can have reached: later ones are not merged until it has.

        Whoever signs for later ones would have those to itself, with nobody's delta beside its own to clip
        it by.
        """
        return max(self.clock + 1, self.ledger.horizon)

    @property
    def caught_up(self) -> bool:
        """Whether we may train: nobody to learn from, or a peer's ledger seen and its payloads here.

        What is published meanwhile does not count: on a slow line some of it is always under way.
        A node with deltas of its own on its own disk goes on once it has compared notes with a peer, or found
        none for a while: its folder may be an old copy, and no round may be signed twice. One that hears of
        its own deltas from others lost its disk, and must learn of all of them first.
        """
        alone = not self.info.bootstrap and not self.links
        if self._signing > 0:
            waited = self._now > self._began + limits.RESUME_PATIENCE_S
            return alone or self._synced_at is not None or waited
        return alone or (self._synced_at is not None and self.fetcher.lacking(self._synced_at) == 0)

    @property
    def own_row(self) -> PeerBody:
        """Our row as the others see it."""
        return self.presence.row

    def next_wake(self) -> float:
        """When `handle(Wake())` is due."""
        return min(
            self.presence.deadline(),
            self.gossip.deadline(),
            self.membership.deadline(),
            self.links.deadline(),
            self.vetting.deadline(),
            self.fetcher.deadline(),
            self.offers.deadline(),
            self.sealing.deadline(),
        )

    # -- what happens

    def restore(
        self,
        deltas: Iterable[Delta],
        held: Iterable[bytes],
        now: float,
        *,
        claims: Claims = (),
        floor: int = 0,
        own_last: int = 0,
        credentials: Iterable[bytes] = (),
    ) -> list[Effect]:
        """Take over what a previous run stored; returns `Ready` for each delta whose payload is here.

        A delta that does not count (any more) is `Ready` too: Phi may hold it. `credentials` are grants and
        revocations; what does not verify is left out. `claims` are the snapshots
        still held, `floor` the round up to which history was closed, `own_last` our last round, should that
        have been closed too.
        """
        self.sealing.restore(claims, floor)
        self.ledger.close(floor)
        self._held.update(held)
        result: list[Effect] = []
        for data in credentials:
            with suppress(PeerError):
                self.charter.learn(data)
        for delta in deltas:
            if delta.author == self.identity.node_id:  # whether it counts or not, it was signed
                own_last = max(own_last, delta.round)
            if self.charter.counts(delta.author, delta.round):
                self.ledger.add(delta)
            else:
                self._voided.append(delta)
                result.append(fx.Ready(delta))
        self._signing = max(self._signing, own_last)
        for delta in self.ledger:
            if not self.ledger.is_void(delta):
                result += [fx.Ready(delta)] if self.holds(delta.record_id) else self._want(delta, now)
        return result

    def announce(self, addresses: tuple[str, ...]) -> list[Effect]:
        """Tell where we can be dialled, once that is known."""
        return self.presence.announce(addresses)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event."""
        self._now = now
        self._began = min(self._began, now)
        result = self._dispatch(event, now)
        result += self.fetcher.plan(now)
        if self._synced_at is None and self.gossip.synced_once:
            self._synced_at = now
        return result

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case fx.Received():
                return self._received(event, now)
            case fx.Wake():
                return self._wake(now)
            case fx.Publish():
                return self._publish(event)
            case fx.Stored():
                return self._stored(event.delta)
            case fx.ChunkArrived():
                return self._complete(self.fetcher.arrived(event.blob))
            case fx.ChunkFailed():
                self.fetcher.failed(event.link, event.blob, now)
                return []
            case fx.Need():
                return self._need(event, now)
            case fx.LinkUp():
                return self._link_up(event, now)
            case fx.LinkDown():
                return self._link_down(event.link, now)
            case fx.DialFailed():
                self.links.dial_failed(event.address, now)
                return []
            case fx.Progress():
                self.presence.progress(event)
                return []
            case fx.Sealed():
                self.sealing.sealed(event.claims)
                self.presence.changed()
                return []
            case fx.Adopted():
                self.sealing.adopted(event.claim)
                self.presence.changed()
                return [self._close(event.claim.round)]
            case fx.Deliver():
                return self._credential(event.data, None)
            case fx.Leave():
                return self.presence.leave()

    def _wake(self, now: float) -> list[Effect]:
        return [
            *self.presence.wake(now),
            *self.links.wake(now),
            *self.vetting.wake(now),
            *self._judge(now),
            *self.gossip.wake(now),
            *self.offers.wake(now),
            *self._look_at_history(now),
        ]

    def _look_at_history(self, now: float) -> list[Effect]:
        if now < self.sealing.deadline():
            return []
        others = [member.peer.body.claims for member in self.roster.live()]
        quiet = self.fetcher.pending == 0
        result = self.sealing.wake(now, self.clock, others, quiet, self._claims_of_contributors)
        return [self._close(effect.round) if isinstance(effect, fx.Close) else effect for effect in result]

    def _claims_of_contributors(self) -> list[Claims]:
        authors = {delta.author for delta in self.ledger if self.holds(delta.record_id)}
        return [m.peer.body.claims for m in self.roster.live() if m.peer.node_id in authors]

    def _close(self, floor: int) -> fx.Close:
        dropped = [*self.ledger.close(floor), *(delta for delta in self._voided if delta.round <= floor)]
        self._voided = [delta for delta in self._voided if delta.round > floor]
        for delta in dropped:
            self._held.discard(delta.record_id)
            self.fetcher.forget(delta.record_id)
            self.offers.forget(delta.record_id)
        return fx.Close(floor, tuple(dropped))

    def _need(self, event: fx.Need, now: float) -> list[Effect]:
        """Fetch chunks; whoever claims the snapshot with this root has them.

        A delta that we held and must fetch again does not count as held meanwhile.
        """
        self._held.discard(event.key)
        result = self._complete(self.fetcher.want(event.key, event.chunks, now))
        for link in self.links.all():
            member = self.roster.get(link.node_id)
            if member is not None and any(claim.root == event.key for claim in member.peer.body.claims):
                self.fetcher.hint(link.number, event.key)
        return result

    # -- links

    def _judge(self, now: float) -> list[Effect]:
        if now < self.membership.deadline():
            return []
        return [*self.membership.wake(now), *self._drop_dead_links(now)]

    def _drop_dead_links(self, now: float) -> list[Effect]:
        """A link to a member that is down may stay open for a quarter of an hour and lead nowhere.

        So may one to a member that others vouch for: TCP doubles its time-out while a path is broken, and
        would sleep for as long again once the path works.
        """
        result: list[Effect] = []
        for link in self.links.all():
            member = self.roster.get(link.node_id)
            is_down = member is not None and member.health is Health.DOWN
            if is_down or self.membership.is_silent(link.number, now):
                result += [fx.Hangup(link.number, "does not answer"), *self._forget_link(link.number, now)]
        return result

    def _link_up(self, event: fx.LinkUp, now: float) -> list[Effect]:
        try:
            self.vet(event.node_id, event.credential, now)
        except RefusedError as error:  # a revocation came, or its grant ran out, since the handshake began
            return [fx.Hangup(event.link, str(error))]
        stays, result = self.links.up(event, now)
        if not stays:
            return [*self.presence.all_rows(event.link), *result]
        self.membership.link_up(event.link, event.node_id, now)  # before the old one goes: nobody is missing
        for hangup in list(result):
            if isinstance(hangup, fx.Hangup):
                result += self._forget_link(hangup.link, now)
        self.fetcher.link_up(event.link, event.outbound)
        if event.credential:
            with suppress(PeerError):  # an open swarm lets anybody in, whatever they show
                result += self._credential(event.credential, event.link)
        if self.links.get(event.link) is None:  # what it showed was its own revocation
            return result
        result += self.vetting.link_up(event.link)
        result.append(fx.Send(event.link, msg.Records(((self.presence.data, False),))))
        opening = self.gossip.link_up(event.link)
        if event.outbound:
            result += [*opening, fx.Send(event.link, self.presence.summary(answer=False))]
        return result

    def _link_down(self, number: int, now: float) -> list[Effect]:
        return self._forget_link(number, now) if self.links.get(number) else []

    def _forget_link(self, number: int, now: float) -> list[Effect]:
        self.links.down(number)
        self.gossip.link_down(number)
        self.vetting.link_down(number)
        self.fetcher.link_down(number)
        self.offers.link_down(number)
        return self.membership.link_down(number, now)

    # -- messages

    def _received(self, event: fx.Received, now: float) -> list[Effect]:
        if self.links.get(event.link) is None:
            return []
        self.membership.heard_on(event.link, now)
        try:
            message = msg.decode(event.data)
        except PeerError as error:
            known = not isinstance(error, UnsupportedError)
            offence = Offence.MALFORMED if known else Offence.UNSUPPORTED
            return [fx.Blame(event.link, str(error), offence), fx.Hangup(event.link, "malformed message")]
        return self._message(event.link, message, now)

    def _message(self, link: int, message: msg.Message, now: float) -> list[Effect]:
        match message:
            case msg.Records():
                return self._records(link, message, now)
            case msg.Holding():
                self.own_last_spread |= self._own_last_id in message.record_ids
                for record_id in message.record_ids:
                    self._held_by(link, record_id)
                return []
            case msg.Compare():
                return self.gossip.compare(link, message)
            case msg.Inventory():
                return self.gossip.inventory(link, message)
            case msg.Request():
                return self.gossip.request(link, message.record_ids)
            case msg.Roster():
                return self.presence.exchange(link, message)
            case msg.Ping():
                return self.membership.ping(link, message)
            case msg.Ack():
                return self.membership.ack(link, message, now)
            case msg.PingFor():
                return self.membership.ping_for(link, message, now)
            case msg.Suspect():
                if message.node_id == self.identity.node_id:
                    return self.presence.refute(link, message)
                return self.membership.suspicion(link, message, now)
            case msg.Ask():
                return self._ask(link, message)
            case msg.Decline():
                self.fetcher.failed(link, message.blob, now)
                return []
            case msg.Charter():
                return self.vetting.exchange(link, message)
        return [fx.Blame(link, "message without a handler", Offence.NONSENSE)]

    def _ask(self, link: int, message: msg.Ask) -> list[Effect]:
        known = self.links.get(link)
        if known is None or not known.outbound:
            return [fx.Blame(link, "asked for a chunk that it could get itself", Offence.NONSENSE)]
        return [fx.Put(link, message.blob)]

    # -- records

    def _records(self, link: int, message: msg.Records, now: float) -> list[Effect]:
        result: list[Effect] = []
        fresh: list[Delta] = []
        delivered: list[bytes] = []
        for data, held in message.entries:
            if self.links.get(link) is None:  # the record before this one was its peer's revocation
                break
            envelope = None
            known = self.ledger.id_of(data)
            if known is not None:
                delivered.append(known)
                if held:
                    self._held_by(link, known)
                continue
            if self.presence.is_known(data, link):
                continue
            try:
                if data[0] in (Kind.GRANT, Kind.REVOCATION):
                    result += self._credential(data, link)
                    continue
                envelope = open_envelope(data, self.swarm_id)
                if envelope.kind is Kind.PEER:
                    result += self._peer_row(envelope, link, now)
                    continue
                delivered.append(envelope.record_id)
                result += self._delta(envelope, fresh, link, now)
                if held:
                    self._held_by(link, envelope.record_id)
            except PeerError as error:
                relayed = envelope is not None and not self._is_author(envelope, link)
                result.append(fx.Blame(link, str(error), offence_in_record(error, relayed=relayed)))
        fresh = [delta for delta in fresh if delta.record_id in self.ledger]
        if fresh:
            result += self.gossip.push(fresh, source=link)
        return result + self.gossip.received(link, delivered)

    def _held_by(self, link: int, record_id: bytes) -> None:
        self.fetcher.hint(link, record_id)
        self.offers.heard(record_id, link)

    def _is_author(self, envelope: Envelope, number: int) -> bool:
        link = self.links.get(number)
        return link is not None and link.node_id == envelope.author

    def _peer_row(self, envelope: Envelope, link: int, now: float) -> list[Effect]:
        if self.charter.role_of(envelope.author) is None:
            return self.vetting.stranger(link, now)
        return self.presence.received(parse_peer(envelope), link, now)

    def _delta(self, envelope: Envelope, fresh: list[Delta], link: int, now: float) -> list[Effect]:
        if envelope.record_id in self.ledger:
            return []
        delta = parse_delta(envelope, self.layout)
        if delta.body.codec != self.manifest.outer.codec:  # another could multiply everybody's traffic
            raise MalformedError(
                f"codec {delta.body.codec}, where the manifest says {self.manifest.outer.codec}"
            )
        if not self.charter.counts(delta.author, delta.round):
            return self.vetting.stranger(link, now)
        if delta.round <= self.ledger.floor:
            return []
        if not is_plausible(delta.round, self.manifest, now + self._unix_offset_s):
            raise ImplausibleError(f"round {delta.round} is too early for this swarm's age")
        added = self.ledger.add(delta)
        if added is Added.KNOWN:
            return []
        fresh.append(delta)
        stored: list[Effect] = [fx.Store(delta, own=False)]
        if added is Added.VOIDED:
            for record_id in self.ledger.ids(delta.round):
                other = self.ledger.get(record_id)
                if other is not None and other.author == delta.author:
                    self.fetcher.forget(record_id)
                    self.offers.forget(record_id)
            text = f"{short(delta.author)} signed two deltas for round {delta.round}: both are void"
            return [*stored, fx.Ready(delta), fx.Notice(text)]
        return stored + self._want(delta, now)

    def _want(self, delta: Delta, now: float) -> list[Effect]:
        sizes = chunk_sizes(delta.body.payload_bytes)
        chunks = tuple(zip(delta.body.chunks, sizes, strict=True))
        return self._complete(self.fetcher.want(delta.record_id, chunks, now))

    def _complete(self, fetched: list[Effect]) -> list[Effect]:
        """Deltas whose payload is complete are merged, and offered to those of our links that lack it."""
        result: list[Effect] = []
        for effect in fetched:
            delta = self.ledger.get(effect.key) if isinstance(effect, fx.Fetched) else None
            if delta is None:
                result.append(effect)
                continue
            self._held.add(delta.record_id)
            result.append(fx.Ready(delta))
            author = self.links.to(delta.author)
            if author is not None and delta.round == self.ledger.last_round(delta.author):
                self.offers.promise(delta.record_id, author.number)  # it wants to know that its last is safe
            self.offers.complete(delta.record_id, self._now)
        return result

    # -- who is let in

    def vet(self, node_id: bytes, credential: bytes, now: float) -> None:
        """May this node, showing this credential, speak to us? Raises RefusedError."""
        self.charter.vet(node_id, now + self._unix_offset_s, credential)

    def vet_question(self, node_id: bytes, credential: bytes, now: float) -> None:
        """May it ask how we are doing? Owners may, besides members. Raises RefusedError."""
        if not self.charter.is_owner(node_id):
            self.vet(node_id, credential, now)

    def own_credential(self, now: float) -> bytes:
        """What we show at doors; empty where none is needed."""
        return self.charter.credential_of(self.identity.node_id, now + self._unix_offset_s)

    def _credential(self, data: bytes, link: int | None) -> list[Effect]:
        """Take in a grant or a revocation, and tell everybody of it. Raises PeerError."""
        record = self.charter.learn(data)
        if record is None:
            return []
        result: list[Effect] = [fx.StoreCredential(record.record_id, record.data)]
        result += self.vetting.spread(record, source=link)
        if isinstance(record, Revocation):
            return [*result, *self._expel(record)]
        for other in self.vetting.met_strangers():  # what we passed over may count now
            result += [*self.gossip.open_exchange(other), fx.Send(other, self.presence.summary(answer=False))]
        return [*result, fx.Notice(f"{short(record.node_id)} may {record.role.name.lower()} in this swarm")]

    def _expel(self, revocation: Revocation) -> list[Effect]:
        """Cut a revoked member's links, forget it, and merge anew the rounds that it had part in."""
        if revocation.node_id == self.identity.node_id:
            return [fx.Expelled(revocation.reason)]
        dropped = self.ledger.drop(revocation.node_id, revocation.last_round)
        result: list[Effect] = []
        for delta in dropped:
            self._held.discard(delta.record_id)
            self.fetcher.forget(delta.record_id)
            result.append(fx.Ready(delta))
        self._voided += dropped
        for known in self.links.all():
            if known.node_id == revocation.node_id:
                result.append(fx.Hangup(known.number, "revoked"))
                result += self._forget_link(known.number, self._now)
        self.roster.remove(revocation.node_id)
        self.presence.forget(revocation.node_id)
        text = f"{short(revocation.node_id)} was revoked by an owner: what it signed after round"
        return [*result, fx.Notice(f"{text} {revocation.last_round} is void ({len(dropped)} deltas here)")]

    # -- our own deltas

    def _publish(self, event: fx.Publish) -> list[Effect]:
        if event.body.round <= self.own_last:
            return [fx.Notice(f"not signing round {event.body.round} again: {self.own_last} was our last")]
        if not self.charter.counts(self.identity.node_id, event.body.round):
            return [fx.Notice("this node was invited to observe, not to train: its delta goes nowhere")]
        previous = self.ledger.last_record(self.identity.node_id)
        body = replace(event.body, previous=previous)
        envelope = seal(self.identity, Kind.DELTA, self.swarm_id, body.pack())
        try:
            delta = parse_delta(envelope, self.layout)
        except MalformedError as error:  # a loss that is not finite, say: nobody would take it
            return [fx.Notice(f"not publishing round {event.body.round}: {error}")]
        self._signing = event.body.round
        return [fx.Store(delta, own=True)]

    def _stored(self, delta: Delta) -> list[Effect]:
        self._own_last_id = delta.record_id
        self.own_last_spread = False
        self.ledger.add(delta)
        self._held.add(delta.record_id)
        self.presence.changed()
        return [fx.Ready(delta), *self.gossip.push([delta], source=None)]
