"""What is wrong with the network at the moment: who cannot reach whom, and what happens to bytes.

Splits are sets of directed pairs of hosts. Streams behave like TCP's: nothing is lost on them, but nothing
moves on them while either direction is closed. `Mischief` goes beyond what TCP allows (messages dropped,
doubled, swapped, damaged): the core must stay safe even so, and a full send queue does drop messages.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mischief:
    """The probability of each fault per message, beyond what a stream would do."""

    drop: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    damage: float = 0.0


class Weather:
    """The state of the network, layer by layer: every fault adds a layer and later takes it away."""

    def __init__(self) -> None:
        self._layers: dict[object, frozenset[Pair]] = {}
        self.one_way: frozenset[Pair] = frozenset()
        """Directed pairs that are closed."""
        self.closed: frozenset[Pair] = frozenset()
        """Pairs between which no stream moves: one direction is enough, since it stops acknowledgements."""
        self.loss = 0.0
        """Added to every path's own loss."""
        self.slowness = 1.0
        """Multiplies every path's latency."""
        self.mischief: Mischief | None = None

    def close(self, layer: object, pairs: Iterable[Pair]) -> None:
        """Close directed pairs until `reopen` is called with the same layer."""
        self._layers[layer] = frozenset(pairs)
        self._sum_up()

    def reopen(self, layer: object) -> None:
        self._layers.pop(layer, None)
        self._sum_up()

    def clear(self) -> None:
        """Everything works again."""
        self._layers.clear()
        self._sum_up()
        self.loss, self.slowness, self.mischief = 0.0, 1.0, None

    def _sum_up(self) -> None:
        self.one_way = frozenset().union(*self._layers.values())
        self.closed = self.one_way | {(b, a) for a, b in self.one_way}

    def components(self, hosts: Iterable[int]) -> list[list[int]]:
        """Groups of hosts that can reach each other, directly or through others of the group."""
        left = sorted(hosts)
        groups: list[list[int]] = []
        while left:
            group = [left.pop(0)]
            for host in group:
                near = [other for other in left if (host, other) not in self.closed]
                group += near
                left = [other for other in left if other not in near]
            groups.append(sorted(group))
        return groups


# --- shapes of splits: directed pairs to close -----------------------------------------------------------


def between(side: Iterable[int], other: Iterable[int]) -> set[Pair]:
    """Both directions between two groups."""
    others = list(other)
    return {pair for a in side for b in others if a != b for pair in ((a, b), (b, a))}


def halves(hosts: list[int], rng: random.Random) -> set[Pair]:
    """Two groups of any size, which hear nothing of each other."""
    mixed = rng.sample(hosts, len(hosts))
    cut = rng.randrange(1, len(hosts))
    return between(mixed[:cut], mixed[cut:])


def alone(hosts: list[int], rng: random.Random) -> set[Pair]:
    """One host is cut off."""
    lonely = rng.choice(hosts)
    return between([lonely], hosts)


def ring(hosts: list[int], rng: random.Random) -> set[Pair]:
    """Every host reaches only two neighbours."""
    mixed = rng.sample(hosts, len(hosts))
    neighbours = between_neighbours(mixed)
    return {(a, b) for a in hosts for b in hosts if a != b and (a, b) not in neighbours}


def between_neighbours(order: list[int]) -> set[Pair]:
    """Both directions between each host and the next, the last and the first included."""
    pairs: set[Pair] = set()
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        pairs |= between([here], [there])
    return pairs


def bridge(hosts: list[int], rng: random.Random) -> set[Pair]:
    """Two halves that have one host in common."""
    mixed = rng.sample(hosts, len(hosts))
    middle = len(mixed) // 2
    return between(mixed[:middle], mixed[middle + 1 :])


def one_way(hosts: list[int], rng: random.Random) -> set[Pair]:
    """Some hosts are not heard by some others, which they do hear."""
    mute = rng.sample(hosts, rng.randrange(1, max(2, len(hosts) // 3)))
    deaf = rng.sample(hosts, rng.randrange(1, len(hosts) + 1))
    return {(a, b) for a in mute for b in deaf if a != b}


SHAPES = {"halves": halves, "alone": alone, "ring": ring, "bridge": bridge, "oneway": one_way}
