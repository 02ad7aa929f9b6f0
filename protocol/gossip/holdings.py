"""What is here of the deltas in the ledger: their records at once, their payloads when they have come.

A delta goes through `add` (its payload is wanted), `arrived` (its payload is here: `Ready`) and `close` (its
round is history). An equivocation or a revocation can void the delta at any point in between; `Ready` then
says that its round has to be merged again.
"""

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from gossamer.protocol import limits
from gossamer.protocol.effects import Close, Effect, Fetched, Notice, Ready, Store
from gossamer.protocol.fetching.fetch import Fetcher
from gossamer.protocol.gossip.ledger import Added, Ledger
from gossamer.protocol.gossip.offers import Offers
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.roster import Roster
from gossamer.protocol.payloads.chunks import payload_chunk_sizes
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import RandomSource, sample


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
