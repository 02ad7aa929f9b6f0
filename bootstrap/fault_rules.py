"""What can be wrong on the way from one node to another: the rules of a `FaultProxy`.

A rule belongs to an ordered pair of nodes, and applies to the bytes that go that way, whichever of the two
dialled. Rules may change at any time, and then apply at once to open connections too.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations


class Bandwidth:
    """A line of limited speed. Rules with the same `Bandwidth` share it, as a node's uplink is shared."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._free_at = 0.0

    async def send(self, count: int) -> None:
        """Wait as long as `count` bytes take, after what was sent before."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + 8 * count / self._bits_per_s
        await asyncio.sleep(self._free_at - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to bytes on their way; by default nothing."""

    black_hole: bool = False
    """Nothing arrives. Nothing is lost either: data arrives after healing, as TCP would resend it."""
    refuse: bool = False
    """New connections are reset at once."""
    latency_s: float = 0.0
    bandwidth: Bandwidth | None = None
    slice_bytes: int = 0
    """Write at most this many bytes at a time; 0 leaves writes as they come."""
    reset_every_bytes: int = 0
    """Reset the connection after this many bytes on average; 0 for never."""
    corrupt_every_bytes: int = 0
    """Flip a bit every this many bytes on average; 0 for never."""


CLEAR = Rule()


class Rules:
    """The rule of every ordered pair of nodes, by name."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rule] = {}
        self._changed = asyncio.Event()

    def of(self, src: str, dst: str) -> Rule:
        return self._rules.get((src, dst), CLEAR)

    def set(self, src: str, dst: str, rule: Rule) -> None:
        """From now on, apply this rule to what `src` sends to `dst`."""
        self._rules[src, dst] = rule
        self._changed.set()
        self._changed = asyncio.Event()

    def set_all(self, names: Iterable[str], rule: Rule) -> None:
        """Set the rule from each of these nodes to each other."""
        for src, dst in permutations(names, 2):
            self.set(src, dst, rule)

    def connect_only(self, names: Iterable[str], edges: Iterable[tuple[str, str]]) -> None:
        """Give the network any shape: of these nodes, only two that an edge joins hear each other."""
        open_pairs = {frozenset(edge) for edge in edges}
        for src, dst in permutations(names, 2):
            hole = frozenset((src, dst)) not in open_pairs
            self.set(src, dst, replace(self.of(src, dst), black_hole=hole))

    def split(self, *sides: Iterable[str]) -> None:
        """Split the network: each side hears only itself."""
        groups = [list(side) for side in sides]
        names = [name for group in groups for name in group]
        self.connect_only(names, (edge for group in groups for edge in permutations(group, 2)))

    def heal(self) -> None:
        """Remove all black holes; other rules stay."""
        for (src, dst), rule in list(self._rules.items()):
            self.set(src, dst, replace(rule, black_hole=False))

    async def passable(self, src: str, dst: str) -> None:
        """Wait while the way is a black hole."""
        while self.of(src, dst).black_hole:
            await self._changed.wait()
