"""One node's protocol core: events in, effects out.

**The idea.** The shared model Phi is a function of a set: the signed deltas that all nodes have gossiped, of
which none is ever taken back (`Ledger`). Sets unite in any order and any number of times with one result. So
nodes that hold the same set hold the same parameters, bit for bit, however the deltas came, and all that the
core has to do is to spread the set. Who counts is a set of signed records too (`AccessList`), and so is who
is there (`Roster`, where the newest record of each member wins).

**Events in, effects out.** The core does nothing itself: it opens no socket, reads no clock, and draws random
numbers only from the source that it is given. `handle(event, now)` takes what happened (a message came, a
chunk is stored, the trainer closed a window), and returns what is to be done, in order (send, dial, store,
merge). The daemon and the simulator are two adapters of the same object, so what the simulator proves holds
for the daemon. Each subject has a state machine of its own. All of them share a `Context`, append their
effects to one outbox, and return what happened where their caller has to know. This module decides whom an
event concerns. `now` is seconds of a monotonic clock.

**How a delta travels.** `Publish`: the `Author` signs it, never twice for one round, and asks the adapter to
store it; nobody hears of it yet. `Stored`: it enters the ledger, its round is due to be merged, and the
`Announcer` deals its record and its chunks out to the links. A peer's core gets the record in a message, and
checks, in this order: signature, bounds, whether the author may train, whether the swarm can be there yet.
Then `Holdings` adds it to the ledger, has it stored and asks the `Fetcher` for its chunks, and the
`Announcer` passes the record on to a few links. When all chunks are here it is merged there, too, and whoever
was sent the record hears that it can be fetched here. What is lost on the way is found by `AntiEntropy`,
which compares ledgers by digests. Two deltas of one author and round prove that its key signs twice: both are
void everywhere, for ever.

**Timers are data.** No machine waits. Each says when it is due next (`deadline`), `next_wake` is the earliest
of these, and the adapter sends a `Wake` then. What is done at intervals (member records, dialling, access
lists, anti-entropy, snapshots) is done in one go, so that an idle node rarely wakes up.

**What follows a grant or a revocation.** Both are sent to all links at once, so that a peer hears of a member
before it hears of that member's records. A grant lets us ask again for what was passed over while its node
was a stranger. A revocation cuts the node's links, forgets the member, and takes its deltas after the round
named out of the ledger: their rounds are merged again without them.

**Sleep.** If the clock jumps, this machine slept: others have given our links up and gone on. We hang up, say
nothing for the clock, and find out where the swarm is before we sign again (`_woke`).
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import Access, AccessList, Grant, Revocation
from gossamer.protocol.blocks import runs_in
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Blame, Effect, Expelled, Hangup, Notice, Outbox, Put, StoreCredential
from gossamer.protocol.errors import (
    ImplausibleError,
    MalformedError,
    NoRoomError,
    Offence,
    PeerError,
    RefusedError,
    offence_in_record,
)
from gossamer.protocol.events import Event, LinkUp
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Author, Holdings
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.gossip.codec_choice import CodecChoice
from gossamer.protocol.history.claims import PeerClaims
from gossamer.protocol.history.clock import SwarmClock
from gossamer.protocol.history.joining import ROUNDS_UNDER_WAY, CatchUp, known_up_to
from gossamer.protocol.history.snapshots import Sealing
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, Identity, node_id_of
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.member_records import Presence
from gossamer.protocol.membership.members import Health, NodeInfo, Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.merge.freshness import Freshness
from gossamer.protocol.merge.schedule import MergeSchedule, SwarmState
from gossamer.protocol.messages import Records
from gossamer.protocol.pace import stretch
from gossamer.protocol.records import (
    Claims,
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


@dataclass(slots=True)
class _Delivery:
    """One message of records: where it came from, and the deltas in it."""

    link: int
    now: float
    record_ids: list[bytes] = field(default_factory=list)
    fresh: list[Delta] = field(default_factory=list)
    """The deltas that were new to us."""


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
        self.outbox = Outbox()
        self.links = Links(identity.node_id, self.roster, info, rng, self.outbox)
        self._context = Context(
            identity, manifest, info, self.acl, self.links, self.roster, self.ledger, rng, self.outbox
        )
        self._unix_time = UnixTime(unix_offset_s)
        self.access = Access(self.acl, self.links, rng, self._unix_time, self.outbox)
        self.membership = Swim(self.roster, rng, self.outbox)
        self.fetcher = Fetcher(fits, rng, self.outbox)
        self.holdings = Holdings(self._context, self.fetcher)
        self.announcer = self.holdings.announcer
        self.anti_entropy = AntiEntropy(self._context, self.announcer)
        self._author = Author(self._context, self.holdings)
        self.codec = CodecChoice(manifest, self.outbox)
        self.sealing = Sealing(
            self._context,
            PeerClaims(self._context, self.holdings),
            self.fetcher,
            self.holdings,
            self._author,
        )
        self._clock = SwarmClock(self._context, self._author, self._unix_time)
        self.presence = Presence(identity, self.swarm_id, info, self.roster, self.links, rng, self.outbox)
        self._catch_up = CatchUp(self._context, self.anti_entropy, self.fetcher.wants, self._clock)
        self.merges = MergeSchedule(identity.node_id, self.ledger)
        self._freshness = Freshness(self.ledger, identity.node_id, len(self.layout.fragments))
        self._now = 0.0
        self._housekeeping_at = 0.0
        """When what is done at intervals is due: only a Wake moves it."""
        self._replaced: dict[bytes, tuple[int, float]] = {}
        """By node id, a link in whose place its peer has dialled another, and until when it is kept."""

    # -- what others ask

    def holds(self, record_id: bytes) -> bool:
        """Whether a delta's payload is here, all of it."""
        return self.holdings.holds(record_id)

    @property
    def own_last(self) -> int:
        """The highest round that we have signed a delta for; 0 if none."""
        return self._author.last_round

    @property
    def own_are_spread(self) -> bool:
        """Whether others hold our last delta of each fragment, payload and all: we may leave without losing
        any."""
        return self._author.last_are_spread

    @property
    def clock(self) -> int:
        """The swarm's round clock as we see it."""
        return self._clock.read(self._now)

    @property
    def turn(self) -> int:
        """How often members contribute now, see `sampling.is_drawn`."""
        return self._clock.turn

    @property
    def clock_to_publish_by(self) -> int:
        """The round clock for our trainer: `BEFORE_ALL_ROUNDS` while we do not know where the swarm is."""
        is_back = self.sealing.knows_where_it_is and not self._clock.listens(self._now)
        may_sign = self.caught_up and self.presence.is_sole(self._now)
        return self.clock if may_sign and is_back else BEFORE_ALL_ROUNDS

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
    def swarm(self) -> SwarmState:
        """How far the swarm is, and how far we are with it, as of the last event."""
        caught_up, now = self.caught_up, self._now
        return SwarmState(
            clock=self.clock,
            horizon=inf if caught_up and self._clock.rests(now) else self.horizon,
            somebody_trains=self._clock.somebody_trains(now),
            caught_up=caught_up and self.sealing.joined,
        )

    @property
    def rounds_behind(self) -> int:
        """Number of changed rounds that are not merged, without those that wait for others."""
        return self.merges.behind(self.swarm, self._now)

    @property
    def caught_up(self) -> bool:
        """Whether we have learned enough from others to train."""
        return self._catch_up.is_done(has_signed=self._author.has_signed)

    @property
    def own_record(self) -> MemberRecordBody:
        """Our member record as the others see it."""
        return self.presence.record

    def next_wake(self) -> float:
        """When `handle(Wake())` is due."""
        return min(
            self._housekeeping_at,
            self.membership.deadline(),
            self.fetcher.deadline(),
            self.announcer.deadline(),
            self.merges.deadline(),
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
        reach: int = 0,
        credentials: Iterable[bytes] = (),
        is_whole: bool = True,
    ) -> list[Effect]:
        """Take over what a previous run stored: `deltas`, and the ids of those `held` with their payloads.

        The round of a delta that does not count (any more) is merged again, too: Phi may hold it.
        `credentials` are grants and revocations; those that do not verify are left out. `claims` are the
        snapshots still held, `floor` the round up to which history was closed, `own_last` our last round, in
        case that has been closed too, `reach` the newest round that was ever merged; `is_whole` tells whether
        the newest snapshot is here with its sums.
        """
        self._clock.begin(now)
        self.ledger.close(floor)
        for data in credentials:
            with suppress(PeerError):
                self.acl.learn(data)
        stored = list(deltas)
        sealed = max([floor, *(claim.round for claim in claims)])
        extent = known_up_to(sealed, {delta.round for delta in stored})
        self.sealing.restore(claims, floor, extent, is_whole)
        own = [delta for delta in stored if delta.author == self.identity.node_id]
        self._author.restore([own_last, *(delta.round for delta in own)])  # whether these count or not
        self.codec.restore(own)
        counting = [delta for delta in stored if self.acl.counts(delta.author, delta.round)]
        revoked = [delta for delta in stored if not self.acl.counts(delta.author, delta.round)]
        if claims:
            self.merges.begin(floor, reach, now)
        self.holdings.restore(counting, revoked, held, now)
        self._mark_changed(now)
        return self.outbox.drain()

    def announce(self, addresses: tuple[str, ...]) -> list[Effect]:
        """Tell where we can be dialled, once that is known."""
        self._state_our_own()
        self.presence.announce(addresses)
        return self.outbox.drain()

    def _state_our_own(self) -> None:
        """What our member record states from now on."""
        self.presence.round, self.presence.claims = self._clock.published_round, self.sealing.whole_claims

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event."""
        has_slept = 0.0 < self._now < now - limits.LINK_SILENCE_S
        self._now = now
        if has_slept:
            self._woke(now)
        self._state_our_own()
        self._dispatch(event, now)
        self.fetcher.plan(now)
        self._catch_up.observe(now)
        self._plan_merge(now)
        return self.outbox.drain()

    def _mark_changed(self, now: float) -> None:
        for round_ in self.holdings.changed:
            self.merges.mark(round_, now)
        self.holdings.changed.clear()

    def _plan_merge(self, now: float) -> None:
        self._mark_changed(now)
        if now >= self.merges.deadline() and (merge := self.merges.plan(self.swarm, self.holds, now)):
            self.outbox.append(merge)

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case ev.Received():
                self._received(event.link, event.data, now)
            case ev.Wake():
                self._wake(now)
            case ev.Publish():
                self._publish(event, now)
            case ev.Stored():
                self._stored(event, now)
            case ev.Paused():
                self._clock.published_round = 0  # the others need not wait until we can publish again
            case ev.ChunkArrived():
                self.holdings.arrived(event.blob, now)
            case ev.ChunkFailed():
                self.fetcher.failed(event.link, event.blob, now)
            case ev.Need():
                self.sealing.need(event, now)
            case ev.LinkUp():
                self._link_up(event, now)
            case ev.LinkDown():
                if self.links.get(event.link):  # else we gave it up ourselves
                    self._forget(event.link, now)
            case ev.DialFailed():
                self.links.dial_failed(event.address)
            case ev.Progress():
                self.presence.progress(event)
                self._clock.progress(event.inner_steps, now)
            case ev.Sealed():
                self.sealing.sealed(event.claims)
            case ev.Adopted():
                self.sealing.adopted(event.claim)
                reach = self._clock.begin_at(event.claim.round, now)
                self.holdings.begin_at(event.claim.round, reach)
                self.merges.begin(event.claim.round, event.claim.round, now)
            case ev.Merged():
                if merged := self.merges.merged(event, now):
                    self._freshness.merged(event.round, merged, event.agreement, now)
            case ev.Paced():
                self._clock.turn, self._clock.turn_since = event.turn, event.since
                if self.manifest.pace.is_set_by_swarm:
                    self.sealing.stretch(stretch(event.window))
            case ev.Unusable():
                self.sealing.unusable(event.claim)
            case ev.Deliver():
                self._credential(event.data, None, now)
            case ev.TimeSet():
                if self._unix_time.set_offset(event.unix_offset_s) > limits.LINK_SILENCE_S:
                    self._woke(now)
            case ev.Leave():
                self.presence.leave()

    def _woke(self, now: float) -> None:
        """This machine slept. A clock that was set looks the same, and costs a moment of silence.

        We may lack deltas of the last rounds that we know of: members that went on published for them too.
        """
        if not self.roster.members():
            return
        self._clock.woke(now)
        extent = max(self.ledger.rounds(), default=0) - ROUNDS_UNDER_WAY
        self.sealing.came_back(extent)
        text = "this machine slept, or its clock was set: finding out where the others are before publishing"
        self.outbox.append(Notice(text))
        for link in self.links.all():
            self._hang_up(link.number, "this machine slept", now)  # the peers that we need are dialled again

    def _publish(self, event: ev.Publish, now: float) -> None:
        # Our folder may be an old copy of one that we have signed with since, or somebody may do so now.
        if not self.caught_up or not self.presence.is_sole(now):
            text = f"not signing round {event.body.round}: no node has said yet whether we did"
            self.outbox.append(Notice(text))
        else:
            round_ = event.body.round
            stated = self._freshness.stated(round_, now)
            self._freshness.published(round_, now)
            self._author.publish(replace(event.body, **stated._asdict()))

    def _stored(self, event: ev.Stored, now: float) -> None:
        delta = event.delta
        if self._author.stored(delta):  # else others, for whom its round may be open, are not told of it
            self._clock.published(delta.round, now)
            self.codec.published(delta, self.announcer.deal(delta, now, event.chunk), now)

    def _wake(self, now: float) -> None:
        if now >= self.membership.deadline():
            self.membership.wake(now)
            self._drop_dead(now)
        self.announcer.wake(now)
        if now >= self._housekeeping_at:
            self._do_housekeeping(now)

    def _do_housekeeping(self, now: float) -> None:
        """Do what is done at intervals, whatever happens. It is done when member records are due, so that a
        node wakes up once for all of it. A node that joins or has just come back looks for its snapshot more
        often."""
        self.presence.wake(now)
        self.links.wake(now)
        self.access.wake(now)
        self.anti_entropy.wake(now)
        for node_id in [node_id for node_id, (_, until) in self._replaced.items() if now >= until]:
            self._end_replaced(node_id, now)
        self._housekeeping_at = self.presence.deadline()
        if self._clock.listens(now):  # others may still fetch what we had not handed on
            return
        if now >= self.sealing.deadline():
            self.sealing.wake(now, self.clock)
        if self.sealing.is_in_a_hurry:
            self._housekeeping_at = min(self._housekeeping_at, self.sealing.deadline())

    # -- the life cycle of a link: every machine that keeps something per link learns of it here

    def _link_up(self, event: ev.LinkUp, now: float) -> None:
        self._clock.linked(now)
        self._take_up(event, now)
        if event.credential and self.links.get(event.link):
            with suppress(PeerError):  # an open swarm lets anybody in, whatever they show
                self._credential(event.credential, event.link, now)
        if self.links.get(event.link):  # else it was not kept, or its peer showed its own revocation
            self._greet(event.link, outbound=event.outbound)

    def _take_up(self, event: LinkUp, now: float) -> None:
        """Take up a link, perhaps in place of another, or turn it away.

        A link in whose place its peer has dialled another one is kept for a moment: if two processes have one
        key, the first has to hear of the second.
        """
        try:
            self.access.vet(event.node_id, event.credential, now)
        except RefusedError as error:  # a revocation came, or its grant ran out, since the handshake began
            self.outbox.append(Hangup(event.link, str(error)))
            return
        goes = self.links.up(event, now)
        if goes is not None and goes.link == event.link:
            self.presence.exchange(event.link, msg.RosterSummary((), answer=True))  # others may have room
            self.outbox.append(goes)
            return
        # Before an old link of the same node goes, so that nobody seems to be missing.
        self.membership.link_up(event.link, event.node_id, now)
        if goes is not None:
            old = self.links.get(goes.link)
            is_redialled = old is not None and old.node_id == event.node_id and not event.outbound
            if old is not None and is_redialled and not old.outbound and len(self.links) <= limits.LINKS_MAX:
                self._end_replaced(old.node_id, now)  # one at most
                self._replaced[old.node_id] = old.number, now + limits.TWIN_PATIENCE_S
            else:
                self._hang_up(goes.link, goes.reason, now)
        self.fetcher.link_up(event.link, event.outbound)

    def _end_replaced(self, node_id: bytes, now: float) -> None:
        number, _ = self._replaced.pop(node_id, (0, 0.0))
        if self.links.get(number):
            self._hang_up(number, "replaced by a newer link", now)

    def _greet(self, link: int, *, outbound: bool) -> None:
        """Say over a new link who we are. The end that dialled also begins to compare ledgers and rosters."""
        self.access.link_up(link)
        self.presence.introduced(self._now)
        self.outbox.send(link, Records(((self.presence.data, False),)))
        if outbound:
            self.anti_entropy.open_exchange(link)
            self.outbox.send(link, self.presence.summary(answer=False))

    def _drop_dead(self, now: float) -> None:
        """Hang up on links whose peers do not answer.

        A link to a member that is down may stay open for a quarter of an hour and lead nowhere. So may a link
        to a member that others vouch for: TCP doubles its timeout while a path is broken, and would sleep for
        as long again once the path works.
        """
        down = {m.record.node_id for m in self.roster.doubted() if m.health is Health.DOWN}
        silent = self.membership.silent_links(now)
        for link in self.links.all() if down or silent else ():
            if link.node_id in down or link.number in silent:
                self._hang_up(link.number, "does not answer", now)

    def _hang_up(self, number: int, reason: str, now: float) -> None:
        self.outbox.append(Hangup(number, reason))
        self._forget(number, now)

    def _forget(self, number: int, now: float) -> None:
        self.links.down(number)
        self.anti_entropy.link_down(number)
        self.access.link_down(number)
        self.fetcher.link_down(number)
        self.announcer.link_down(number)
        self.codec.link_down(number, now)
        self.membership.link_down(number, now)

    # -- changes of access: whom to tell, what to ask for again, whom to cut off

    def _credential(self, data: bytes, source: int | None, now: float) -> None:
        """Take in a grant or a revocation, and send it to everybody but its source. Raises PeerError."""
        record = self.acl.learn(data)
        if record is None:
            return
        self.outbox.append(StoreCredential(record.record_id, record.data))
        self.access.spread(record, source)
        if isinstance(record, Revocation):
            self._expel(record, now)
        else:
            self._admit(record)

    def _admit(self, grant: Grant) -> None:
        """Ask again for the records that were passed over while their author was a stranger."""
        for link in self.access.met_strangers():
            self.anti_entropy.open_exchange(link)
            self.outbox.send(link, self.presence.summary(answer=False))
        is_news = self.caught_up and not self.roster.delay_s  # not what a joiner is told, nor one of hundreds
        if is_news and self.acl.role_of(grant.node_id) is grant.role:
            text = f"{self.roster.label(grant.node_id)} may {grant.role.name.lower()} in this swarm"
            self.outbox.append(Notice(text))
        # else the node was revoked, or may do more already: what members hear first varies

    def _expel(self, revocation: Revocation, now: float) -> None:
        """Cut a revoked member's links, forget the member, and merge the rounds again that it was part of."""
        node_id, last_round = revocation.node_id, revocation.last_round
        if node_id == self.identity.node_id:
            because = f": {revocation.reason}" if revocation.reason else ""
            self.outbox.append(Expelled(f"an owner of this swarm has revoked this node{because}"))
            return
        label = self.roster.label(node_id)
        voided = self.holdings.revoke(node_id, last_round)
        for link in self.links.all():
            if link.node_id == node_id:
                self._hang_up(link.number, "revoked", now)
        self.roster.remove(node_id)
        self.presence.forget(node_id)
        text = f"{label} was revoked by an owner: what it signed after round {last_round} is void"
        self.outbox.append(Notice(f"{text} ({voided} deltas here)"))

    # -- records from links: known ones are passed over, new ones are checked and taken in
    #
    # The checks come in the order signature, bounds, admission, plausibility, set rules; length and form of
    # the message were checked before. For member records, admission comes before bounds; for credentials,
    # even before the signature. A record that fails any check but admission costs its sender a `Blame`, and
    # goes no further. The other records of the same message are judged on their own.

    def _records(self, link: int, message: Records, now: float) -> None:
        """Take in the records of a message, and relay the deltas among them that are new."""
        delivery = _Delivery(link, now)
        for data, held in message.entries:
            try:
                self._record(data, held, delivery)
            except NoRoomError:
                pass
            except PeerError as error:
                self._blame_for_record(link, data, error)
            if self.links.get(link) is None:  # that record revoked the link's peer
                break
        fresh = [delta for delta in delivery.fresh if delta.record_id in self.ledger]
        # A message of a single record is a push. All others know what a node learns just after its start.
        if fresh and (len(message.entries) == 1 or self.anti_entropy.synced_once):
            self.announcer.push(fresh, link)
        self.anti_entropy.received(link, delivery.record_ids)
        self.sealing.hint(link)

    def _record(self, data: bytes, held: bool, delivery: _Delivery) -> None:
        """Take in one record. Most were taken in before, and need no second signature check."""
        match data[0]:
            case RecordKind.DELTA:
                self._delta(data, held, delivery)
            case RecordKind.MEMBER:
                if not self.presence.is_known(data, delivery.link):
                    self._member(open_envelope(data, self.swarm_id), delivery)
            case RecordKind.GRANT | RecordKind.REVOCATION:
                self._credential(data, delivery.link, delivery.now)
            case kind:
                raise MalformedError(f"unknown record kind {kind}")

    def _blame_for_record(self, number: int, data: bytes, error: PeerError) -> None:
        link, author = self.links.get(number), node_id_of(data[1 : 1 + PUBLIC_KEY_BYTES])
        relayed = data[0] in tuple(RecordKind) and (link is None or link.node_id != author)
        self.outbox.append(Blame(number, str(error), offence_in_record(error, relayed=relayed)))

    def _member(self, envelope: Envelope, delivery: _Delivery) -> None:
        if self.acl.role_of(envelope.author) is None:
            self.access.stranger(delivery.link, delivery.now)
        else:
            self.presence.received(parse_member_record(envelope), delivery.link, delivery.now)

    def _delta(self, data: bytes, held: bool, delivery: _Delivery) -> None:
        record_id, envelope = self.ledger.id_of(data), None
        if record_id is None:
            envelope = open_envelope(data, self.swarm_id)
            record_id = envelope.record_id
        delivery.record_ids.append(record_id)
        if envelope and record_id not in self.ledger:  # else it is known under another signature
            self._new_delta(envelope, delivery)
        self.holdings.known_to(record_id, delivery.link, held=held)

    def _new_delta(self, envelope: Envelope, delivery: _Delivery) -> None:
        delta, codecs = parse_delta(envelope, self.layout), self.manifest.outer.rungs
        if delta.body.codec not in codecs:  # another codec could multiply everybody's traffic
            raise MalformedError(f"codec {delta.body.codec}, where the manifest has {', '.join(codecs)}")
        if delta.body.blocks and runs_in(delta.body.blocks)[-1][1] > self.manifest.data.blocks:
            raise MalformedError("claims blocks of the data that do not exist")
        if not self.acl.counts(delta.author, delta.round):
            self.access.stranger(delivery.link, delivery.now)
        elif delta.round <= self.ledger.floor:
            self.ledger.note_last(delta.author, delta.round, delta.record_id)  # its author does take part
        elif not self._clock.allows(delta.round, delivery.now):
            raise ImplausibleError(f"round {delta.round} is too early for this swarm's age")
        elif self._clock.is_near(delta.round, delivery.now):
            if self.holdings.add(delta, delivery.link, delivery.now):
                delivery.fresh.append(delta)

    # -- messages

    def _received(self, link: int, data: bytes, now: float) -> None:
        if self.links.get(link) is None:
            return
        self.membership.heard_on(link, now)
        try:
            message = msg.decode(data)
        except PeerError as error:
            self.outbox.append(Blame(link, str(error), Offence.MALFORMED))
            self.outbox.append(Hangup(link, "malformed message"))
            return
        match message:
            case msg.Records():
                self._records(link, message, now)
            case msg.NewDelta():
                self._records(link, Records(((message.envelope, True),)), now)
                delta = self.ledger.get(self.ledger.id_of(message.envelope) or b"")
                if delta is not None and self.links.get(link) is not None:
                    self.holdings.brought(delta, message.chunk, link, now)
            case msg.Have():
                self._author.spread(message.record_ids)
                self.codec.held(message.record_ids, link, now)
                for record_id in message.record_ids:
                    self.holdings.known_to(record_id, link, held=True)
                self.anti_entropy.offered(link, message.record_ids, now)
            case msg.HaveChunks():
                if delta := self.ledger.get(message.record_id):
                    self.holdings.parts_known_to(delta, message.places, link, now)
                else:
                    self.anti_entropy.offered(link, (message.record_id,), now)
            case msg.Digest():
                self.anti_entropy.compare(link, message)
            case msg.RecordIds():
                self.anti_entropy.record_ids(link, message)
            case msg.GetRecords():
                self.announcer.give(link, message.record_ids)
            case msg.RosterSummary():
                self.presence.exchange(link, message)
            case msg.Ping():
                self.outbox.send(link, msg.Ack(message.number))
            case msg.Ack():
                self.membership.ack(link, message, now)
            case msg.PingFor():
                self.membership.ping_for(link, message, now)
            case msg.Suspect():
                if message.node_id == self.identity.node_id:
                    self.presence.refute(link, message, now)
                else:
                    self.membership.suspicion(link, message, now)
            case msg.Want():
                if (known := self.links.get(link)) is None or not known.outbound:
                    text = "asked for a chunk that it could get itself"
                    self.outbox.append(Blame(link, text, Offence.NONSENSE))
                else:
                    self.outbox.append(Put(link, message.blob))
            case msg.Decline():
                self.fetcher.failed(link, message.blob, now)
            case msg.AclSummary():
                self.access.exchange(link, message)
