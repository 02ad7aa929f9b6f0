"""What is here of the deltas in the ledger: their records at once, their payloads when they have come.

A delta goes through `add` (its payload is wanted), `arrived` (its payload is here: `Ready`) and `close` (its
round is history). An equivocation or a revocation can void the delta at any point in between; `Ready` then
says that its round has to be merged again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from gossamer.protocol import limits
from gossamer.protocol.access.acl import AccessList
from gossamer.protocol.effects import Close, Effect, Fetched, Notice, Ready, Send, Store
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.identity import Identity
from gossamer.protocol.ledger import Added, Ledger
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.messages import Have, HaveChunks, Records
from gossamer.protocol.payloads.chunks import payload_chunk_sizes
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import Delta, DeltaBody, RecordKind, parse_delta, seal
from gossamer.protocol.sampling import RandomSource, sample

# --- Promised payloads: a link that got a record from us before its payload was here is told when it is.
#
# So every record comes with its payload or with the promise of one, and a payload spreads along the paths of
# its record, of which a node usually has several. Payloads that become complete within a moment are offered
# in
# one message, except to links that say meanwhile that they hold them too. A payload of several chunks is not
# held back until it is complete: each chunk is offered as it comes.


class Offers:
    """Links that wait to hear from us that we hold payloads."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, set[int]] = {}
        self._complete: list[bytes] = []
        self._parts: dict[tuple[bytes, int], set[int]] = {}
        """Chunks to be offered (record id and place), and the links to offer them to."""
        self._due = math.inf

    def promise(self, record_id: bytes, link: int) -> None:
        """A link is sent a record whose payload is not here yet."""
        self._waiting.setdefault(record_id, set()).add(link)

    def heard(self, record_id: bytes, link: int) -> None:
        """A link's peer says that it holds a payload, so it has no use for ours."""
        waiting = self._waiting.get(record_id)
        if waiting is not None:
            waiting.discard(link)

    def heard_part(self, record_id: bytes, place: int, link: int) -> None:
        """A link's peer says that it holds a chunk."""
        if (record_id, place) in self._parts:
            self._parts[record_id, place].discard(link)

    def part(self, record_id: bytes, place: int, links: set[int], now: float) -> None:
        """A chunk of a payload is here; tell these links."""
        if links:
            self._parts.setdefault((record_id, place), set()).update(links)
            self._due = min(self._due, now + limits.PART_DELAY_S)

    def complete(self, record_id: bytes, now: float) -> None:
        """A payload is here."""
        if not self._waiting.get(record_id):
            self._waiting.pop(record_id, None)
            return
        if not self._complete:
            self._due = min(self._due, now + limits.OFFER_DELAY_S)
        self._complete.append(record_id)

    def forget(self, record_id: bytes) -> None:
        """A record is closed or void: nobody waits for its payload any more."""
        self._waiting.pop(record_id, None)

    def link_down(self, link: int) -> None:
        for links in (*self._waiting.values(), *self._parts.values()):
            links.discard(link)

    def deadline(self) -> float:
        return self._due

    def wake(self, now: float) -> list[Effect]:
        """Tell the links that still wait."""
        if now < self._due:
            return []
        result = [*self._offer_parts(), *self._offer_complete()]
        self._complete, self._parts, self._due = [], {}, math.inf
        return result

    def _offer_parts(self) -> list[Effect]:
        offered: dict[tuple[int, bytes], list[int]] = {}
        for (record_id, place), links in self._parts.items():
            for link in sorted(links):
                offered.setdefault((link, record_id), []).append(place)
        return [
            Send(link, HaveChunks(record_id, tuple(places))) for (link, record_id), places in offered.items()
        ]

    def _offer_complete(self) -> list[Effect]:
        offered: dict[int, list[bytes]] = {}
        for record_id in self._complete:
            for link in sorted(self._waiting.pop(record_id, ())):
                offered.setdefault(link, []).append(record_id)
        result: list[Effect] = []
        message = Have(())
        for link, ids in offered.items():
            for start in range(0, len(ids), limits.IDS_PER_MESSAGE_MAX):
                some = tuple(ids[start : start + limits.IDS_PER_MESSAGE_MAX])
                if some != message.record_ids:  # most often equal, and then serialised once
                    message = Have(some)
                result.append(Send(link, message))
        return result


