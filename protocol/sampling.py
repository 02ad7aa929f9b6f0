"""Random choices, drawn from a random source that is handed in: equal sources make equal choices."""

from collections.abc import Iterable, MutableSequence
from typing import Any, Protocol


class RandomSource(Protocol):
    """The part of `random.Random` that the core uses. It is handed in, so that a seed replays everything."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


def sample(items: Iterable[int], count: int, rng: RandomSource) -> list[int]:
    """Up to `count` different items, in a random order that does not depend on the order of `items`."""
    pool = sorted(items)
    for i in range(min(count, len(pool))):
        j = i + rng.randrange(len(pool) - i)
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]


def shuffle(items: MutableSequence[Any], rng: RandomSource) -> None:
    """Put items into a random order, in place."""
    for i in range(len(items) - 1, 0, -1):
        j = rng.randrange(i + 1)
        items[i], items[j] = items[j], items[i]
