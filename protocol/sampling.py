"""Random choices, drawn from a random source that is handed in, or from a hash: equal sources make equal
choices."""

from collections.abc import Iterable, MutableSequence
from hashlib import sha256
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


# --- Sortition: who contributes to a round of a large swarm.

EVERY_ROUND = 64
"""The turn of a node that contributes to every round."""


def is_drawn(node_id: bytes, round_: int, turn: int) -> bool:
    """Whether a node contributes to a round, if its turn comes once in `turn` / 64 rounds on average.

    By ``H(node id | round)``: so nobody can get into more rounds than its share. Ids are fixed, and rounds
    are not theirs to choose. (In an open swarm keys are free: a share is one key's.) With a smaller turn all
    are drawn that are with a larger one, and more.
    """
    if turn <= EVERY_ROUND:
        return True
    place = int.from_bytes(sha256(node_id + round_.to_bytes(4, "big")).digest()[:8], "big")
    return place * turn < EVERY_ROUND << 64


def share(count: int, turn: int) -> int:
    """Of so many members, how many contribute to a round, and of so many rounds, to how many a member does;
    on average, rounded down."""
    return count * EVERY_ROUND // max(turn, EVERY_ROUND)
