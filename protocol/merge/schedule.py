"""Which changed rounds are merged now, which wait, and when Phi holds all that the swarm had when we came.

Phi does not depend on the order in which rounds are merged, or on how late they are. So each node decides for
itself when to merge a round, by two rules. A round that the swarm cannot have reached yet waits until it has:
a node that signs for such a round is alone in it. An outlier waits while no other delta in its round shows
what is usual, see `held_back`.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from statistics import median

from gossamer.protocol.claims import WITNESSES
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

# --- Rounds that wait for others' deltas before they are merged.
#
# A delta far longer than usual, or of far more tokens, may be a liar's, and it can be clipped and capped only
# beside deltas of others. So a round with too few deltas waits until others have published for it, or the
# swarm
# has gone past it, or they have had enough time to publish.

HELD_BACK_ROUNDS = 2
HELD_BACK_MIN_S = 5.0
"""A round is held back for as long as two of the last rounds took, and at least for this long. By then all
members that are going to publish have done so; where training has ended, none will."""

PACE_ROUNDS = 8


class HeldBack:
    """Which rounds wait, and until when."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._pace: deque[float] = deque(maxlen=PACE_ROUNDS)
        """Seconds that the swarm's last rounds took."""
        self._clock, self._clock_moved_at = 0, 0.0

    def __bool__(self) -> bool:
        """Whether any round may have to wait."""
        return bool(self._until)

    def note_clock(self, clock: int, now: float) -> None:
        """The swarm is at round `clock`. The first reading says nothing about its pace."""
        if clock > self._clock:
            if self._clock:
                self._pace.append((now - self._clock_moved_at) / (clock - self._clock))
            self._clock, self._clock_moved_at = clock, now

    def hold(self, round_: int, now: float) -> None:
        """Make a round wait."""
        usual = median(self._pace) if self._pace else 0.0
        self._until[round_] = now + max(HELD_BACK_MIN_S, HELD_BACK_ROUNDS * usual)

    def release(self, round_: int) -> bool:
        """A round waits no longer; returns whether it did wait."""
        return self._until.pop(round_, None) is not None

    def close(self, floor: int) -> None:
        """Rounds up to `floor` are closed: they wait for nothing."""
        for round_ in [waiting for waiting in self._until if waiting <= floor]:
            del self._until[round_]

    def waits(self, round_: int, clock: int, now: float) -> bool:
        """Whether a round must not be merged yet in a swarm that is at round `clock`."""
        return round_ >= clock and now < self._until.get(round_, now)

    def until(self, round_: int) -> float | None:
        """When a round will have waited long enough; None if it does not wait."""
        return self._until.get(round_)


class MergeSchedule:
    """One node's rounds that wait to be merged, and why. `now` is seconds of its monotonic clock."""

    def __init__(self, core: Replica) -> None:
        self._core = core
        self._dirty: list[int] = []
        """Rounds whose set of complete, valid records differs from the set merged, in order. Without `retain`
        they are tens of thousands after a restart, and are looked at all the time."""
        self._held_back = HeldBack()
        self.reach = 0
        """The newest round merged, by this run or an earlier one."""
        self.ready = False
        """Whether Phi holds all that the swarm had when we joined: the trainer may begin."""
        self._catch_up_to: int | None = None
        self._found_up_to: float = inf
        """The newest round that the swarm had when we came; infinite until we have caught up."""

    def begin(self, floor: int, reach: int) -> None:
        """Phi holds all rounds up to `floor`; newer ones are to be merged into it.

        `reach` is the newest round merged in the state that the node goes on from.
        """
        self.reach = reach
        self._dirty = sorted(round_ for round_ in self._core.ledger.rounds() if round_ > floor)

    def mark(self, round_: int) -> None:
        """A round's set of complete, valid records has changed."""
        self._add(round_)
        self._held_back.release(round_)

    def close(self, floor: int) -> None:
        """Rounds up to `floor` are closed: they stay as they are merged."""
        del self._dirty[: bisect_right(self._dirty, floor)]
        self._held_back.close(floor)

    @property
    def unmerged(self) -> int:
        """Number of changed rounds that are not merged, whatever they wait for."""
        return len(self._dirty)

    def waiting(self, upto: int) -> list[int]:
        """The changed rounds up to `upto` that are not merged, in order."""
        return self._dirty[: bisect_right(self._dirty, upto)]

    def look(self, now: float) -> list[int]:
        """Note how far the swarm has come; returns the rounds to merge, in order."""
        clock = self._core.clock
        self._held_back.note_clock(clock, now)
        self.close(self._core.ledger.floor)
        return list(self._reached(clock, now))

    def to_merge(self, now: float) -> list[int]:
        """The rounds to merge, in order.

        Rounds that are held back are left out, as are those that the swarm cannot have reached, unless it
        rests.
        """
        return list(self._reached(self._core.clock, now))

    def _reached(self, clock: int, now: float) -> Iterator[int]:
        if not self._dirty:  # as a rule, and the horizon takes a while to read
            return iter(())
        reached = islice(self._dirty, bisect_right(self._dirty, self.merge_up_to))
        if not self._held_back:
            return reached
        return (round_ for round_ in reached if not self._held_back.waits(round_, clock, now))

    def take(self, round_: int) -> bool:
        """A round is being merged; returns whether it had been held back."""
        place = bisect_left(self._dirty, round_)
        if self._dirty[place : place + 1] == [round_]:
            del self._dirty[place]
        return self._held_back.release(round_)

    def put_back(self, round_: int) -> None:
        """A round could not be merged after all."""
        self._add(round_)

    def hold_back(self, round_: int, now: float) -> None:
        """A round waits for others' deltas."""
        self._add(round_)
        self._held_back.hold(round_, now)

    def _add(self, round_: int) -> None:
        place = bisect_left(self._dirty, round_)
        if self._dirty[place : place + 1] != [round_]:
            self._dirty.insert(place, round_)

    def merged(self, round_: int) -> None:
        """A round has been merged."""
        self.reach = max(self.reach, round_)

    def held_back_until(self, round_: int) -> float | None:
        """When a round that is held back will have waited long enough; None if it is not held back."""
        return self._held_back.until(round_)

    def stand_alone(self, round_: int, deltas: Sequence[Delta]) -> bool:
        """Whether the deltas of a round that is still under way are too few to show what is usual in it.

        Our own delta would show that. Rounds that the swarm had when we came are not under way: training
        must not begin without them.
        """
        own_id = self._core.identity.node_id
        few = 0 < len(deltas) < WITNESSES and all(delta.author != own_id for delta in deltas)
        return few and round_ >= self._core.clock and round_ > self._found_up_to

    def look_whether_ready(self, now: float) -> None:
        """Set `ready` once everything is merged that the swarm had at the moment when we had caught up."""
        if self.ready or not (self._core.caught_up and self._core.sealing.joined):
            return
        if self._dirty and self._dirty[-1] > self.horizon and not self._core.somebody_trains:
            return  # those rounds may be all the work that others have done
        if self._catch_up_to is None:
            self._catch_up_to = max(self.to_merge(now), default=0)
            self._found_up_to = max(self._core.ledger.rounds(), default=0)
        self.ready = next(self._reached(self._core.clock, now), inf) > self._catch_up_to

    @property
    def horizon(self) -> int:
        """The newest round that the swarm can have reached. A round once merged counts as reached."""
        return max(self._core.horizon, self.reach)

    @property
    def merge_up_to(self) -> float:
        """The newest round that may be merged; infinite if the swarm rests, since it will get no further."""
        return inf if self._core.caught_up and self._core.rests else self.horizon
