"""Our own deltas: no round is signed twice, and no delta is announced before it is stored."""

from collections.abc import Iterable
from dataclasses import replace

from gossamer.protocol.admission.charter import Charter
from gossamer.protocol.effects import Effect, Notice, Store
from gossamer.protocol.envelope import Kind, seal
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.gossip.holdings import Holdings
from gossamer.protocol.gossip.ledger import Ledger
from gossamer.protocol.identity import Identity
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import Delta, DeltaBody, parse_delta


class Author:
    """Signs what this node trained."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        layout: Layout,
        charter: Charter,
        ledger: Ledger,
        holdings: Holdings,
    ) -> None:
        self._identity = identity
        self._swarm_id = swarm_id
        self._layout = layout
        self._charter = charter
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
        if not self._charter.counts(self._identity.node_id, body.round):
            return [Notice("this node was invited to observe, not to train: its delta is not published")]
        if body.round <= self._ledger.floor:
            self._signed = body.round  # the next one is of a later round
            return [Notice(f"not publishing round {body.round}, which is closed: it was not stored in time")]
        body = replace(body, previous=self._ledger.last_record(self._identity.node_id))
        envelope = seal(self._identity, Kind.DELTA, self._swarm_id, body.pack())
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
