"""Who is sent what: records and payloads on their way through the swarm, and our own deltas.

A delta that is new here is relayed at once to a few links (`Announcer`), and its payload is fetched; once
that is here, whoever was sent the record hears so. `Holdings` keeps the ledger, the fetching of payloads and
what is announced of them in step: a delta goes through `add` (its payload is wanted), `arrived` (its payload
is here) and `close` (its round is history). An equivocation or a revocation can void the delta at any point
in between. Rounds whose set of valid deltas with payloads `changed` are merged again. The `Author` signs our
own.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from heapq import nsmallest

from gossamer.protocol import limits
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Close, Fetched, Keep, Notice, Store
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.ledger import Added
from gossamer.protocol.messages import Have, HaveChunks, NewDelta, Records
from gossamer.protocol.payloads import payload_chunk_sizes
from gossamer.protocol.records import Delta, DeltaBody, RecordKind, parse_delta, seal
from gossamer.protocol.sampling import sample


@dataclass(slots=True)
class _Deal:
    """One of our payloads while few have it."""

    left: set[int]
    """Places of the chunks that nobody but us is known to hold."""
    due: float


class Announcer:
    """Tells links of records, and of the payloads that we hold.

    *Announcing.* A record that is new to us goes to a few random links at once, and each receiver does the
    same, once. It comes with its payload or with the promise of one: a link that got a record from us before
    its payload was here hears when it is. So a payload spreads along the paths of its record, of which a node
    usually has several. The other links hear then, too, and ask for the record if no push has reached them
    (lazy push, as in Plumtree): among 64 members there is always one. What becomes complete within a moment
    is offered in one message, except to links that say meanwhile that they hold it too. Each chunk of a
    payload that has several is offered as it comes.

    *Super-seeding.* At first only the author has a new payload, so the payload cannot be everywhere before
    the author's line has carried all of it once, and any chunk that the line carries twice in that time makes
    everybody wait. So an author deals its chunks out: each neighbour is offered different ones, and they get
    the rest from each other. Everybody waits for the whole, and is offered it once every chunk is known to be
    with some neighbour, or once the deal has stalled for a moment, say since one of them has gone. Mutants of
    the simulator show what dealing and offers of chunks are for: `deal half`, `keep parts to oneself`.
    """

    def __init__(self, context: Context, held: Set[bytes]) -> None:
        """`held`: the ids of the deltas whose payloads are here."""
        self._context = context
        self._send = context.outbox.send
        self._held = held
        self._waiting: dict[bytes, set[int]] = {}
        """Links that wait to hear that we hold a payload, by its record's id."""
        self._complete: list[bytes] = []
        self._parts: dict[tuple[bytes, int], set[int]] = {}
        """Chunks to be offered (record id and place), and the links to offer them to."""
        self._offers_due = math.inf
        self._deals: dict[bytes, _Deal] = {}

    def link_down(self, link: int) -> None:
        for links in (*self._waiting.values(), *self._parts.values()):
            links.discard(link)

    # -- records

    def push(self, deltas: list[Delta], source: int) -> None:
        """Send records to a few links, and not back; the other links hear when their payloads are here."""
        others = self._context.links.numbers - {source}
        for delta in deltas:
            if delta.record_id not in self._held:
                self._waiting.setdefault(delta.record_id, set()).update(others)
        self._give(sample(others, limits.PUSH_FANOUT, self._context.rng), deltas)

    def give(self, link: int, record_ids: Iterable[bytes]) -> None:
        """Send those of the records asked for that we have."""
        found = [delta for i in record_ids if (delta := self._context.ledger.get(i)) is not None]
        self._give([link], found)

    def _give(self, links: list[int], deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.record_id not in self._held:
                for link in links:
                    self.promise(delta.record_id, link)
        entries = [(delta.data, delta.record_id in self._held) for delta in deltas]
        for message in Records.batches(entries):
            for link in links:
                self._send(link, message)

    def deal(self, delta: Delta, now: float, chunk: bytes = b"") -> Set[int]:
        """Tell links of a delta of ours, and return them: all, or a few if its payload is one chunk. Which
        one is offered which of its chunks is drawn at random.

        `chunk`: see `Stored`. A short one goes along: the peers surely lack it.
        """
        rng, links = self._context.rng, self._context.links.numbers
        places = range(len(delta.body.chunks))
        if len(links) < 2 or len(places) < 2:
            chosen = sample(links, limits.PUSH_FANOUT, rng)
            if 0 < len(chunk) * len(chosen) <= limits.SENT_ALONG_BYTES_MAX:
                whole = NewDelta(delta.data, chunk)
                for link in chosen:
                    self._send(link, whole)
            else:
                self._give(chosen, [delta])
            return set(chosen)
        self._deals[delta.record_id] = _Deal(set(places), now + limits.DEAL_PATIENCE_S)
        self._waiting[delta.record_id] = set(links)
        message = Records(((delta.data, False),))
        for link in sorted(links):
            self._send(link, message)
        deck = sample(places, len(places), rng)
        for seat, link in enumerate(sample(links, len(links), rng)):
            if hand := deck[seat :: len(links)]:
                self._send(link, HaveChunks(delta.record_id, tuple(hand)))
        return set(links)

    def _end_deal(self, record_id: bytes, now: float) -> None:
        del self._deals[record_id]
        self.complete(record_id, now)

    # -- payloads

    def promise(self, record_id: bytes, link: int) -> None:
        """A link is sent a record whose payload is not here yet."""
        self._waiting.setdefault(record_id, set()).add(link)

    def holds(self, record_id: bytes, link: int) -> None:
        """A link's peer says that it holds a payload, so it has no use for ours."""
        if record_id in self._waiting:
            self._waiting[record_id].discard(link)

    def holds_parts(self, record_id: bytes, places: Iterable[int], now: float) -> None:
        """A neighbour says that it holds some chunks. No news wins a deal no patience: a liar could put the
        rest off for ever."""
        deal = self._deals.get(record_id)
        if deal is not None and not deal.left.isdisjoint(places):
            deal.left.difference_update(places)
            deal.due = now + limits.DEAL_PATIENCE_S
            if not deal.left:
                self._end_deal(record_id, now)

    def part(self, record_id: bytes, place: int, links: set[int], now: float) -> None:
        """A chunk of a payload is here; tell these links."""
        if links:
            self._parts.setdefault((record_id, place), set()).update(links)
            self._offers_due = min(self._offers_due, now + limits.PART_DELAY_S)

    def complete(self, record_id: bytes, now: float) -> None:
        """A payload is here, and may be offered to all that wait for it."""
        if not self._waiting.get(record_id):
            self._waiting.pop(record_id, None)
            return
        if not self._complete:
            self._offers_due = min(self._offers_due, now + limits.OFFER_DELAY_S)
        self._complete.append(record_id)

    def forget(self, record_id: bytes) -> None:
        """A record is closed or void: nobody waits for its payload any more."""
        self._waiting.pop(record_id, None)
        self._deals.pop(record_id, None)

    # -- time

    def deadline(self) -> float:
        return min([self._offers_due, *(deal.due for deal in self._deals.values())])

    def wake(self, now: float) -> None:
        """End the deals that have stalled, and tell the links that wait what is here."""
        for record_id in [record_id for record_id, deal in self._deals.items() if now >= deal.due]:
            self._end_deal(record_id, now)
        if now >= self._offers_due:
            self._offer_parts()
            self._offer_complete()
            self._complete, self._parts, self._offers_due = [], {}, math.inf

    def _offer_parts(self) -> None:
        offered: dict[tuple[int, bytes], list[int]] = {}
        for (record_id, place), links in self._parts.items():
            for link in sorted(links):
                offered.setdefault((link, record_id), []).append(place)
        for (link, record_id), places in offered.items():
            self._send(link, HaveChunks(record_id, tuple(places)))

    def _offer_complete(self) -> None:
        offered: dict[int, list[bytes]] = {}
        for record_id in self._complete:
            for link in sorted(self._waiting.pop(record_id, ())):
                offered.setdefault(link, []).append(record_id)
        for link, ids in offered.items():
            for start in range(0, len(ids), limits.IDS_PER_MESSAGE_MAX):
                self._send(link, Have(tuple(ids[start : start + limits.IDS_PER_MESSAGE_MAX])))


class Holdings:
    """Keeps the ledger, the fetching of payloads and the offers of them in step."""

    def __init__(self, context: Context, fetcher: Fetcher) -> None:
        self._outbox = context.outbox
        self._ledger = context.ledger
        self._roster = context.roster
        self._links = context.links
        self._rng = context.rng
        self._fetcher = fetcher
        self._wants = fetcher.wants
        self.changed: set[int] = set()
        """Rounds that have to be merged again, until that is scheduled."""
        self._held: set[bytes] = set()
        self.announcer = Announcer(context, self._held)
        self.revoked: Sequence[Delta] = ()
        """Deltas that revocations took out of the ledger. They stay on disk until their rounds close: Phi may
        still contain them, and only their payloads can take them back out."""

    def holds(self, record_id: bytes) -> bool:
        """Whether the whole payload of a delta is here."""
        return record_id in self._held

    def lacks_payloads(self, round_: int, now: float) -> bool:
        """Whether payloads of rounds up to `round_` that somebody may hold are still missing here."""
        deltas = [self._ledger.get(key) for key in self._wants.lacking(now, now)]
        return any(delta is not None and delta.round <= round_ for delta in deltas)

    # -- deltas

    def restore(
        self, deltas: Iterable[Delta], revoked: Sequence[Delta], held: Iterable[bytes], now: float
    ) -> None:
        """Take in what a previous run stored: deltas that count, deltas that do not (any more), and the ids
        of those whose payloads are here."""
        self._held.update(held)
        self.revoked = revoked
        for delta in deltas:
            self._ledger.add(delta)
        self.changed.update(delta.round for delta in revoked)
        for delta in self._ledger:  # Phi may contain the first of two void deltas, as the snapshot does
            if self._ledger.is_void(delta) or self.holds(delta.record_id):
                self.changed.add(delta.round)
            else:
                self._want(delta, now)

    def add(self, delta: Delta, source: int, now: float) -> bool:
        """Take in a verified delta of another node from a link. Returns whether it is news."""
        added = self._ledger.add(delta)
        if added not in (Added.NEW, Added.VOIDED):
            return False
        self._outbox.append(Store(delta, own=False))
        if added is Added.VOIDED:
            self._void(delta)
            return True
        if self._is_author(delta, source):
            self.announcer.promise(delta.record_id, source)  # it waits to hear that its delta is safe
        self._want(delta, now)
        return True

    def add_own(self, delta: Delta) -> None:
        """Take in our own delta, whose payload is here from the start. Its round may be closed by now."""
        match self._ledger.add(delta):
            case Added.NEW:
                self._held.add(delta.record_id)
                self.changed.add(delta.round)
            case Added.VOIDED:  # our key also signs elsewhere
                self._held.add(delta.record_id)
                self._void(delta)
            case Added.CLOSED:
                text = f"not publishing round {delta.round}, which was closed before it was stored"
                self._outbox.append(Notice(text))

    def revoke(self, author: bytes, after: int) -> int:
        """Void an author's deltas of rounds later than `after`; returns how many these are."""
        dropped = self._ledger.drop(author, after)
        for delta in dropped:
            self._forget(delta.record_id)
        self.revoked = [*self.revoked, *dropped]
        self.changed.update(delta.round for delta in dropped)
        return len(dropped)

    def close(self, floor: int) -> None:
        """Forget all rounds up to `floor`, for good."""
        self._close(floor, [])

    def begin_at(self, floor: int, reach: int) -> None:
        """Our history is another one: it begins at the snapshot of round `floor`.

        Records of rounds later than `reach` are of a history that ran ahead alone. They are dropped, since
        others do not take them: whoever kept them would merge them alone.
        """
        self._ledger.reopen(floor)
        self._close(floor, self._ledger.drop_beyond(reach))

    def _close(self, floor: int, beyond: Sequence[Delta]) -> None:
        over = [delta for delta in self.revoked if delta.round <= floor]
        self.revoked = [delta for delta in self.revoked if delta.round > floor]
        dropped = (*self._ledger.close(floor), *over, *beyond)
        for delta in dropped:
            self._forget(delta.record_id)
        self._outbox.append(Close(floor, dropped))

    def _forget(self, record_id: bytes) -> None:
        """A delta no longer counts: its payload is neither held, nor looked for, nor offered."""
        self._held.discard(record_id)
        self._wants.forget(record_id)
        self.announcer.forget(record_id)

    def _void(self, delta: Delta) -> None:
        """Void the two deltas that an equivocator signed for a round: nobody needs their payloads.

        Only the first such round of an author is reported: a key in two places equivocates all the time.
        """
        for record_id in self._ledger.ids(delta.round):
            other = self._ledger.get(record_id)
            if other is not None and other.author == delta.author:
                self._wants.forget(record_id)
                self.announcer.forget(record_id)
        self.changed.add(delta.round)
        if len(self._ledger.void_rounds(delta.author)) == 1:
            text = f"signed two deltas for round {delta.round}: both are void"
            self._outbox.append(Notice(text, culprit=self._roster.label(delta.author)))

    # -- payloads

    def known_to(self, record_id: bytes, link: int, *, held: bool) -> None:
        """A link's peer has a delta's record, and says whether it has the payload too."""
        delta = self._ledger.get(record_id)
        if held:
            self._fetcher.hint(link, record_id)
            if delta is None or not self._is_author(delta, link):
                self.announcer.holds(record_id, link)
        elif delta is not None and record_id in self._wants:
            self.announcer.promise(record_id, link)

    def parts_known_to(self, delta: Delta, places: Iterable[int], link: int, now: float) -> None:
        """A link's peer holds some chunks of a delta's payload."""
        real = [place for place in places if place < len(delta.body.chunks)]
        for place in real:
            self._fetcher.hint_part(link, delta.record_id, delta.body.chunks[place])
        self.announcer.holds_parts(delta.record_id, real, now)

    def brought(self, delta: Delta, data: bytes, link: int, now: float) -> None:
        """The payload of a delta that is new here has come along with its record."""
        blob, size = delta.body.chunks[0], delta.body.payload_bytes
        if size == self._wants.size_of(blob) and self._fetcher.brought(link, delta.record_id, blob, now):
            self._outbox.append(Keep(link, blob, size, data))

    def arrived(self, blob: bytes, now: float) -> None:
        """A chunk is stored. Each chunk of a payload that has several is offered as it comes.

        A chunk that thousands of payloads list is offered only as part of those known first: a peer that
        lacks the chunk lacks it for them too.
        """
        self._wants.rule_out(blob)
        keys = self._wants.keys_of(blob)
        offered = set(nsmallest(limits.PAYLOADS_PER_CHUNK_MAX, keys, key=self._wants.since))
        for key in keys:
            delta = self._ledger.get(key)
            if delta is None:
                continue
            others = self._links.numbers - self._wants.holders_of(key, blob)
            if len(delta.body.chunks) > 1 and key in offered:
                chosen = set(sample(others, limits.PART_FANOUT, self._rng))
                for place, other in enumerate(delta.body.chunks):
                    if other == blob:  # a chunk of zeros, say, may occur more than once in a payload
                        self.announcer.part(key, place, chosen, now)
        for key in self._fetcher.arrived(blob, now):
            self._complete(key, now)

    def need(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> None:
        """Fetch chunks (hash, size) under a delta's id or another key.

        A delta that we held and must fetch again does not count as held until it is complete.
        """
        self._held.discard(key)
        if self._fetcher.want(key, chunks, now):
            self._complete(key, now)

    def _want(self, delta: Delta, now: float) -> None:
        sizes = payload_chunk_sizes(delta.body.payload_bytes)
        if self._fetcher.want(delta.record_id, tuple(zip(delta.body.chunks, sizes, strict=True)), now):
            self._complete(delta.record_id, now)

    def _complete(self, key: bytes, now: float) -> None:
        """All chunks of a key are here. A delta's round is merged again, and it is offered to links that lack
        its payload. A revoked one can be taken out now."""
        delta = self._ledger.get(key)
        if delta is None:
            self._outbox.append(Fetched(key))
            self.changed.update(delta.round for delta in self.revoked if delta.record_id == key)
        else:
            self._held.add(key)
            self.changed.add(delta.round)
            self.announcer.complete(key, now)

    def _is_author(self, delta: Delta, link: int) -> bool:
        """Whether a link leads to a delta's author."""
        peer = self._links.get(link)
        return peer is not None and peer.node_id == delta.author


class Author:
    """Signs what this node trained: no round twice, and no delta is announced before it is stored."""

    def __init__(self, context: Context, holdings: Holdings) -> None:
        self._context = context
        self._ledger = context.ledger
        self._holdings = holdings
        self.node_id = context.identity.node_id
        self._signed = 0
        self._unheld: deque[bytes] = deque(maxlen=len(context.manifest.plan().fragments))
        """Our last deltas, of each fragment one at most, that no other node is known to hold."""

    @property
    def last_round(self) -> int:
        """The highest round we have signed a delta for, 0 if none. Others may know of more than our disk."""
        return max(self._signed, self._ledger.last_round(self.node_id))

    @property
    def last_are_spread(self) -> bool:
        """Whether each of our last deltas is with another node, payload and all, or does not count any more:
        we can leave without losing one."""
        return not any(record_id in self._ledger for record_id in self._unheld)

    @property
    def has_signed(self) -> bool:
        """Whether this run or our own disk knows of a delta of ours."""
        return self._signed > 0

    def restore(self, rounds: Iterable[int]) -> None:
        """Take in the rounds that earlier runs signed."""
        self._signed = max(self._signed, *rounds)

    def publish(self, body: DeltaBody) -> None:
        """Sign a delta. It is stored before anybody hears of it."""
        delta = self._sign(body)
        if isinstance(delta, str):
            self._context.outbox.append(Notice(delta))
        else:
            self._signed = body.round
            self._context.outbox.append(Store(delta, own=True))

    def _sign(self, body: DeltaBody) -> Delta | str:
        """The delta, or why there is none."""
        identity, manifest = self._context.identity, self._context.manifest
        if body.round <= self.last_round:
            return f"not signing round {body.round} again: {self.last_round} was our last"
        if not self._context.acl.counts(self.node_id, body.round):
            return "this node was invited to observe, not to train: its delta is not published"
        if body.round <= self._ledger.floor:
            self._signed = body.round  # the next one is of a later round
            return f"not publishing round {body.round}, which is closed: it was not stored in time"
        body = replace(body, previous=self._ledger.last_record(self.node_id))
        try:
            envelope = seal(identity, RecordKind.DELTA, manifest.swarm_id, body.pack())
            return parse_delta(envelope, manifest.plan())
        except MalformedError as error:  # for instance a loss that is not finite: nobody would take it
            return f"not publishing round {body.round}: {error}"

    def stored(self, delta: Delta) -> bool:
        """Our delta is on disk: from now on it counts, if its round is still open. Returns whether it is."""
        self._holdings.add_own(delta)
        if delta.record_id not in self._ledger:
            return False
        self._unheld.append(delta.record_id)
        return True

    def spread(self, record_ids: Iterable[bytes]) -> None:
        """Another node holds the payloads of these deltas."""
        for record_id in record_ids:
            if record_id in self._unheld:
                self._unheld.remove(record_id)