# --- Push: a record new to us goes to a few random links at once, and each receiver does the same, once.
#
# If the sender has the payload, and it is of one chunk, we shall have it in a moment. The record then waits,
# so
# that record and payload are announced in one message, and not to links that announced it to us meanwhile.
# Anti-entropy finds what push loses.
#
# This state machine decides what to send. Whether a record is valid was decided before it got here.


@dataclass(slots=True)
class _Relay:
    """A record that waits a moment for its payload before it is passed on."""

    delta: Delta
    known_to: set[int]
    """Links whose peers have the record."""
    due: float


class Push:
    """Sends records to links. `holds` tells whether a delta's payload is here."""

    def __init__(
        self,
        ledger: Ledger,
        holds: Callable[[bytes], bool],
        rng: RandomSource,
        promise: Callable[[bytes, int], None] = lambda record_id, link: None,
    ) -> None:
        """`promise` is called for each record sent to a link without its payload being here."""
        self._ledger = ledger
        self._promise = promise
        self._holds = holds
        self._rng = rng
        self._links: set[int] = set()
        self._relays: dict[bytes, _Relay] = {}
        """Waiting records by id, oldest first."""

    def link_up(self, link: int) -> None:
        self._links.add(link)

    def link_down(self, link: int) -> None:
        self._links.discard(link)

    def relay(self, delta: Delta, source: int, now: float) -> list[Effect]:
        """Pass on a record that is new to us, from a link whose peer holds its payload."""
        is_soon_here = len(delta.body.chunks) == 1 and not self._holds(delta.record_id)
        if not is_soon_here or len(self._relays) >= limits.IDS_PER_MESSAGE_MAX:
            return self.tell([delta], {source})
        self._relays[delta.record_id] = _Relay(delta, {source}, now + limits.RELAY_DELAY_S)
        return []

    def known_to(self, record_id: bytes, link: int) -> None:
        """A link's peer has a record."""
        if record_id in self._relays:
            self._relays[record_id].known_to.add(link)

    def arrived(self, record_id: bytes) -> list[Effect]:
        """A payload is here, or has been waited for long enough: pass its record on."""
        relay = self._relays.pop(record_id, None)
        if relay is None or record_id not in self._ledger:
            return []
        return self.tell([relay.delta], relay.known_to)

    def deadline(self) -> float:
        return next(iter(self._relays.values())).due if self._relays else math.inf

    def wake(self, now: float) -> list[Effect]:
        """Pass on records that have waited in vain."""
        overdue = [record_id for record_id, relay in self._relays.items() if now >= relay.due]
        return [effect for record_id in overdue for effect in self.arrived(record_id)]

    def tell(self, deltas: list[Delta], known_to: set[int]) -> list[Effect]:
        """Relay records to a few links that are not known to have them."""
        targets = sample(self._links - known_to, limits.PUSH_FANOUT, self._rng)
        messages = list(Records.batches(self._entries(deltas, targets)))
        return [Send(link, message) for message in messages for link in targets]

    def give(self, link: int, record_ids: Iterable[bytes]) -> list[Effect]:
        """Send those of the records asked for that we have."""
        found = [delta for i in record_ids if (delta := self._ledger.get(i)) is not None]
        return [Send(link, message) for message in Records.batches(self._entries(found, [link]))]

    def _entries(self, deltas: list[Delta], targets: list[int]) -> list[tuple[bytes, bool]]:
        entries = [(delta.data, self._holds(delta.record_id)) for delta in deltas]
        for delta, (_, held) in zip(deltas, entries, strict=True):
            if not held:
                for link in targets:
                    self._promise(delta.record_id, link)
        return entries


