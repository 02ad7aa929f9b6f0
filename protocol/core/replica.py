"""One node's protocol core: the ledger and the state machines around it, behind one door.

`handle(event, now)` takes one event and returns the effects to carry out, in order; `next_wake` says when
to send a Wake. `now` is seconds of a monotonic clock. The daemon and the simulator drive the same object.

This module decides which state machine an event or a message concerns; that machine decides what comes of it.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.admission.charter import Charter
from gossamer.protocol.admission.vetting import Vetting
from gossamer.protocol.claims import Claims
from gossamer.protocol.core.credentials import Credentials
from gossamer.protocol.core.intake import Intake
from gossamer.protocol.core.peering import Peering
from gossamer.protocol.effects import Effect
from gossamer.protocol.errors import PeerError, UnsupportedError
from gossamer.protocol.events import Event
from gossamer.protocol.fetching.fetch import Fetcher
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.author import Author
from gossamer.protocol.gossip.dealing import Dealing
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.gossip.offers import Offers
from gossamer.protocol.gossip.push import Push
from gossamer.protocol.history.absence import ROUNDS_UNDER_WAY, known_up_to
from gossamer.protocol.history.catchup import CatchUp
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.history.sealing import Sealing
from gossamer.protocol.history.snapshot_pull import SnapshotPull
from gossamer.protocol.history.witnesses import Witnesses
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.presence import NodeInfo, Presence
from gossamer.protocol.membership.roster import Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.offence import Offence
from gossamer.protocol.records import Delta, RowBody
from gossamer.protocol.sampling import RandomSource
from gossamer.protocol.unix_time import UnixTime

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
        self.charter = Charter(manifest.admission, manifest.swarm_id)
        self.roster = Roster(identity.node_id)
        self.ledger = Ledger(lambda author: author == identity.node_id or self.roster.get(author) is not None)
        self.links = Links(
            identity.node_id, self.roster, info.bootstrap, rng, pins=info.pins, remembered=info.remembered
        )
        self._unix_time = UnixTime(unix_offset_s)
        self.vetting = Vetting(self.charter, self.links, rng, self._unix_time)
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
        self._author = Author(identity, self.swarm_id, self.layout, self.charter, self.ledger, self.holdings)
        self._clock = SwarmClock(
            manifest,
            self.charter,
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
            self.charter,
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
            self.charter,
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
    def own_row(self) -> RowBody:
        """Our row as the others see it."""
        return self.presence.row

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
                self.charter.learn(data)
        stored = list(deltas)
        sealed = max([floor, *(claim.round for claim in claims)])
        extent = known_up_to(sealed, {delta.round for delta in stored})
        self.sealing.restore(claims, floor, extent)
        signed = [delta.round for delta in stored if delta.author == self.identity.node_id]
        self._author.restore([own_last, *signed], is_copy=is_copy)  # whether these deltas count or not
        counting = [delta for delta in stored if self.charter.counts(delta.author, delta.round)]
        revoked = [delta for delta in stored if not self.charter.counts(delta.author, delta.round)]
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
        company = frozenset(member.row.node_id for member in self.roster.live())
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
            case msg.Holding():
                return self._holding(link, message)
            case msg.Parts():
                return self._parts(link, message, now)
            case msg.Compare():
                return self.anti_entropy.compare(link, message)
            case msg.Inventory():
                return self.anti_entropy.inventory(link, message)
            case msg.Request():
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
            case msg.Ask():
                return self._ask(link, message)
            case msg.Decline():
                self.fetcher.failed(link, message.blob, now)
                return []
            case msg.CharterSummary():
                return self.vetting.exchange(link, message)
        return [fx.Blame(link, "message without a handler", Offence.NONSENSE)]

    def _holding(self, link: int, message: msg.Holding) -> list[Effect]:
        self._author.heard(message.record_ids)
        result: list[Effect] = []
        for record_id in message.record_ids:
            self.holdings.hint(record_id, link)
            self.push.known_to(record_id, link)
            result += self.dealing.heard(record_id, link)
        return result

    def _parts(self, link: int, message: msg.Parts, now: float) -> list[Effect]:
        delta = self.ledger.get(message.record_id)
        if delta is None:
            return self.anti_entropy.heard_of(link, message.record_id, now)
        self.holdings.hint_parts(delta, message.places, link)
        return self.dealing.heard_parts(message.record_id, message.places, now)

    def _ask(self, link: int, message: msg.Ask) -> list[Effect]:
        known = self.links.get(link)
        if known is None or not known.outbound:
            return [fx.Blame(link, "asked for a chunk that it could get itself", Offence.NONSENSE)]
        return [fx.Put(link, message.blob)]
