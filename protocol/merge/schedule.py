"""When to merge: which changed round is merged next, which wait, and when Phi holds all that the swarm had.

Phi does not depend on the order in which rounds are merged, or on how late they are. So each node decides for
itself. The core asks for one merge at a time (`Merge`), and is answered how it went (`Merged`):

* The newest changed round comes first, so that the trainer has what was published last however many old
  rounds change. A round that was just merged is not merged again before as much time has passed as that
  took, so that deltas that come one after another are merged together, and old rounds get their turn.
* A round that the swarm cannot have reached yet waits until it has: a node that signs for such a round is
  alone in it. Where nobody trains any more the swarm gets no further, and nothing waits.
* An *outlier*, a delta far longer than usual or of far more tokens, may be a liar's, and can be clipped and
  capped only beside deltas of others. So a round under way that has nothing else is *held back* until others
  have published for it, or the swarm has gone past it, or they have had enough time to publish.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from gossamer.protocol.effects import Merge
from gossamer.protocol.events import Merged, MergeOutcome
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import QUORUM_MAX
from gossamer.protocol.records import Delta

GATHER_S = 0.02
"""Arrivals within this time of each other are merged together."""

AGAIN_MIN_S, AGAIN_MAX_S = 0.05, 5.0
"""A round is not merged again before this, however little time its merge took, and then it is, however long
that was: the machine may have slept meanwhile (`nights`, seed 8 of 8 nodes and 8 minutes)."""

POLL_S = 0.25
"""How often a node looks again while rounds wait, or it is not ready."""

HELD_BACK_ROUNDS = 2
HELD_BACK_MIN_S = 5.0
"""A round is held back for as long as two of the last rounds took, and at least for this long. By then all
members that are going to publish have done so; where training has ended, none will."""

PACE_ROUNDS = 8


class SwarmState(NamedTuple):
    """How far the swarm is, and how far we are with it."""

    clock: int
    horizon: float
    """The newest round that may be merged, since the swarm can have reached it; infinite if nobody trains any
    more, for the swarm gets no further then."""
    somebody_trains: bool
    caught_up: bool
    """Whether we have joined, and have learned enough from others to train."""


class MergeSchedule:
    """One node's rounds that wait to be merged, and why. `now` is seconds of its monotonic clock."""

    def __init__(self, own_id: bytes, ledger: Ledger) -> None:
        self._own_id = own_id
        self._ledger = ledger
        self._changed: list[int] = []
        """Rounds whose set of complete, valid records differs from the set merged, in order. Without `retain`
        they are tens of thousands after a restart."""
        self._has_begun = False
        self._under_way: tuple[Merge, float] | None = None
        """What is being merged, and since when."""
        self._rests: dict[int, float] = {}
        """Until when rounds that were just merged are not merged again."""
        self._held_back: dict[int, float] = {}
        """Until when rounds with outliers alone wait for others' deltas."""
        self._clock, self._clock_moved_at = 0, 0.0
        self._round_seconds: deque[float] = deque(maxlen=PACE_ROUNDS)
        """Seconds that the swarm's last rounds took."""
        self._due = inf
        self.reach = 0
        """The newest round merged, by this run or an earlier one."""
        self.ready = False
        """Whether Phi holds all that the swarm had when we joined: the trainer may begin."""
        self._catch_up_to: int | None = None
        self._found_up_to: float = inf
        """The newest round that the swarm had when we came; infinite until we have caught up."""

    # -- what happens

    def begin(self, floor: int, reach: int, now: float) -> None:
        """Phi holds all rounds up to `floor` and nothing else; newer ones are to be merged into it.

        `reach` is the newest round merged in the state that the node goes on from. A merge under way is of no
        use any more, and is not answered.
        """
        self._has_begun = True
        self.reach = reach
        self._changed = [round_ for round_ in self._ledger.rounds() if round_ > floor]
        self._under_way = None
        self._rests.clear()
        self._held_back.clear()
        self._due = now

    def mark(self, round_: int, now: float) -> None:
        """A round's set of complete, valid records has changed."""
        self._add(round_)
        self._held_back.pop(round_, None)
        self._due = min(self._due, now + GATHER_S)

    def merged(self, event: Merged, now: float) -> Sequence[Delta]:
        """A round was merged, or was not after all. Returns what is merged in it now, if that is news."""
        if self._under_way is None or self._under_way[0].round != event.round:
            return ()
        merge, since = self._under_way
        took = now - since
        self._under_way, self._due = None, now
        self._rests = {round_: until for round_, until in self._rests.items() if until > now}
        self._rests[event.round] = now + min(max(AGAIN_MIN_S, took), AGAIN_MAX_S)
        if event.outcome is MergeOutcome.CHANGED:
            self.reach = max(self.reach, event.round)
        elif event.outcome is MergeOutcome.FAILED:
            self._add(event.round)
        elif event.outcome is MergeOutcome.OUTLIERS:
            self._add(event.round)
            usual = median(self._round_seconds) if self._round_seconds else 0.0
            self._held_back[event.round] = now + max(HELD_BACK_MIN_S, HELD_BACK_ROUNDS * usual)
        return merge.deltas if event.outcome is MergeOutcome.CHANGED else ()

    # -- what to do

    def deadline(self) -> float:
        """When `plan` is due."""
        return self._due if self._has_begun and self._under_way is None else inf

    def plan(self, swarm: SwarmState, holds: Callable[[bytes], bool], now: float) -> Merge | None:
        """The merge to ask for now, if any. `holds` tells whether the whole payload of a delta is here."""
        self._note_clock(swarm.clock, now)
        del self._changed[: bisect_right(self._changed, self._ledger.floor)]
        for round_ in [held for held in self._held_back if held <= self._ledger.floor]:
            del self._held_back[round_]
        mergeable = self._mergeable(swarm, now)
        self._see_whether_ready(swarm, mergeable)
        round_ = next((due for due in reversed(mergeable) if self._rests.get(due, now) <= now), 0)
        if not round_:
            self._due = now + POLL_S if self._changed or not self.ready else inf
            return None
        del self._changed[bisect_left(self._changed, round_)]
        has_waited = self._held_back.pop(round_, None) is not None
        deltas = tuple(d for d in self._ledger.valid(round_) if holds(d.record_id))
        may_wait = not has_waited and round_ >= swarm.clock
        merge = Merge(round_, deltas, unless_outliers=may_wait and self._stand_alone(round_, deltas))
        self._under_way = merge, now
        return merge

    def _note_clock(self, clock: int, now: float) -> None:
        """The first reading of the clock says nothing about the swarm's pace."""
        if clock > self._clock:
            if self._clock:
                self._round_seconds.append((now - self._clock_moved_at) / (clock - self._clock))
            self._clock, self._clock_moved_at = clock, now

    def _mergeable(self, swarm: SwarmState, now: float) -> list[int]:
        """The changed rounds that the swarm has reached and that are not held back, in order."""
        reached = self._changed[: bisect_right(self._changed, self.merge_up_to(swarm))]
        if not self._held_back:
            return reached
        return [r for r in reached if r < swarm.clock or self._held_back.get(r, now) <= now]

    def _stand_alone(self, round_: int, deltas: Sequence[Delta]) -> bool:
        """Whether the deltas of a round are too few to show what is usual in it, as our own would.

        Rounds that the swarm had when we came do not wait: training must not begin without them.
        """
        few = 0 < len(deltas) < QUORUM_MAX and all(delta.author != self._own_id for delta in deltas)
        return few and round_ > self._found_up_to

    def _see_whether_ready(self, swarm: SwarmState, mergeable: Sequence[int]) -> None:
        """We are ready once all is merged that the swarm had at the moment when we had caught up."""
        if self.ready or not swarm.caught_up:
            return
        if self._changed and self._changed[-1] > self.merge_up_to(swarm) and not swarm.somebody_trains:
            return  # those rounds may be all the work that others have done
        if self._catch_up_to is None:
            self._catch_up_to = max(mergeable, default=0)
            self._found_up_to = max(self._ledger.rounds(), default=0)
        self.ready = min(mergeable, default=inf) > self._catch_up_to

    def _add(self, round_: int) -> None:
        place = bisect_left(self._changed, round_)
        if self._changed[place : place + 1] != [round_]:
            self._changed.insert(place, round_)

    # -- what others ask

    def merge_up_to(self, swarm: SwarmState) -> float:
        """The newest round that may be merged. A round once merged counts as reached."""
        return max(swarm.horizon, self.reach)

    @property
    def unmerged(self) -> int:
        """Number of changed rounds that are not merged, whatever they wait for."""
        return len(self._changed) + (self._under_way is not None)

    def behind(self, swarm: SwarmState, now: float) -> int:
        """Number of changed rounds that are not merged, without those that wait for others."""
        return len(self._mergeable(swarm, now)) + (self._under_way is not None)

    def waiting(self, upto: int) -> list[int]:
        """The changed rounds up to `upto` that are not merged, in order."""
        waiting = self._changed[: bisect_right(self._changed, upto)]
        if self._under_way is not None and self._under_way[0].round <= upto:
            waiting = sorted({*waiting, self._under_way[0].round})
        return waiting

    def is_held_back(self, round_: int) -> bool:
        """Whether a round waits for others' deltas."""
        return round_ in self._held_back
