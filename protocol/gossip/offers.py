"""Promised payloads: a link that got a record from us before its payload was here is told when it is.

So every record comes with its payload or with the promise of one, and a payload spreads along the paths of
its record, of which a node usually has several. Payloads that become complete within a moment are offered in
one message, except to links that say meanwhile that they hold them too. A payload of several chunks is not
held back until it is complete: each chunk is offered as it comes.
"""

import math

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.messages import Holding, Parts


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
        return [Send(link, Parts(record_id, tuple(places))) for (link, record_id), places in offered.items()]

    def _offer_complete(self) -> list[Effect]:
        offered: dict[int, list[bytes]] = {}
        for record_id in self._complete:
            for link in sorted(self._waiting.pop(record_id, ())):
                offered.setdefault(link, []).append(record_id)
        result: list[Effect] = []
        message = Holding(())
        for link, ids in offered.items():
            for start in range(0, len(ids), limits.IDS_PER_MESSAGE_MAX):
                some = tuple(ids[start : start + limits.IDS_PER_MESSAGE_MAX])
                if some != message.record_ids:  # most often equal, and then serialised once
                    message = Holding(some)
                result.append(Send(link, message))
        return result