# --- An author deals out its payload: each neighbour is offered different chunks, and all together get all.
#
# At first only the author has a new payload, so the payload cannot be everywhere before the author's line has
# carried all of it once. Any chunk that the line carries twice in that time makes everybody wait. Neighbours
# get the rest from each other. Once every chunk is known to be with some neighbour, the author offers
# everything to everybody. It does so earlier if the deal stalls: a neighbour may be slow, or gone, or keep
# its
# chunks to itself. A neighbour that took part in a stalled deal is dealt nothing more until it says that it
# holds something: one that never takes anything would otherwise hold up every payload. BitTorrent calls this
# super-seeding.


@dataclass(slots=True)
class _Deal:
    """One of our payloads while few have it."""

    links: set[int]
    """Links that were dealt chunks and have not said that they hold everything."""
    left: set[int]
    """Places of the chunks that nobody but us is known to hold."""
    due: float


class Dealing:
    """Our own payloads that are not spread yet."""

    def __init__(self, rng: RandomSource) -> None:
        self._rng = rng
        self._deals: dict[bytes, _Deal] = {}
        self._silent: set[int] = set()
        """Links that are dealt nothing, since they took part in a deal that stalled."""

    def deal(self, delta: Delta, links: set[int], now: float) -> list[Effect]:
        """Tell links of a delta of ours. Which link is offered which of its chunks is drawn at random."""
        places = range(len(delta.body.chunks))
        takers = links - self._silent
        if len(takers) < 2 or len(places) < 2:
            message = Records(((delta.data, True),))
            return [Send(link, message) for link in sample(links, limits.PUSH_FANOUT, self._rng)]
        self._deals[delta.record_id] = _Deal(set(links), set(places), now + limits.DEAL_PATIENCE_S)
        result: list[Effect] = []
        deck = sample(places, len(places), self._rng)
        message = Records(((delta.data, False),))
        for seat, link in enumerate(sample(takers, len(takers), self._rng)):
            result.append(Send(link, message))
            if hand := deck[seat :: len(takers)]:
                result.append(Send(link, HaveChunks(delta.record_id, tuple(hand))))
        return [*result, *(Send(link, message) for link in sorted(links - takers))]

    def heard(self, record_id: bytes, link: int) -> list[Effect]:
        """A link's peer says that it holds a payload."""
        self._silent.discard(link)
        if record_id not in self._deals:
            return []
        self._deals[record_id].links.discard(link)
        return self._offer_all(record_id)

    def heard_parts(self, record_id: bytes, places: Iterable[int], now: float) -> list[Effect]:
        """A peer says that it holds some chunks."""
        deal = self._deals.get(record_id)
        if deal is None:
            return []
        if deal.left.isdisjoint(places):
            return []  # no news, so no more patience: a liar could put the rest off for ever
        deal.left.difference_update(places)
        deal.due = now + limits.DEAL_PATIENCE_S
        return [] if deal.left else self._offer_all(record_id)

    def link_down(self, link: int) -> list[Effect]:
        """A link is gone, and the chunks that its peer was dealt may be nowhere: offer everything."""
        self._silent.discard(link)
        dealt = [record_id for record_id, deal in self._deals.items() if link in deal.links]
        for record_id in dealt:
            self._deals[record_id].links.discard(link)
        return [effect for record_id in dealt for effect in self._offer_all(record_id)]

    def deadline(self) -> float:
        return min(deal.due for deal in self._deals.values()) if self._deals else math.inf

    def wake(self, now: float) -> list[Effect]:
        """Offer all chunks of the payloads whose deals have stalled."""
        due = [record_id for record_id, deal in self._deals.items() if now >= deal.due]
        for record_id in due:
            self._silent |= self._deals[record_id].links
        return [effect for record_id in due for effect in self._offer_all(record_id)]

    def _offer_all(self, record_id: bytes) -> list[Effect]:
        message = Have((record_id,))
        return [Send(link, message) for link in sorted(self._deals.pop(record_id).links)]


