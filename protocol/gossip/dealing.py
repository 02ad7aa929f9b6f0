"""An author deals out its payload: each neighbour is offered different chunks, and all together get all.

At first only the author has a new payload, so the payload cannot be everywhere before the author's line has
carried all of it once. Any chunk that the line carries twice in that time makes everybody wait. Neighbours
get the rest from each other. Once every chunk is known to be with some neighbour, the author offers
everything to everybody. It does so earlier if the deal stalls: a neighbour may be slow, or gone, or keep its
chunks to itself. A neighbour that took part in a stalled deal is dealt nothing more until it says that it
holds something: one that never takes anything would otherwise hold up every payload. BitTorrent calls this
super-seeding.
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
        message = Holding((record_id,))
        return [Send(link, message) for link in sorted(self._deals.pop(record_id).links)]
