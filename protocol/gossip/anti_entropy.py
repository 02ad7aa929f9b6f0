"""Anti-entropy: ledgers are compared by ranges of rounds, and missing records flow both ways.

This happens when a link comes up, and about every 10 s with one random link. It finds whatever push has lost.
Ranges whose digests differ are followed down to rounds, newest first. Then the record ids of those rounds are
exchanged, and after them the records. An exchange is bounded; the next one finds what it had no room for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.context import Context
from gossamer.protocol.gossip.announce import Announcer
from gossamer.protocol.ledger import can_be
from gossamer.protocol.messages import Digest, GetRecords, RecordIds
from gossamer.protocol.sampling import sample


@dataclass(slots=True)
class _Exchange:
    """The state of comparing ledgers with one link."""

    awaited: set[bytes] = field(default_factory=set)
    """Records that we have requested from the link and that have not come."""
    size_before: int | None = None
    """Number of records we had when we requested those. Set only if more may differ than one exchange has
    room for."""
    given: list[bytes] = field(default_factory=list)
    """Records that the peer lacked when we last looked for more that it lacks."""


def _is_full(message: RecordIds) -> bool:
    """Whether more may differ than one exchange has room for. In each parent range that was compared, at
    least one round differs."""
    counts = [len(ids) for _, ids in message.rounds]
    return (
        len(counts) >= limits.COMPARED_PARENTS_MAX
        or sum(counts) >= limits.IDS_PER_MESSAGE_MAX
        or max(counts, default=0) >= limits.IDS_PER_ROUND_MAX
    )


class AntiEntropy:
    """Makes our ledger and those of our peers equal."""

    def __init__(self, context: Context, announcer: Announcer) -> None:
        """`announcer` sends the records that a peer turns out to lack."""
        self._links = context.links
        self._ledger = context.ledger
        self._rng = context.rng
        self._send = context.outbox.send
        self._announcer = announcer
        self._exchanges: dict[int, _Exchange] = {}
        """Exchanges by link, for links that have sent us what they have."""
        self._sought: dict[bytes, float] = {}
        """Records that a peer offered chunks of, and when we asked for them; oldest first."""
        self._next_exchange = 0.0
        self.synced_once = False
        """Whether some peer's ledger was found equal to ours, or all that it had beyond ours has come."""

    def link_down(self, link: int) -> None:
        self._exchanges.pop(link, None)

    def wake(self, now: float) -> None:
        """Start the periodic exchange with one random link.

        A node that has just started does so at each wake-up until it is in sync: new records can make an
        exchange end without either side having learned anything. To all other nodes that does no harm.
        """
        is_awaiting = any(exchange.awaited for exchange in self._exchanges.values())
        has_to_know = not self.synced_once and not is_awaiting
        if now < self._next_exchange and not has_to_know:
            return
        self._next_exchange = now + limits.ANTI_ENTROPY_INTERVAL_S * (0.75 + 0.5 * self._rng.random())
        for link in sample(self._links.numbers, 1, self._rng):
            self.open_exchange(link)

    def open_exchange(self, link: int, above: int = 0) -> None:
        """Begin to compare ledgers with a link."""
        if (exchange := self._exchanges.get(link)) is not None:
            exchange.awaited.clear()  # what has not come by now will be found missing again
            exchange.size_before = None
        digests = self._ledger.digests
        above = max(above, self._ledger.floor)
        self._send(link, Digest(digests.top, tuple(digests.summary(above)), whole=True, above=above))

    def compare(self, link: int, message: Digest) -> None:
        """Answer a Digest: descend into the newest ranges that differ, or say that none do."""
        digests = self._ledger.digests
        if not message.ranges:
            self.synced_once = True
            return
        ours_reaches_further = message.level < digests.top or message.above < self._ledger.floor
        if message.whole and ours_reaches_further:  # start from our top and floor
            self.open_exchange(link, message.above)
            return
        above = max(message.above, self._ledger.floor)
        differing = [
            i
            for i, digest in message.ranges
            if can_be(message.level, i) and digests.digest(message.level, i, above) != digest
        ]
        if differing:
            self._descend(link, message.level, sorted(set(differing)), above)
        elif message.whole:
            self._conclude(link)
        elif not self.synced_once:
            # What differed when this was sent has come since. A node that has just started asks for the rest.
            self.open_exchange(link, above)

    def _descend(self, link: int, level: int, differing: list[int], above: int) -> None:
        if level == 0:
            self._send(link, self._ids_of(differing))
        else:
            newest, digests = differing[-limits.COMPARED_PARENTS_MAX :], self._ledger.digests
            ranges = [child for index in newest for child in digests.children(level, index, above)]
            self._send(link, Digest(level - 1, tuple(ranges), above=above))

    def _ids_of(self, rounds: list[int]) -> RecordIds:
        """The record ids that we have of the newest of these rounds, as many as can be asked for at once."""
        found: list[tuple[int, tuple[bytes, ...]]] = []
        count = 0
        for round_ in reversed(rounds):
            ids = self._some(self._ledger.ids(round_))
            found.append((round_, ids))
            count += len(ids)
            if count >= limits.IDS_PER_MESSAGE_MAX:
                break
        return RecordIds(tuple(reversed(found)))

    def _some(self, ids: list[bytes]) -> tuple[bytes, ...]:
        """All ids of a round or, if they are too many, those of a random stretch."""
        too_many = max(0, len(ids) - limits.IDS_PER_ROUND_MAX)
        start = int(self._rng.random() * (too_many + 1))
        return tuple(ids[start : start + limits.IDS_PER_ROUND_MAX])

    def record_ids(self, link: int, message: RecordIds) -> None:
        """Send the records of these rounds that the peer lacks, and request those that we lack."""
        theirs = {record_id for _, ids in message.rounds for record_id in ids}
        ours = [i for r, ids in sorted(dict(message.rounds).items()) for i in self._comparable(r, ids)]
        it_lacks = [record_id for record_id in ours if record_id not in theirs]
        given = it_lacks[-limits.IDS_PER_MESSAGE_MAX :]
        may_lack_more = _is_full(message) or len(given) < len(it_lacks)
        self._announcer.give(link, given)
        exchange = self._exchanges.setdefault(link, _Exchange())
        open_ = {i for round_, ids in message.rounds if round_ > self._ledger.floor for i in ids}
        we_lack = sorted(i for i in open_ if i not in self._ledger and i not in exchange.awaited)
        requested = we_lack[: limits.IDS_PER_MESSAGE_MAX - len(exchange.awaited)]
        if requested:
            exchange.awaited.update(requested)
            if may_lack_more or len(requested) < len(we_lack):
                exchange.size_before = len(self._ledger)
            self._send(link, GetRecords(tuple(requested)))
        elif not exchange.awaited and may_lack_more:
            self._look_for_more(link, given)
        elif not exchange.awaited:
            self._conclude(link)

    def _comparable(self, round_: int, theirs: tuple[bytes, ...]) -> list[bytes]:
        """Our ids of a round, as far as the peer's list covers it: a full one may be only a stretch."""
        ours = self._ledger.ids(round_)
        if len(theirs) < limits.IDS_PER_ROUND_MAX:
            return ours
        first, last = min(theirs), max(theirs)
        return [record_id for record_id in ours if first <= record_id <= last]

    def _look_for_more(self, link: int, given: list[bytes]) -> None:
        """Compare again with a peer that has got all it was `given` and may lack more.

        The peer had nothing that we lack, so no answer of its will tell us when to compare again. Done only
        once for the same records: the peer may have reasons to refuse them.
        """
        self.synced_once = True
        exchange = self._exchanges[link]
        if given and given != exchange.given:
            exchange.given = given
            self.open_exchange(link)

    def received(self, link: int, record_ids: list[bytes]) -> None:
        """Note which awaited records a link delivered. Once all have come, ask for the rest, if any.

        The rest is asked for only if something was new: a record that we refuse (for instance because our
        clocks differ) would otherwise go round and round between two honest nodes. Records that are newer
        than the exchange are pushed, or the next exchange finds them: where deltas come all the time, two
        ledgers always differ in some.
        """
        exchange = self._exchanges.get(link)
        if exchange is None or not exchange.awaited:
            return
        exchange.awaited.difference_update(record_ids)
        if exchange.awaited:
            return
        if exchange.size_before is None:
            self._conclude(link)
        elif len(self._ledger) > exchange.size_before:
            self.open_exchange(link)
        else:
            exchange.size_before = None
            self.synced_once = True

    def _conclude(self, link: int) -> None:
        """End an exchange: what differed when it began no longer does, since the peer has what we gave it."""
        self.synced_once = True
        self._send(link, Digest(0, ()))

    def offered(self, link: int, record_ids: Iterable[bytes], now: float) -> None:
        """A link's peer offers payloads, or chunks of them. If a record is not here, no push has reached us,
        or not yet: ask for it.

        That is done only once in a while, since it may be one that we refuse. Without it, every second delta
        is seconds late somewhere among 64 nodes (`benchmarks spread`, `benchmarks members`).
        """
        since = now - limits.ANTI_ENTROPY_INTERVAL_S
        unknown = (key for key in record_ids if key not in self._ledger)
        if wanted := tuple(key for key in unknown if self._sought.get(key, -inf) <= since):
            for key in wanted:
                self._sought.pop(key, None)
                self._sought[key] = now
            while len(self._sought) > limits.IDS_PER_MESSAGE_MAX:
                del self._sought[next(iter(self._sought))]
            self._send(link, GetRecords(wanted))
