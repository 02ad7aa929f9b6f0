"""One node's protocol core: the ledger and the state machines around it, behind one door.

`handle(event, now)` takes one event and returns the effects to carry out, in order; `next_wake` says when
to send a Wake. `now` is seconds of a monotonic clock. The daemon and the simulator drive the same object.

This module decides which state machine an event or a message concerns; that machine decides what comes of it.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import AccessList, Grant, Revocation, Vetting
from gossamer.protocol.claims import Claims
from gossamer.protocol.effects import Blame, Effect, Expelled, Hangup, Notice, Send, StoreCredential
from gossamer.protocol.errors import (
    ImplausibleError,
    MalformedError,
    NoRoomError,
    Offence,
    PeerError,
    RefusedError,
    UnsupportedError,
    offence_in_record,
)
from gossamer.protocol.events import Event, LinkUp
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Author, Dealing, Holdings, Offers, Push
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.history.forks import Witnesses
from gossamer.protocol.history.joining import ROUNDS_UNDER_WAY, CatchUp, known_up_to
from gossamer.protocol.history.snapshots import Sealing, SnapshotPull
from gossamer.protocol.identity import Identity
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.member_records import NodeInfo, Presence
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.messages import Records
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import (
    Delta,
    Envelope,
    MemberRecordBody,
    RecordKind,
    open_envelope,
    parse_delta,
    parse_member_record,
)
from gossamer.protocol.sampling import RandomSource
from gossamer.protocol.unix_time import UnixTime

# --- What the coming and going of a link means to every state machine that keeps something per link.


class Peering:
    """Takes links up and down in all state machines at once."""

    def __init__(
        self,
        links: Links,
        roster: Roster,
        vetting: Vetting,
        membership: Swim,
        presence: Presence,
        push: Push,
        anti_entropy: AntiEntropy,
        fetcher: Fetcher,
        offers: Offers,
        dealing: Dealing,
    ) -> None:
        self._links = links
        self._roster = roster
        self._vetting = vetting
        self._membership = membership
        self._presence = presence
        self._push = push
        self._anti_entropy = anti_entropy
        self._fetcher = fetcher
        self._offers = offers
        self._dealing = dealing

    def up(self, event: LinkUp, now: float) -> list[Effect]:
        """Take up a link, perhaps in place of another, or turn it away."""
        try:
            self._vetting.vet(event.node_id, event.credential, now)
        except RefusedError as error:  # a revocation came, or its grant ran out, since the handshake began
            return [Hangup(event.link, str(error))]
        stays, result = self._links.up(event, now)
        if not stays:
            return [*self._presence.all_rows(event.link), *result]
        # Before an old link of the same node goes, so that nobody seems to be missing.
        self._membership.link_up(event.link, event.node_id, now)
        for hangup in list(result):
            if isinstance(hangup, Hangup):
                result += self._forget(hangup.link, now)
        self._fetcher.link_up(event.link, event.outbound)
        return result

    def greet(self, link: int, *, outbound: bool) -> list[Effect]:
        """Say over a new link who we are. The end that dialled also begins to compare ledgers and rosters."""
        result = self._vetting.link_up(link)
        result.append(Send(link, Records(((self._presence.data, False),))))
        self._push.link_up(link)
        opening = self._anti_entropy.link_up(link)
        if outbound:
            result += [*opening, Send(link, self._presence.summary(answer=False))]
        return result

    def down(self, number: int, now: float) -> list[Effect]:
        """A link is gone. If we gave it up ourselves, there is nothing left to do."""
        return self._forget(number, now) if self._links.get(number) else []

    def cut(self, node_id: bytes, reason: str, now: float) -> list[Effect]:
        """Hang up on a node."""
        numbers = [link.number for link in self._links.all() if link.node_id == node_id]
        return [effect for number in numbers for effect in self._hang_up(number, reason, now)]

    def cut_all(self, reason: str, now: float) -> list[Effect]:
        """Hang up on everybody; the peers that we need are dialled again."""
        return [effect for link in self._links.all() for effect in self._hang_up(link.number, reason, now)]

    def wake(self, now: float) -> list[Effect]:
        """When membership is due, let it judge, and act on its verdicts."""
        if now < self._membership.deadline():
            return []
        return [*self._membership.wake(now), *self._drop_dead(now)]

    def _drop_dead(self, now: float) -> list[Effect]:
        """Hang up on links whose peers do not answer.

        A link to a member that is down may stay open for a quarter of an hour and lead nowhere. So may a link
        to a member that others vouch for: TCP doubles its timeout while a path is broken, and would sleep for
        as long again once the path works.
        """
        down = {m.record.node_id for m in self._roster.doubted() if m.health is Health.DOWN}
        silent = self._membership.silent_links(now)
        if not down and not silent:
            return []
        dead = [link.number for link in self._links.all() if link.node_id in down or link.number in silent]
        return [effect for number in dead for effect in self._hang_up(number, "does not answer", now)]

    def _hang_up(self, number: int, reason: str, now: float) -> list[Effect]:
        return [Hangup(number, reason), *self._forget(number, now)]

    def _forget(self, number: int, now: float) -> list[Effect]:
        self._links.down(number)
        self._push.link_down(number)
        self._anti_entropy.link_down(number)
        self._vetting.link_down(number)
        self._fetcher.link_down(number)
        self._offers.link_down(number)
        return [*self._dealing.link_down(number), *self._membership.link_down(number, now)]


# --- What follows from a new grant or revocation: whom to tell, what to ask for again, whom to cut off.


class Credentials:
    """Carries changes of the access list to the state machines that they concern."""

    def __init__(
        self,
        own_id: bytes,
        acl: AccessList,
        vetting: Vetting,
        roster: Roster,
        presence: Presence,
        anti_entropy: AntiEntropy,
        holdings: Holdings,
        peering: Peering,
    ) -> None:
        self._own_id = own_id
        self._acl = acl
        self._vetting = vetting
        self._roster = roster
        self._presence = presence
        self._anti_entropy = anti_entropy
        self._holdings = holdings
        self._peering = peering

    def received(self, data: bytes, source: int | None, now: float) -> list[Effect]:
        """Take in a grant or a revocation, and tell it to everybody but its source. Raises PeerError."""
        record = self._acl.learn(data)
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
        if self._acl.role_of(grant.node_id) is not grant.role:
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


# --- Records as they come from links: known ones are passed over, new ones are checked and taken in.
#
# The checks come in the order signature, bounds, admission, plausibility, set rules; length and form of the
# message were checked before. For rows, admission comes before bounds; for credentials, even before the
# signature. A record that fails any check but admission costs its sender a `Blame`, and goes no further. The
# other records of the same message are judged on their own.

_ROW = int(RecordKind.MEMBER)
_CREDENTIALS = frozenset(map(int, (RecordKind.GRANT, RecordKind.REVOCATION)))


def _kind(data: bytes) -> int:
    """What a record says that it is: the value of a `RecordKind`, unless the record is to be refused."""
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
        acl: AccessList,
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
        self._acl = acl
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
            if envelope.kind is RecordKind.MEMBER:
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
        if self._acl.role_of(envelope.author) is None:
            return self._vetting.stranger(delivery.link, delivery.now)
        return self._presence.received(parse_member_record(envelope), delivery.link, delivery.now)

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
        if not self._acl.counts(delta.author, delta.round):
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


BEFORE_ALL_ROUNDS = -1
"""A clock at which a trainer publishes nothing, not even its first round."""


class Replica:
    """The core of one node."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        info: NodeInfo,
        fits: Callable[[bytes, int], bool | None],
        unix_offset_s: float,
        rng: RandomSource,
    ) -> None:
        """`fits` tells whether a chunk has the given size; None if the chunk is not here. `unix_offset_s` is
        Unix time minus `now`; `TimeSet` tells when that has changed."""
        self.identity = identity
        self.manifest = manifest
        self.info = info
        self.layout = manifest.plan()
        self.swarm_id = manifest.swarm_id
        self.acl = AccessList(manifest.admission, manifest.swarm_id)
        self.roster = Roster(identity.node_id)
        self.ledger = Ledger(lambda author: author == identity.node_id or self.roster.get(author) is not None)
        self.links = Links(
            identity.node_id, self.roster, info.bootstrap, rng, pins=info.pins, remembered=info.remembered
        )
        self._unix_time = UnixTime(unix_offset_s)
        self.vetting = Vetting(self.acl, self.links, rng, self._unix_time)
        self.membership = Swim(self.roster, rng)
        self.offers = Offers()
        self.fetcher = Fetcher(fits, rng)
        self.dealing = Dealing(rng)
        self.holdings = Holdings(self.ledger, self.roster, self.links, self.fetcher, self.offers, rng)
        self.push = Push(self.ledger, self.holdings.holds, rng, self.offers.promise)
        self.anti_entropy = AntiEntropy(self.ledger, self.push, rng)
        self.sealing = Sealing(
            manifest,
            is_first=not info.bootstrap,
            trusted=info.trusted,
            tells_of=self._tells_of,
            own_last=lambda: self.own_last,
        )
        self._witnesses = Witnesses(self.sealing.genesis, self.ledger, self.roster, self.links, self.holdings)
        self._snapshot_pull = SnapshotPull(
            self.sealing,
            self._witnesses,
            self.ledger,
            self.roster,
            self.links,
            self.fetcher,
            self.holdings,
        )
        self._author = Author(identity, self.swarm_id, self.layout, self.acl, self.ledger, self.holdings)
        self._clock = SwarmClock(
            manifest,
            self.acl,
            self.roster,
            self.ledger,
            author=self._author,
            trains=info.trains,
            unix_time=self._unix_time,
        )
        self.presence = Presence(
            identity,
            self.swarm_id,
            info,
            self.roster,
            self.links,
            rng,
            standing=lambda: (self._clock.published_round, self.sealing.claims),
        )
        self._catch_up = CatchUp(
            self.ledger,
            self.links,
            self.anti_entropy,
            self.fetcher.wants,
            is_first=not info.bootstrap,
            signs=info.trains,
            clock_is_wrong=self._clock_is_wrong,
        )
        self._peering = Peering(
            self.links,
            self.roster,
            self.vetting,
            self.membership,
            self.presence,
            self.push,
            self.anti_entropy,
            self.fetcher,
            self.offers,
            self.dealing,
        )
        self._credentials = Credentials(
            identity.node_id,
            self.acl,
            self.vetting,
            self.roster,
            self.presence,
            self.anti_entropy,
            self.holdings,
            self._peering,
        )
        self._intake = Intake(
            manifest,
            self.layout,
            self.acl,
            self.links,
            self.vetting,
            self.presence,
            self.ledger,
            self.holdings,
            self.push,
            self.anti_entropy,
            self._clock,
            self._credentials,
        )
        self._now = 0.0
        self._next_turn = 0.0
        """Deadline of what is done in turns: only a Wake moves it."""

    # -- what others ask

    def holds(self, record_id: bytes) -> bool:
        """Whether a delta's payload is here, all of it."""
        return self.holdings.holds(record_id)

    @property
    def own_last(self) -> int:
        """The highest round that we have signed a delta for; 0 if none."""
        return self._author.last_round

    @property
    def own_last_spread(self) -> bool:
        """Whether another node holds our last delta, payload and all: we may leave without losing it."""
        return self._author.last_is_spread

    @property
    def clock(self) -> int:
        """The swarm's round clock as we see it."""
        return self._clock.read(self._now)

    @property
    def clock_to_publish_by(self) -> int:
        """The round clock for our trainer: `BEFORE_ALL_ROUNDS` while we do not know where the swarm is."""
        away = self.sealing.starts_over or self.sealing.may_be_outlived or self._clock.listens(self._now)
        return BEFORE_ALL_ROUNDS if away else self.clock

    @property
    def is_contradicted(self) -> bool:
        """Whether most others are at rounds that we refuse, since by our clock the swarm cannot be there yet.

        As of the last reading of the round clock, which is read all the time.
        """
        return self._clock.is_contradicted

    @property
    def horizon(self) -> int:
        """The newest round that the swarm can have reached: later ones are not merged until it has.

        A node that signs for later rounds would have them to itself, with no other delta to clip its own by.
        """
        return max(self.clock + 1, self.ledger.horizon)

    @property
    def somebody_trains(self) -> bool:
        """Whether a live member, or we, made progress lately, so that the swarm will get further."""
        return self._clock.somebody_trains(self._now)

    @property
    def rests(self) -> bool:
        """Whether nobody trains any more: the swarm will get no further."""
        return self._clock.rests(self._now)

    @property
    def caught_up(self) -> bool:
        """Whether we have learned enough from others to train."""
        return self._catch_up.is_done(has_signed=self._author.has_signed)

    @property
    def own_record(self) -> MemberRecordBody:
        """Our row as the others see it."""
        return self.presence.record

    def _clock_is_wrong(self) -> bool:
        """`is_contradicted`, from a fresh reading: a node that has just started has hardly read its clock."""
        self._clock.read(self._now)
        return self._clock.is_contradicted

    def next_wake(self) -> float:
        """When `handle(Wake())` is due."""
        return min(
            self._next_turn,
            self.membership.deadline(),
            self.fetcher.deadline(),
            self.offers.deadline(),
            self.dealing.deadline(),
            self.push.deadline(),
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
        is_copy: bool = False,
        credentials: Iterable[bytes] = (),
    ) -> list[Effect]:
        """Take over what a previous run stored; returns `Ready` for each delta whose payload is here.

        A delta that does not count (any more) is `Ready` too: Phi may hold it. `credentials` are grants and
        revocations; those that do not verify are left out. `claims` are the snapshots still held, `floor` the
        round up to which history was closed, `own_last` our last round, in case that has been closed too.
        `is_copy`: all this comes from a copy of the folder, and we may have signed more than it tells.
        """
        self._clock.begin(now)
        self.ledger.close(floor)
        for data in credentials:
            with suppress(PeerError):
                self.acl.learn(data)
        stored = list(deltas)
        sealed = max([floor, *(claim.round for claim in claims)])
        extent = known_up_to(sealed, {delta.round for delta in stored})
        self.sealing.restore(claims, floor, extent)
        signed = [delta.round for delta in stored if delta.author == self.identity.node_id]
        self._author.restore([own_last, *signed], is_copy=is_copy)  # whether these deltas count or not
        counting = [delta for delta in stored if self.acl.counts(delta.author, delta.round)]
        revoked = [delta for delta in stored if not self.acl.counts(delta.author, delta.round)]
        return self.holdings.restore(counting, revoked, held, now)

    def announce(self, addresses: tuple[str, ...]) -> list[Effect]:
        """Tell where we can be dialled, once that is known."""
        return self.presence.announce(addresses)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event."""
        has_slept = 0.0 < self._now < now - limits.SLEEP_MIN_S
        self._now = now
        result = self._woke(now) if has_slept else []
        result += self._dispatch(event, now)
        result += self.fetcher.plan(now)
        self._catch_up.observe(now)
        return result

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case ev.Received():
                return self._received(event, now)
            case ev.Wake():
                return self._wake(now)
            case ev.Publish():
                if self._author.is_copy and not self.caught_up:  # our trainer handed it in before we knew
                    text = f"not signing round {event.body.round}: no node has said yet whether we did"
                    return [fx.Notice(text)]
                return self._author.publish(event.body)
            case ev.Stored():
                return self._stored(event.delta, now)
            case ev.Paused():
                self._clock.paused()
                self.presence.changed()
                return []
            case ev.ChunkArrived():
                return self._arrived(event.blob, now)
            case ev.ChunkFailed():
                self.fetcher.failed(event.link, event.blob, now)
                return []
            case ev.Need():
                return self._snapshot_pull.need(event, now)
            case ev.LinkUp():
                return self._link_up(event, now)
            case ev.LinkDown():
                return self._peering.down(event.link, now)
            case ev.DialFailed():
                self.links.dial_failed(event.address)
                return []
            case ev.Progress():
                self.presence.progress(event)
                self._clock.progress(event.inner_steps, now)
                return []
            case ev.Sealed():
                self.sealing.sealed(event.claims)
                self.presence.changed()
                return []
            case ev.Adopted():
                self.sealing.adopted(event.claim)
                self.presence.changed()
                reach = self._clock.begin_at(event.claim.round, now)
                return [self.holdings.begin_at(event.claim.round, reach)]
            case ev.Unusable():
                self._snapshot_pull.unusable(event.claim)
                return []
            case ev.Deliver():
                return self._credentials.received(event.data, None, now)
            case ev.TimeSet():
                forward_s = self._unix_time.set_offset(event.unix_offset_s)
                return self._woke(now) if forward_s > limits.SLEEP_MIN_S else []
            case ev.Leave():
                return self.presence.leave()

    def _woke(self, now: float) -> list[Effect]:
        """This machine slept. A clock that was set looks the same, and costs a moment of silence.

        We may lack deltas of the last rounds that we know of: members that went on published for them too.
        """
        if not self.roster.members():
            return []
        self._clock.woke(now)
        extent = max(self.ledger.rounds(), default=0) - ROUNDS_UNDER_WAY
        company = frozenset(member.record.node_id for member in self.roster.live())
        self.sealing.came_back(extent, company)
        text = "this machine slept, or its clock was set: finding out where the others are before publishing"
        return [fx.Notice(text), *self._peering.cut_all("this machine slept", now)]

    def _tells_of(self, round_: int, but: Collection[bytes]) -> bool:
        """See `Sealing`. Where a payload is not here, the others may have closed the round and dropped it."""
        told = self.ledger.tells_of(round_, {self.identity.node_id, *but})
        return told and all(self.holds(delta.record_id) for delta in self.ledger.valid(round_))

    def _arrived(self, blob: bytes, now: float) -> list[Effect]:
        result = self.holdings.arrived(blob, now)
        for effect in list(result):
            if isinstance(effect, fx.Ready):
                result += self.push.arrived(effect.delta.record_id)
        return result

    def _wake(self, now: float) -> list[Effect]:
        result = [
            *self._peering.wake(now),
            *self.offers.wake(now),
            *self.dealing.wake(now),
            *self.push.wake(now),
        ]
        return result + self._take_turns(now) if now >= self._next_turn else result

    def _take_turns(self, now: float) -> list[Effect]:
        """Do what is done at intervals, whatever happens. It is done when rows are due, so that a node wakes
        up once for all of it. A node that joins or has just come back looks for its snapshot more often."""
        result = [
            *self.presence.wake(now),
            *self.links.wake(now),
            *self.vetting.wake(now),
            *self.anti_entropy.wake(now),
        ]
        self._next_turn = self.presence.deadline()
        if self._clock.listens(now):  # others may still fetch what we had not handed on
            return result
        if now >= self.sealing.deadline():
            result += self._snapshot_pull.wake(now, self.clock)
        if self.sealing.is_in_a_hurry:
            self._next_turn = min(self._next_turn, self.sealing.deadline())
        return result

    def _link_up(self, event: ev.LinkUp, now: float) -> list[Effect]:
        self._clock.linked(now)
        result = self._peering.up(event, now)
        if event.credential and self.links.get(event.link):
            with suppress(PeerError):  # an open swarm lets anybody in, whatever they show
                result += self._credentials.received(event.credential, event.link, now)
        if self.links.get(event.link) is None:  # the link was not kept, or its peer showed its own revocation
            return result
        return result + self._peering.greet(event.link, outbound=event.outbound)

    def _stored(self, delta: Delta, now: float) -> list[Effect]:
        result = self._author.stored(delta)
        if delta.record_id not in self.ledger:  # if told, others, for whom its round is open, would merge it
            return result
        self._clock.published(delta.round, now)
        self.presence.changed()
        return [*result, *self.dealing.deal(delta, set(self.links.numbers), now)]

    # -- messages

    def _received(self, event: ev.Received, now: float) -> list[Effect]:
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
                result = self._intake.received(link, message, now)
                self._snapshot_pull.hint(link)
                return result
            case msg.Have():
                return self._holding(link, message)
            case msg.HaveChunks():
                return self._parts(link, message, now)
            case msg.Digest():
                return self.anti_entropy.compare(link, message)
            case msg.RecordIds():
                return self.anti_entropy.inventory(link, message)
            case msg.GetRecords():
                return self.push.give(link, message.record_ids)
            case msg.RosterSummary():
                return self.presence.exchange(link, message)
            case msg.Ping():
                return self.membership.ping(link, message)
            case msg.Ack():
                return self.membership.ack(link, message, now)
            case msg.PingFor():
                return self.membership.ping_for(link, message, now)
            case msg.Suspect():
                if message.node_id == self.identity.node_id:
                    return self.presence.refute(link, message, now)
                return self.membership.suspicion(link, message, now)
            case msg.Want():
                return self._ask(link, message)
            case msg.Decline():
                self.fetcher.failed(link, message.blob, now)
                return []
            case msg.AclSummary():
                return self.vetting.exchange(link, message)
        return [fx.Blame(link, "message without a handler", Offence.NONSENSE)]

    def _holding(self, link: int, message: msg.Have) -> list[Effect]:
        self._author.heard(message.record_ids)
        result: list[Effect] = []
        for record_id in message.record_ids:
            self.holdings.hint(record_id, link)
            self.push.known_to(record_id, link)
            result += self.dealing.heard(record_id, link)
        return result

    def _parts(self, link: int, message: msg.HaveChunks, now: float) -> list[Effect]:
        delta = self.ledger.get(message.record_id)
        if delta is None:
            return self.anti_entropy.heard_of(link, message.record_id, now)
        self.holdings.hint_parts(delta, message.places, link)
        return self.dealing.heard_parts(message.record_id, message.places, now)

    def _ask(self, link: int, message: msg.Want) -> list[Effect]:
        known = self.links.get(link)
        if known is None or not known.outbound:
            return [fx.Blame(link, "asked for a chunk that it could get itself", Offence.NONSENSE)]
        return [fx.Put(link, message.blob)]
