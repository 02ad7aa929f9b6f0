"""An author deals its payload out: each neighbour is offered other chunks, and all together are offered all.

The author is the only one who has a new payload, so nothing can be everywhere before its line has carried all
of it once; what it carries twice in that time makes everybody wait. Neighbours get the rest from each other.
As soon as every chunk was heard to be with a neighbour the author offers everything to everybody, and sooner
should that not get on: a neighbour may be slow, or gone, or keep what it has to itself. Whoever was part of a
deal that did not get on is dealt nothing more until it says that it holds something: one that never takes
anything would else hold up every payload. BitTorrent knows this as super-seeding.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.messages import Holding, Parts, Records
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import RandomSource, sample


@dataclass(slots=True)
class _Deal:
    """One of our payloads while it is with few."""

    links: set[int]
    """Links that were dealt chunks and have not said that they hold everything."""
    left: set[int]
    """Chunks that nobody is known to hold but us."""
    due: float


class Dealing:
    """Our own payloads that are not spread yet."""

    def __init__(self, rng: RandomSource) -> None:
        self._rng = rng
        self._deals: dict[bytes, _Deal] = {}
        self._silent: set[int] = set()
        """Links that are dealt nothing."""

    def deal(self, delta: Delta, links: set[int], now: float) -> list[Effect]:
        """Tell links of a delta of ours; who is offered which of its chunks is for the dice."""
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
                result.append(Send(link, Parts(delta.record_id, tuple(hand))))
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
            return []  # no news: patience for that would let a liar put the rest off for ever
        deal.left.difference_update(places)
        deal.due = now + limits.DEAL_PATIENCE_S
        return [] if deal.left else self._offer_all(record_id)

    def link_down(self, link: int) -> list[Effect]:
        """What its peer was dealt may be nowhere."""
        self._silent.discard(link)
        dealt = [record_id for record_id, deal in self._deals.items() if link in deal.links]
        for record_id in dealt:
            self._deals[record_id].links.discard(link)
        return [effect for record_id in dealt for effect in self._offer_all(record_id)]

    def deadline(self) -> float:
        return min(deal.due for deal in self._deals.values()) if self._deals else math.inf

    def wake(self, now: float) -> list[Effect]:
        """Offer everything of what has not got on."""
        due = [record_id for record_id, deal in self._deals.items() if now >= deal.due]
        for record_id in due:
            self._silent |= self._deals[record_id].links
        return [effect for record_id in due for effect in self._offer_all(record_id)]

    def _offer_all(self, record_id: bytes) -> list[Effect]:
        message = Holding((record_id,))
        return [Send(link, message) for link in sorted(self._deals.pop(record_id).links)]
