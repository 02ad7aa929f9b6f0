"""What a fuzz target is, and how far an input gets into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from random import Random

from gossamer.protocol.errors import GossamerError, PeerError
from gossamer.protocol.wire import is_printable
from tests.fuzz.mutate import mutate_bytes, mutate_packed

Run = Callable[[bytes], Iterator[None]]
"""Feeds one input. The first `yield` says that it has passed the first check (see `Depth`), the second that
it was accepted: what is raised after that is a failure, whatever it is."""


class Depth(IntEnum):
    """How far an input got."""

    SHALLOW = 0
    """Turned away by the first check: not msgpack, no valid signature, a wrong length."""
    DEEP = 1
    """Past that, and turned away by what comes after it."""
    ACCEPTED = 2


@dataclass(frozen=True)
class Target:
    """Something that takes bytes from strangers, or from a disk."""

    name: str
    run: Run
    make_seeds: Callable[[], list[bytes]]
    """Valid inputs, and some that are nearly so."""
    errors: type[GossamerError] | tuple[()] = PeerError
    """What it may raise."""
    mutate: Callable[[bytes, Random], bytes] = mutate_packed
    share: float = 1.0
    """How many inputs it gets compared with others: less for what is slow."""
    giants: Callable[[], list[bytes]] = list
    """Inputs of the largest size, fed once each: too large to change and feed thousands of times."""
    extra: dict[str, int] = field(default_factory=dict)
    """What it counted besides, for the report."""

    @cached_property
    def seeds(self) -> list[bytes]:
        return self.make_seeds()

    def derive(self, choice: int, changes: list[int]) -> bytes:
        """The input that follows from a seed by these changes, one `Random` each."""
        data = self.seeds[choice % len(self.seeds)]
        for change in changes:
            dice = Random(change)
            if dice.randrange(12):
                data = self.mutate(data, dice)
            else:  # splice
                other = self.seeds[dice.randrange(len(self.seeds))]
                data = data[: dice.randrange(len(data) + 1)] + other[dice.randrange(len(other) + 1) :]
        return data

    def feed(self, data: bytes) -> Depth:
        """Give the target one input. Raises whatever it raises beyond `errors`."""
        depth = Depth.SHALLOW
        try:
            for _ in self.run(data):
                depth = Depth(min(depth + 1, Depth.ACCEPTED))
        except self.errors as error:
            if depth is Depth.ACCEPTED or not is_printable(str(error)):
                raise AssertionError(f"raised too late, or not fit for a log: {error!r}") from error
            return depth
        return Depth.ACCEPTED


__all__ = ["Depth", "Run", "Target", "mutate_bytes", "mutate_packed"]
