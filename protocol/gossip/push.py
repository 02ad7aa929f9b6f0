"""Push: a record new to us goes to a few random links at once, and each receiver does the same, once.

If the sender has the payload, and it is of one chunk, we shall have it in a moment. The record then waits, so
that record and payload are announced in one message, and not to links that announced it to us meanwhile.
Anti-entropy finds what push loses.

This state machine decides what to send. Whether a record is valid was decided before it got here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.messages import Records
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import RandomSource, sample


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