class Holdings:
    """Keeps the ledger, the fetching of payloads and the offers of them in step."""

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        links: Links,
        fetcher: Fetcher,
        offers: Offers,
        rng: RandomSource,
    ) -> None:
        self._ledger = ledger
        self._roster = roster
        self._links = links
        self._fetcher = fetcher
        self._wants = fetcher.wants
        self._offers = offers
        self._rng = rng
        self._held: set[bytes] = set()
        self._revoked: list[Delta] = []
        """Deltas that revocations took out of the ledger. They stay on disk until their rounds close: Phi may
        still contain them, and only their payloads can take them back out."""

    def holds(self, record_id: bytes) -> bool:
        """Whether the whole payload of a delta is here."""
        return record_id in self._held

    def share_lacking(self, round_: int, now: float) -> float:
        """The share of the ledger's authors whose payloads of rounds up to `round_` are still missing here.

        Only payloads that somebody may hold are considered.
        """
        deltas = [self._ledger.get(key) for key in self._wants.lacking(now, now)]
        lacking = {delta.author for delta in deltas if delta is not None and delta.round <= round_}
        return len(lacking) / len({delta.author for delta in self._ledger}) if lacking else 0.0

    # -- deltas

    def restore(
        self, deltas: Iterable[Delta], revoked: Iterable[Delta], held: Iterable[bytes], now: float
    ) -> list[Effect]:
        """Take in what a previous run stored: deltas that count, deltas that do not (any more), and the ids
        of those whose payloads are here."""
        self._held.update(held)
        self._revoked += revoked
        for delta in deltas:
            self._ledger.add(delta)
        result: list[Effect] = [Ready(delta) for delta in self._revoked]
        for delta in self._ledger:  # Phi may contain the first of two void deltas, as the snapshot does
            is_done = self._ledger.is_void(delta) or self.holds(delta.record_id)
            result += [Ready(delta)] if is_done else self._want(delta, now)
        return result

    def add(self, delta: Delta, source: int, now: float) -> list[Effect]:
        """Take in a verified delta of another node from a link. A delta that is known has no effect."""
        match self._ledger.add(delta):
            case Added.NEW:
                if self._is_author(delta, source):
                    self._offers.promise(delta.record_id, source)  # the author wants to know that it is safe
                return [Store(delta, own=False), *self._want(delta, now)]
            case Added.VOIDED:
                return [Store(delta, own=False), *self._void(delta)]
            case Added.IGNORED | Added.CLOSED:
                return []

    def add_own(self, delta: Delta) -> list[Effect]:
        """Take in our own delta, whose payload is here from the start. Its round may be closed by now."""
        match self._ledger.add(delta):
            case Added.NEW:
                result: list[Effect] = [Ready(delta)]
            case Added.VOIDED:  # our key also signs elsewhere
                result = self._void(delta)
            case Added.IGNORED:
                return []
            case Added.CLOSED:
                return [Notice(f"not publishing round {delta.round}, which was closed before it was stored")]
        self._held.add(delta.record_id)
        return result

    def revoke(self, author: bytes, after: int) -> list[Effect]:
        """Void an author's deltas of rounds later than `after`; returns a `Ready` for each."""
        dropped = self._ledger.drop(author, after)
        for delta in dropped:
            self._forget(delta.record_id)
        self._revoked += dropped
        return [Ready(delta) for delta in dropped]

    @property
    def revoked(self) -> Sequence[Delta]:
        """Deltas that no longer count, but that Phi may still contain."""
        return self._revoked

    def close(self, floor: int) -> Close:
        """Forget all rounds up to `floor`, for good."""
        dropped = [*self._ledger.close(floor), *(delta for delta in self._revoked if delta.round <= floor)]
        self._revoked = [delta for delta in self._revoked if delta.round > floor]
        for delta in dropped:
            self._forget(delta.record_id)
        return Close(floor, tuple(dropped))

    def begin_at(self, floor: int, reach: int) -> Close:
        """Our history is another one: it begins at the snapshot of round `floor`.

        Records of rounds later than `reach` are of a history that ran ahead alone. They are dropped, since
        others do not take them: whoever kept them would merge them alone.
        """
        self._ledger.reopen(floor)
        beyond = self._ledger.drop_beyond(reach)
        for delta in beyond:
            self._forget(delta.record_id)
        return Close(floor, (*self.close(floor).deltas, *beyond))

    def _forget(self, record_id: bytes) -> None:
        """A delta no longer counts: its payload is neither held, nor looked for, nor offered."""
        self._held.discard(record_id)
        self._wants.forget(record_id)
        self._offers.forget(record_id)

    def _void(self, delta: Delta) -> list[Effect]:
        """Void the two deltas that an equivocator signed for a round: nobody needs their payloads.

        Only the first such round of an author is reported: a key in two places equivocates all the time.
        """
        for record_id in self._ledger.ids(delta.round):
            other = self._ledger.get(record_id)
            if other is not None and other.author == delta.author:
                self._wants.forget(record_id)
                self._offers.forget(record_id)
        if len(self._ledger.void_rounds(delta.author)) > 1:
            return [Ready(delta)]
        text = f"signed two deltas for round {delta.round}: both are void"
        return [Ready(delta), Notice(text, culprit=self._roster.label(delta.author))]

    # -- payloads

    def hint(self, record_id: bytes, link: int) -> None:
        """Note that a link's peer holds a delta's payload."""
        self._fetcher.hint(link, record_id)
        delta = self._ledger.get(record_id)
        if delta is None or not self._is_author(delta, link):
            self._offers.heard(record_id, link)

    def hint_parts(self, delta: Delta, places: Iterable[int], link: int) -> None:
        """Note that a link's peer holds some chunks of a delta's payload."""
        for place in places:
            if place < len(delta.body.chunks):
                self._fetcher.hint_part(link, delta.record_id, delta.body.chunks[place])
                self._offers.heard_part(delta.record_id, place, link)

    def lacks(self, record_id: bytes, link: int, now: float) -> None:
        """Note that a link's peer knows a delta and lacks its payload: tell it which chunks are here."""
        delta = self._ledger.get(record_id)
        if delta is not None and record_id in self._wants:
            self._offers.promise(record_id, link)
            missing = self._wants.missing(record_id)
            for place, blob in enumerate(delta.body.chunks):
                if blob not in missing:
                    self._offers.part(record_id, place, {link}, now)

    def arrived(self, blob: bytes, now: float) -> list[Effect]:
        """Note that a chunk is stored. Each chunk of a payload that has several is offered as it comes.

        A chunk that thousands of payloads list is offered only as part of those known first: a peer that
        lacks the chunk lacks it for them too. If a payload was looked for long, all links are told of it:
        they may not have asked for a while.
        """
        self._wants.rule_out(blob)
        keys = self._wants.keys_of(blob)
        offered = set(nsmallest(limits.PAYLOADS_PER_CHUNK_MAX, keys, key=self._wants.since))
        for key in keys:
            delta = self._ledger.get(key)
            if delta is None:
                continue
            others = self._links.numbers - self._wants.holders_of(key, blob)
            if self._wants.is_sought(key, now):
                for link in others:
                    self._offers.promise(key, link)
            if len(delta.body.chunks) > 1 and key in offered:
                chosen = set(sample(others, limits.PART_FANOUT, self._rng))
                for place, other in enumerate(delta.body.chunks):
                    if other == blob:  # a chunk of zeros, say, may occur more than once in a payload
                        self._offers.part(key, place, chosen, now)
        return self._complete(self._fetcher.arrived(blob, now), now)

    def need(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> list[Effect]:
        """Fetch chunks (hash, size) under a delta's id or another key.

        A delta that we held and must fetch again does not count as held until it is complete.
        """
        self._held.discard(key)
        return self._complete(self._fetcher.want(key, chunks, now), now)

    def _want(self, delta: Delta, now: float) -> list[Effect]:
        sizes = payload_chunk_sizes(delta.body.payload_bytes)
        chunks = tuple(zip(delta.body.chunks, sizes, strict=True))
        return self._complete(self._fetcher.want(delta.record_id, chunks, now), now)

    def _complete(self, fetched: list[Effect], now: float) -> list[Effect]:
        """Deltas whose payloads are complete become `Ready`, and are offered to links that lack them."""
        result: list[Effect] = []
        for effect in fetched:
            delta = self._ledger.get(effect.key) if isinstance(effect, Fetched) else None
            if delta is None:
                result.append(effect)
                if isinstance(effect, Fetched):  # of a revoked delta, which can be taken out now
                    result += [Ready(delta) for delta in self._revoked if delta.record_id == effect.key]
                continue
            self._held.add(delta.record_id)
            result.append(Ready(delta))
            self._offers.complete(delta.record_id, now)
        return result

    def _is_author(self, delta: Delta, link: int) -> bool:
        """Whether a link leads to a delta's author."""
        peer = self._links.get(link)
        return peer is not None and peer.node_id == delta.author


# --- Our own deltas: no round is signed twice, and no delta is announced before it is stored.


class Author:
    """Signs what this node trained."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        layout: Layout,
        acl: AccessList,
        ledger: Ledger,
        holdings: Holdings,
    ) -> None:
        self._identity = identity
        self._swarm_id = swarm_id
        self._layout = layout
        self._acl = acl
        self._ledger = ledger
        self._holdings = holdings
        self._signed = 0
        self.is_copy = False
        """Whether our disk is a copy of an earlier one, so that we may have signed more than it knows."""
        self._last_id = b""
        self._last_is_held = False
        """Whether another node holds our last delta and its payload."""

    @property
    def node_id(self) -> bytes:
        return self._identity.node_id

    @property
    def last_round(self) -> int:
        """The highest round we have signed a delta for, 0 if none. Others may know of more than our disk."""
        return max(self._signed, self._ledger.last_round(self._identity.node_id))

    @property
    def last_is_spread(self) -> bool:
        """Whether another node holds our last delta and its payload, or it does not count any more: we can
        leave without losing it."""
        return self._last_is_held or self._last_id not in self._ledger

    @property
    def has_signed(self) -> bool:
        """Whether this run or our own disk knows of our last delta, which a copy of that disk may not."""
        return self._signed > 0 and not self.is_copy

    def restore(self, rounds: Iterable[int], *, is_copy: bool = False) -> None:
        """Take in the rounds that earlier runs signed; if this `is_copy` of their disk, there may be more."""
        self._signed = max(self._signed, *rounds)
        self.is_copy = is_copy

    def publish(self, body: DeltaBody) -> list[Effect]:
        """Sign a delta. It is stored before anybody hears of it."""
        if body.round <= self.last_round:
            return [Notice(f"not signing round {body.round} again: {self.last_round} was our last")]
        if not self._acl.counts(self._identity.node_id, body.round):
            return [Notice("this node was invited to observe, not to train: its delta is not published")]
        if body.round <= self._ledger.floor:
            self._signed = body.round  # the next one is of a later round
            return [Notice(f"not publishing round {body.round}, which is closed: it was not stored in time")]
        body = replace(body, previous=self._ledger.last_record(self._identity.node_id))
        envelope = seal(self._identity, RecordKind.DELTA, self._swarm_id, body.pack())
        try:
            delta = parse_delta(envelope, self._layout)
        except MalformedError as error:  # for instance a loss that is not finite: nobody would take it
            return [Notice(f"not publishing round {body.round}: {error}")]
        self._signed = body.round
        return [Store(delta, own=True)]

    def stored(self, delta: Delta) -> list[Effect]:
        """Our delta is on disk: from now on it counts, if its round is still open."""
        result = self._holdings.add_own(delta)
        if delta.record_id in self._ledger:
            self._last_id = delta.record_id
            self._last_is_held = False
        return result

    def heard(self, record_ids: Iterable[bytes]) -> None:
        """Note that another node holds the payloads of these deltas."""
        self._last_is_held |= self._last_id in record_ids
