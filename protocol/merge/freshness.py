"""What a node states of its own windows: how long they take, and how late the others' deltas are merged.

The swarm's pace is made of this (`pace`). Times are differences of the local monotonic clock, so nothing
depends on how nodes' clocks are set.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import WINDOW_MS_MAX
from gossamer.protocol.records import Delta


class Stated(NamedTuple):
    """What a delta says of the window that it closes; see `DeltaBody`."""

    took: int
    late: int
    agreement: int


NOTHING_STATED = Stated(0, 0, 0)


class Freshness:
    """How long our windows take, and how late into them the others' deltas are merged.

    `now` is seconds of the local monotonic clock, so nothing depends on others' clocks.
    """

    def __init__(self, ledger: Ledger, own_id: bytes, fragments: int) -> None:
        self._ledger = ledger
        self._own_id = own_id
        self._fragments = fragments
        self._published: dict[int, tuple[int, int, float]] = {}
        """By fragment: our last round, the one before, and when we published the last."""
        self._merged: dict[int, list[tuple[float, int, int]]] = {}
        """By round since then: when how many deltas of others were merged, and how they agreed."""

    def published(self, round_: int, now: float) -> None:
        """A window of ours is closed, and the next begins."""
        fragment = round_ % self._fragments
        before, *_ = self._published.get(fragment, (0,))
        self._published[fragment] = round_, before, now
        for old in [r for r in self._merged if r % self._fragments == fragment and r < round_]:
            del self._merged[old]

    def merged(self, round_: int, deltas: Iterable[Delta], agreement: int, now: float) -> None:
        """A round was merged; `agreement`: see `DeltaBody`."""
        last = self._published.get(round_ % self._fragments)
        if last is not None and round_ >= last[0]:
            others = sum(delta.author != self._own_id for delta in deltas)
            self._merged.setdefault(round_, []).append((now, others, agreement))

    def stated(self, round_: int, now: float) -> Stated:
        """What to state in the delta that closes our window now."""
        last = self._published.get(round_ % self._fragments)
        if last is None:
            return NOTHING_STATED
        last_round, before, at = last
        merged = self._merged.get(last_round, [])
        # The others' records may be as late as their payloads, so we expect as many as the last time.
        expected = max(self._others(last_round), self._others(before))
        took = min(max(1, int(1000 * (now - at))), WINDOW_MS_MAX)
        came = (when for when, others, _ in merged if others >= (expected + 1) // 2)
        late = max(0, int(1000 * (next(came, now) - at))) if expected else 0
        return Stated(took, min(late, took), merged[-1][2] if merged else 1000)

    def _others(self, round_: int) -> int:
        return sum(delta.author != self._own_id for delta in self._ledger.valid(round_)) if round_ else 0
