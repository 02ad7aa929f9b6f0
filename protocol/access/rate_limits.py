"""What a peer may use of our resources, as token buckets: refilled at a steady rate, up to a burst.

A peer that uses more is not cut off but read more slowly: `Budgets.spend` tells how long to leave it unread,
and meanwhile TCP makes it wait (back-pressure). So an honest peer that exceeds a budget loses time, but never
its link.

What honest peers never do costs points instead, and these fade: a peer with too many is turned away until
enough of them have faded (`Greylist`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import exp2, log2
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.errors import Offence

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


class Allowance(NamedTuple):
    """Units per second, and how many may be saved up."""

    rate: float
    burst: float


PER_NODE = {
    # One that relays every record of 1,024 members to 6 links sends 250 messages a second. A joiner's 100,000
    # records come in 3,125 messages; 10,000 of 32 KiB each, the largest that honest nodes sign, are 320 MiB.
    Resource.MESSAGES: Allowance(500.0, 10_000.0),
    Resource.BYTES: Allowance(16.0 * 2**20, 512.0 * 2**20),
    # Seconds a second: records of 1,024 members, relayed by one, take 0.06; a small swarm's 0.003.
    Resource.CPU: Allowance(0.08, 3.0),
    # At 0.25 ms each for signature, parsing and storing, a twentieth of a processor; each of 1,024 members
    # signs one in 5 s at most. A joiner is sent all that is open: 1,040 rounds of 19 members over one link.
    Resource.RECORDS: Allowance(200.0, 20_000.0),
    # A peer that does not know who holds a payload asks everybody: 1,024 chunks, a few times over.
    Resource.MISSES: Allowance(100.0, 4_096.0),
    # An honest node redials after REDIAL_INTERVAL_S.
    Resource.HANDSHAKES: Allowance(0.5, 20.0),
}
"""By node id."""

PER_ADDRESS = {
    # Keys cost nothing: a budget per key alone would bind nobody. Honest nodes may share an address.
    Resource.CPU: Allowance(0.25, 10.0),
    # 64 nodes behind one router join at once, and open connections for their chunks (2 to 3 ms each).
    Resource.REQUESTS: Allowance(20.0, 400.0),
    Resource.CONNECTIONS: Allowance(30.0, 1_000.0),
}

MESSAGE_OVERHEAD_S = 60e-6
BYTE_OVERHEAD_S = 2e-9
"""Cost of a message besides its handling, where nobody measures it: frames, TLS, system calls, an answer."""

RECORD_CREDIT_S = 0.0005
"""CPU time that a record new to us earns its sender: what a joiner asked for costs the peer nothing."""


def cost_of_message(*, received: int, sent: int, cpu_s: float, fresh: int) -> dict[Resource, float]:
    """What a peer is charged for a message of `received` bytes that took `cpu_s` to handle.

    `sent` counts the bytes sent to the peer since its last message, `fresh` the records that were new to us.
    """
    overhead = MESSAGE_OVERHEAD_S + BYTE_OVERHEAD_S * (received + sent)
    return {
        Resource.MESSAGES: 1.0,
        Resource.BYTES: float(received),
        Resource.RECORDS: float(fresh),
        Resource.CPU: max(0.0, cpu_s + overhead - fresh * RECORD_CREDIT_S),
    }


@dataclass(slots=True)
class _Bucket:
    """One resource of one peer. It may go into debt, since a cost is known only after it was incurred."""

    allowance: Allowance
    level: float
    time: float

    def fill(self, now: float) -> None:
        self.level = min(self.allowance.burst, self.level + self.allowance.rate * max(0.0, now - self.time))
        self.time = max(self.time, now)

    def spend(self, amount: float) -> float:
        """Take `amount`; returns the seconds until the bucket is out of debt, at most PAUSE_MAX_S."""
        deepest = -self.allowance.rate * limits.PAUSE_MAX_S
        self.level = max(deepest, self.level - amount)
        return max(0.0, -self.level / self.allowance.rate)


class Budgets:
    """The buckets of all peers of one kind: of all node ids, or of all addresses."""

    def __init__(self, allowances: Mapping[Resource, Allowance]) -> None:
        self._allowances = allowances
        self._buckets: dict[Key, dict[Resource, _Bucket]] = {}

    def spend(self, key: Key, costs: Mapping[Resource, float], now: float) -> float:
        """Charge a peer; returns the seconds for which to leave it unread, usually 0.

        A resource without an allowance is free.
        """
        charged = [(self._bucket(key, of, now), cost) for of, cost in costs.items() if of in self._allowances]
        return max((bucket.spend(cost) for bucket, cost in charged), default=0.0)

    def afford(self, key: Key, resource: Resource, now: float) -> bool:
        """Take one unit if it is there; returns whether it was. For what is refused, not slowed down."""
        bucket = self._bucket(key, resource, now)
        if bucket.level < 1.0:
            return False
        bucket.spend(1.0)
        return True

    def _bucket(self, key: Key, resource: Resource, now: float) -> _Bucket:
        buckets = self._buckets.get(key)
        if buckets is None:
            self._make_room(now)
            buckets = self._buckets[key] = {}
        if resource not in buckets:
            allowance = self._allowances[resource]
            buckets[resource] = _Bucket(allowance, allowance.burst, now)
        buckets[resource].fill(now)
        return buckets[resource]

    def _make_room(self, now: float) -> None:
        """Forget peers whose buckets are all full; if that is not enough, those known longest."""
        if len(self._buckets) < limits.PEERS_WATCHED_MAX:
            return
        for key, buckets in list(self._buckets.items()):
            for bucket in buckets.values():
                bucket.fill(now)
            if all(bucket.level >= bucket.allowance.burst for bucket in buckets.values()):
                del self._buckets[key]
        while len(self._buckets) >= limits.PEERS_WATCHED_MAX:
            del self._buckets[next(iter(self._buckets))]


# --- How many bytes of our chunks a member may take: a few copies of all we hold, and of what newly comes.
#
# An honest member takes each chunk once, and again if it loses its disk. One that takes more wastes our line.
# A rate in bytes per second would fit only one size of model, so a ration grows with what there is to take.


class Stock(NamedTuple):
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


# --- Misbehaviour as points that fade.


@dataclass(slots=True)
class _Score:
    points: float
    time: float
    listed: bool = False

    def at(self, now: float) -> float:
        return self.points * exp2(-max(0.0, now - self.time) / limits.GREYLIST_HALF_LIFE_S)


class Greylist:
    """Peers that are turned away for now. Keys are node ids, or network addresses for offences that no key
    vouches for."""

    def __init__(self) -> None:
        self._scores: dict[Key, _Score] = {}

    def add(self, key: Key, offence: Offence, now: float) -> bool:
        """Note an offence. Returns whether this one puts the peer on the list."""
        if not offence.points:
            return False
        score = self._scores.get(key)
        if score is None:
            self._make_room(now)
            score = self._scores[key] = _Score(0.0, now)
        was_listed = self.remaining(key, now) > 0.0
        score.points = min(limits.GREYLIST_POINTS_MAX, score.at(now) + offence.points)
        score.time = now
        score.listed = was_listed or score.points >= limits.GREYLIST_POINTS
        return score.listed and not was_listed

    def remaining(self, key: Key, now: float) -> float:
        """Seconds for which a peer will still be turned away; 0 if it is not on the list."""
        score = self._scores.get(key)
        if score is None or not score.listed:
            return 0.0
        points = score.at(now)
        if points < limits.GREYLIST_POINTS_RELEASED:
            return 0.0
        return limits.GREYLIST_HALF_LIFE_S * log2(points / limits.GREYLIST_POINTS_RELEASED)

    def listed(self, now: float) -> list[Key]:
        """The peers that are on the list."""
        return [key for key in self._scores if self.remaining(key, now) > 0.0]

    def _make_room(self, now: float) -> None:
        """Forget the peer with the fewest points."""
        while len(self._scores) >= limits.PEERS_WATCHED_MAX:
            del self._scores[min(self._scores, key=lambda key: self._scores[key].at(now))]
