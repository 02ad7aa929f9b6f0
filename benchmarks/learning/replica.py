"""Phi as the fold of the records that a worker knows, as `gossamer.node.daemon.phi.state` does, without
disk."""

from collections import OrderedDict
from typing import NamedTuple

from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import Ints, is_healthy
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import Contribution, merge_round

Authors = frozenset[int]

NOBODY: Authors = frozenset()

REMEMBERED = 8
"""How many merge results are kept: workers need the same ones one after another."""


class Record(NamedTuple):
    """A delta's author and round."""

    round: int
    author: int


class History:
    """All deltas ever published, and their merges. A merge is a pure function, so replicas share it."""

    def __init__(self, manifest: Manifest) -> None:
        self.layout, self._outer = manifest.plan(), manifest.outer
        self._deltas: dict[Record, Contribution] = {}
        self._merges: OrderedDict[tuple[int, Authors], Ints] = OrderedDict()

    def add(self, record: Record, delta: Contribution) -> None:
        """Keep a delta."""
        self._deltas[record] = delta

    def merge(self, round_: int, authors: Authors) -> Ints | int:
        """Merge of these authors' deltas, int32[fragment.numel]; 0 if there are no authors."""
        if not authors:
            return 0
        key = (round_, authors)
        if key not in self._merges:
            deltas = [self._deltas[Record(round_, author)] for author in authors]
            self._merges[key] = merge_round(deltas, self.layout.of_round(round_), self._outer)
        self._merges.move_to_end(key)
        while len(self._merges) > REMEMBERED:
            self._merges.popitem(last=False)
        return self._merges[key]


class Replica:
    """One node's records, and their Phi: int32[layout.numel]."""

    def __init__(self, history: History, phi: Ints) -> None:
        self._history = history
        self.phi = phi.copy()
        self._known: dict[int, Authors] = {}
        self._merged: dict[int, Authors] = {}
        self._last: dict[int, int] = {}

    def copy(self) -> "Replica":
        """Another replica with the same records."""
        copy = Replica(self._history, self.phi)
        copy._known, copy._merged, copy._last = dict(self._known), dict(self._merged), dict(self._last)
        return copy

    def hear(self, record: Record) -> None:
        """Take a record into the set; `merge` does the work."""
        self._known[record.round] = self._known.get(record.round, NOBODY) | {record.author}
        self._last[record.author] = max(record.round, self.last_round(record.author))

    def last_round(self, author: int) -> int:
        """The highest round of this author; 0 if none."""
        return self._last.get(author, 0)

    def merge(self) -> set[int]:
        """Merge new records; returns the fragments that have changed. Raises DivergedError."""
        changed = sorted(r for r, authors in self._known.items() if self._merged.get(r) != authors)
        for round_ in changed:
            view = self.view(self._history.layout.of_round(round_).index)
            view += self._history.merge(round_, self._merged.get(round_, NOBODY))
            view -= self._history.merge(round_, self._known[round_])
            self._merged[round_] = self._known[round_]
        if changed and not is_healthy(self.phi):
            raise DivergedError("Phi reached a magnitude of 64")
        return {self._history.layout.of_round(round_).index for round_ in changed}

    def merged_round(self, index: int) -> int:
        """The highest round merged into a fragment; its first base if there is none."""
        count = len(self._history.layout.fragments)
        return max((r for r in self._merged if r % count == index), default=index - count if index else 0)

    def view(self, index: int) -> Ints:
        """Phi of one fragment: int32[fragment.numel], not a copy."""
        fragment = self._history.layout.fragments[index]
        return self.phi[fragment.offset : fragment.offset + fragment.numel]
