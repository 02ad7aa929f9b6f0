"""What a peer may use of our resources, as token buckets: refilled at a steady rate, up to a burst.

A peer that uses more is not cut off but read more slowly: `Budgets.spend` tells how long to leave it unread,
and meanwhile TCP makes it wait (back-pressure). So an honest peer that exceeds a budget loses time, but never
its link.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from gossamer.protocol import limits

Key = bytes | str
"""A node id, or a network address."""


class Resource(Enum):
    """The resources that budgets limit."""

    MESSAGES = auto()
    BYTES = auto()
    CPU = auto()
    """Processor seconds spent on what a peer sent."""
    RECORDS = auto()
    """Records that are new to us: they are verified, stored, relayed, and their payloads fetched."""
    MISSES = auto()
    """Requests for chunks that we do not have, and chunks sent that we did not ask for. Small chunks, and
    requests that we decline, count too."""
    REQUESTS = auto()
    """HTTP requests, except members' requests for chunks."""
    HANDSHAKES = auto()
    CONNECTIONS = auto()


@dataclass(frozen=True, slots=True)
class Allowance:
    """Units per second, and how many may be saved up."""

    rate: float
    burst: float


PER_NODE = {
    Resource.MESSAGES: Allowance(limits.MESSAGES_PER_S, limits.MESSAGES_BURST),
    Resource.BYTES: Allowance(limits.MESSAGE_BYTES_PER_S, limits.MESSAGE_BYTES_BURST),
    Resource.CPU: Allowance(limits.CPU_PER_NODE, limits.CPU_PER_NODE_BURST_S),
    Resource.RECORDS: Allowance(limits.RECORDS_PER_S, limits.RECORDS_BURST),
    Resource.MISSES: Allowance(limits.MISSES_PER_S, limits.MISSES_BURST),
    Resource.HANDSHAKES: Allowance(limits.HANDSHAKES_PER_NODE_S, limits.HANDSHAKES_PER_NODE_BURST),
}
PER_ADDRESS = {
    Resource.CPU: Allowance(limits.CPU_PER_ADDRESS, limits.CPU_PER_ADDRESS_BURST_S),
    Resource.REQUESTS: Allowance(limits.REQUESTS_PER_S, limits.REQUESTS_BURST),
    Resource.CONNECTIONS: Allowance(limits.CONNECTIONS_PER_S, limits.CONNECTIONS_BURST),
}


def cost_of_message(*, received: int, sent: int, cpu_s: float, fresh: int) -> dict[Resource, float]:
    """What a peer is charged for a message of `received` bytes that took `cpu_s` to handle.

    `sent` counts the bytes sent to the peer since its last message, `fresh` the records that were new to us.
    Those have a budget of their own, and bring a credit of CPU time.
    """
    overhead = limits.MESSAGE_OVERHEAD_S + limits.BYTE_OVERHEAD_S * (received + sent)
    return {
        Resource.MESSAGES: 1.0,
        Resource.BYTES: float(received),
        Resource.RECORDS: float(fresh),
        Resource.CPU: max(0.0, cpu_s + overhead - fresh * limits.RECORD_CREDIT_S),
    }


class Bucket:
    """One resource of one peer. It may go into debt, since a cost is known only after it was incurred."""

    __slots__ = ("_allowance", "_level", "_time")

    def __init__(self, allowance: Allowance, now: float) -> None:
        self._allowance = allowance
        self._level = allowance.burst
        self._time = now

    def spend(self, amount: float, now: float) -> float:
        """Take `amount`; returns the seconds until the bucket is out of debt, at most PAUSE_MAX_S."""
        deepest = -self._allowance.rate * limits.PAUSE_MAX_S
        self._level = max(deepest, self._filled(now) - amount)
        self._time = max(self._time, now)
        return max(0.0, -self._level / self._allowance.rate)

    def afford(self, amount: float, now: float) -> bool:
        """Take `amount` if it is there; returns whether it was."""
        if self._filled(now) < amount:
            return False
        self.spend(amount, now)
        return True

    def is_full(self, now: float) -> bool:
        """Whether the bucket is full, like a new one."""
        return self._filled(now) >= self._allowance.burst

    def _filled(self, now: float) -> float:
        gained = self._allowance.rate * max(0.0, now - self._time)
        return min(self._allowance.burst, self._level + gained)


class Budgets:
    """The buckets of all peers of one kind: of all node ids, or of all addresses."""

    def __init__(self, allowances: Mapping[Resource, Allowance]) -> None:
        self._allowances = allowances
        self._buckets: dict[Key, dict[Resource, Bucket]] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def spend(self, key: Key, costs: Mapping[Resource, float], now: float) -> float:
        """Charge a peer; returns the seconds for which to leave it unread, usually 0.

        A resource without an allowance is free.
        """
        return max(
            (
                self._bucket(key, resource, now).spend(amount, now)
                for resource, amount in costs.items()
                if amount and resource in self._allowances
            ),
            default=0.0,
        )

    def afford(self, key: Key, resource: Resource, now: float) -> bool:
        """Take one unit if it is there; returns whether it was. For what is refused, not slowed down."""
        return self._bucket(key, resource, now).afford(1.0, now)

    def _bucket(self, key: Key, resource: Resource, now: float) -> Bucket:
        buckets = self._buckets.get(key)
        if buckets is None:
            self._make_room(now)
            buckets = self._buckets[key] = {}
        if resource not in buckets:
            buckets[resource] = Bucket(self._allowances[resource], now)
        return buckets[resource]

    def _make_room(self, now: float) -> None:
        """Forget peers whose buckets are all full; if that is not enough, those known longest."""
        if len(self._buckets) < limits.PEERS_WATCHED_MAX:
            return
        self._buckets = {
            key: buckets
            for key, buckets in self._buckets.items()
            if not all(bucket.is_full(now) for bucket in buckets.values())
        }
        while len(self._buckets) >= limits.PEERS_WATCHED_MAX:
            del self._buckets[next(iter(self._buckets))]


# --- How many bytes of our chunks a member may take: a few copies of all we hold, and of what newly comes.
#
# An honest member takes each chunk once, and again if it loses its disk. One that takes more wastes our line.
# A rate in bytes per second would fit only one size of model, so a ration grows with what there is to take.


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is to take at a moment, in bytes: held now, and come (or made here) since the start."""

    held: int
    came: int


@dataclass(slots=True)
class _Ration:
    left: float
    came: int
    time: float


class Rations:
    """The rations of all members, by node id."""

    def __init__(self) -> None:
        self._rations: dict[bytes, _Ration] = {}

    def __len__(self) -> int:
        return len(self._rations)

    def take(self, node_id: bytes, size: int, stock: Stock, now: float) -> bool:
        """Take `size` bytes of a member's ration if that many are left; returns whether they were."""
        full = limits.RATION_COPIES * max(stock.held, limits.RATION_BYTES_MIN)
        ration = self._rations.pop(node_id, None)
        if ration is None:
            ration = _Ration(full, stock.came, now)
        fresh = limits.RATION_COPIES * (stock.came - ration.came)
        earned = full * max(0.0, now - ration.time) / limits.RATION_PERIOD_S
        ration.left = min(full, ration.left + fresh + earned)
        ration.came, ration.time = stock.came, now
        self._rations[node_id] = ration  # moved to the end: the first came longest ago
        if len(self._rations) > limits.PEERS_WATCHED_MAX:
            del self._rations[next(iter(self._rations))]
        if size > ration.left:
            return False
        ration.left -= size
        return True
