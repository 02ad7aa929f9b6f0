"""Telling links which payloads we hold, so that they can fetch them from us.

What became complete within a moment is offered in one message a link. A link that is known to hold a payload
itself is not told of ours: it has no use for it.
"""

import math

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.links import Links
from gossamer.protocol.messages import Holding


class Offers:
    """Payloads that we hold and have not told of yet."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._known_to: dict[bytes, set[int]] = {}
        self._due = math.inf

    def add(self, record_id: bytes, known_to: set[int], now: float) -> None:
        """A payload became complete; the links `known_to` need not be told."""
        if not self._known_to:
            self._due = now + limits.OFFER_DELAY_S
        self._known_to[record_id] = known_to

    def heard(self, link: int, record_id: bytes) -> None:
        """A link's peer says that it holds a payload."""
        if record_id in self._known_to:
            self._known_to[record_id].add(link)

    def deadline(self) -> float:
        return self._due

    def wake(self, now: float) -> list[Effect]:
        """Tell each link what it may lack."""
        if now < self._due:
            return []
        offered, self._known_to, self._due = self._known_to, {}, math.inf
        result: list[Effect] = []
        to_all = Holding(())
        for link in self._links.all():
            ids = tuple([i for i, known_to in offered.items() if link.number not in known_to])
            for start in range(0, len(ids), limits.IDS_PER_MESSAGE_MAX):
                some = ids[start : start + limits.IDS_PER_MESSAGE_MAX]
                if some != to_all.record_ids:  # most often alike, and then serialised once
                    to_all = Holding(some)
                result.append(Send(link.number, to_all))
        return result
