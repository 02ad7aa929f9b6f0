"""What a fuzz target is, and how far an input gets into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from random import Random

from gossamer.protocol.errors import GossamerError, PeerError
from gossamer.protocol.wire import is_printable
from tests.fuzz.mutate import mutate_bytes, mutate_packed

Run = Callable[[bytes], Iterator[None]]
"""Feeds one input. The first `yield` says that it has passed the first check (see `Depth`), the second that
it was accepted: any exception after that is a failure."""


class Depth(IntEnum):
    """How far an input got."""

    SHALLOW = 0
    """Turned away by the first check: not msgpack, no valid signature, a wrong length."""
    DEEP = 1
    """Past the first check, and turned away by a later one."""
    ACCEPTED = 2


@dataclass(frozen=True)
class Target:
    """A reader of bytes from strangers, or from a disk."""

    name: str
    run: Run
    make_seeds: Callable[[], list[bytes]]
    """Valid inputs, and some that are nearly so."""
    errors: type[GossamerError] | tuple[()] = PeerError
    """The exceptions that it may raise."""
    mutate: Callable[[bytes, Random], bytes] = mutate_packed
    share: float = 1.0
    """How many inputs it gets compared with others: fewer for slow targets."""
    giants: Callable[[], list[bytes]] = list
    """Inputs of the largest size, fed once each: too large to change and feed thousands of times."""

    @cached_property
    def seeds(self) -> list[bytes]:
        return self.make_seeds()

    def derive(self, choice: int, changes: list[int]) -> bytes:
        """The input made from a seed by these changes, each with a `Random` of its own."""
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
        """Give the target one input. Raises what the target raises, except `errors`."""
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
