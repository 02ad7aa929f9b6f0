"""What is merged, what waits, for how long, and when we are ready."""

from __future__ import annotations

from math import inf

import pytest

from gossamer.protocol.events import Merged, MergeOutcome
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge.schedule import AGAIN_MIN_S, GATHER_S, HELD_BACK_MIN_S, MergeSchedule, SwarmState
from tests.protocol.builders import unsigned

OWN = unsigned(99, 1).author


class Swarm:
    """A schedule, and how far its swarm is. All payloads are here."""

    def __init__(self, floor: int = 0, reach: int = 0, rounds: tuple[tuple[int, int], ...] = ()) -> None:
        """`rounds`: author and round of the deltas that there are at first."""
        self.state = SwarmState(4, 5, somebody_trains=True, caught_up=True)
        self.ledger = Ledger()
        self.schedule = MergeSchedule(OWN, self.ledger)
        for author, round_ in rounds:
            self.ledger.add(unsigned(author, round_))
        self.schedule.begin(floor, reach, 0.0)
        self.now = 1.0

    def be(self, **changes: object) -> None:
        self.state = self.state._replace(**changes)  # type: ignore[arg-type]

    def publish(self, author: int, round_: int) -> None:
        self.ledger.add(unsigned(author, round_))
        self.schedule.mark(round_, self.now)

    def asked(self) -> int | None:
        """The round to merge now, if any."""
        merge = self.schedule.plan(self.state, lambda record_id: True, self.now)
        self.merge = merge
        return merge and merge.round

    @property
    def behind(self) -> int:
        return self.schedule.behind(self.state, self.now)

    def answer(self, outcome: MergeOutcome = MergeOutcome.CHANGED) -> None:
        assert self.merge is not None
        self.schedule.merged(Merged(self.merge.round, outcome), self.now)

    def merge_all(self) -> list[int]:
        """Merge all that may be; returns the rounds in order."""
        merged = []
        while (round_ := self.asked()) is not None:
            merged.append(round_)
            self.answer()
        return merged


def test_what_lies_above_the_floor_is_merged_and_the_newest_first() -> None:
    swarm = Swarm(floor=2, rounds=((1, 4), (1, 2), (2, 3)))
    swarm.publish(1, 5)
    assert swarm.merge_all() == [5, 4, 3] and swarm.schedule.unmerged == 0 and swarm.schedule.reach == 5


def test_nothing_is_merged_before_there_is_a_state() -> None:
    schedule = MergeSchedule(OWN, Ledger())
    schedule.mark(1, 0.0)
    assert schedule.deadline() == inf


def test_one_merge_is_under_way_at_a_time_and_counts_until_it_is_answered() -> None:
    swarm = Swarm(rounds=((1, 3), (1, 4)))
    assert swarm.asked() == 4
    assert swarm.schedule.deadline() == inf and swarm.schedule.waiting(9) == [3, 4]
    assert swarm.behind == swarm.schedule.unmerged == 2
    swarm.answer()
    assert swarm.schedule.deadline() <= swarm.now and swarm.schedule.waiting(9) == [3]


def test_a_merge_of_another_state_is_not_waited_for() -> None:
    swarm = Swarm(rounds=((1, 4),))
    assert swarm.asked() == 4
    swarm.schedule.begin(0, 0, swarm.now)
    assert swarm.asked() == 4


def test_what_arrives_together_is_merged_together() -> None:
    swarm = Swarm()
    assert swarm.asked() is None
    swarm.publish(1, 4)
    assert swarm.schedule.deadline() == swarm.now + GATHER_S
    swarm.publish(2, 4)
    assert swarm.asked() == 4 and swarm.merge is not None and len(swarm.merge.deltas) == 2


@pytest.mark.parametrize(("took", "rest"), [(0.02, AGAIN_MIN_S), (3.0, 3.0)])
def test_a_round_that_was_just_merged_rests_for_as_long_and_others_have_their_turn(
    took: float, rest: float
) -> None:
    swarm = Swarm(rounds=((1, 2), (1, 4)))
    assert swarm.asked() == 4
    swarm.now += took
    swarm.answer()
    swarm.publish(2, 4)
    assert swarm.merge_all() == [2]
    swarm.now += rest - 0.01
    assert swarm.asked() is None
    swarm.now += 0.02
    assert swarm.asked() == 4


def test_what_failed_is_tried_again() -> None:
    swarm = Swarm(rounds=((1, 4),))
    swarm.asked()
    swarm.answer(MergeOutcome.FAILED)
    swarm.now += 1.0
    assert swarm.asked() == 4 and swarm.schedule.reach == 0


def test_a_round_beyond_the_horizon_waits_until_the_swarm_is_there() -> None:
    swarm = Swarm()
    swarm.publish(1, 6)
    assert swarm.asked() is None and (swarm.schedule.unmerged, swarm.behind) == (1, 0)
    swarm.be(horizon=6)
    assert swarm.asked() == 6


def test_what_was_reached_once_stays_reached() -> None:
    swarm = Swarm(reach=9, rounds=((1, 6), (1, 9), (1, 10)))
    assert swarm.merge_all() == [9, 6] and swarm.schedule.merge_up_to(swarm.state) == 9


def test_a_swarm_that_rests_gets_no_further() -> None:
    swarm = Swarm(rounds=((1, 9),))
    assert swarm.asked() is None
    swarm.be(horizon=inf)
    assert swarm.merge_all() == [9]


def test_what_is_closed_is_merged_no_more() -> None:
    swarm = Swarm(rounds=((1, 3),))
    swarm.ledger.close(4)
    assert swarm.asked() is None and not swarm.schedule.unmerged


def held_back() -> Swarm:
    """Round 5 has an outlier alone."""
    swarm = Swarm()
    assert swarm.asked() is None and swarm.schedule.ready
    swarm.publish(1, 5)
    assert swarm.asked() == 5 and swarm.merge is not None and swarm.merge.unless_outliers
    swarm.answer(MergeOutcome.OUTLIERS)
    return swarm


def test_what_is_held_back_waits_for_a_time_and_is_not_held_back_once_more() -> None:
    swarm = held_back()
    swarm.now += HELD_BACK_MIN_S - 0.1
    assert swarm.asked() is None and swarm.schedule.waiting(5) == [5] and swarm.schedule.is_held_back(5)
    swarm.now += 0.1
    assert swarm.asked() == 5 and swarm.merge is not None and not swarm.merge.unless_outliers


@pytest.mark.parametrize("end", ["another delta", "the swarm has gone past it"])
def test_what_is_held_back_waits_no_longer_than_it_must(end: str) -> None:
    swarm = held_back()
    if end == "another delta":
        swarm.publish(2, 5)
    else:
        swarm.be(clock=6)
    swarm.now += AGAIN_MIN_S
    assert swarm.asked() == 5


def test_a_round_is_held_back_for_longer_where_rounds_are_long() -> None:
    swarm = held_back()
    for clock in (6, 7, 8):
        swarm.be(clock=clock, horizon=clock + 1)
        swarm.now += 100.0
        swarm.merge_all()
    swarm.publish(1, 9)
    assert swarm.asked() == 9
    swarm.answer(MergeOutcome.OUTLIERS)
    swarm.now += 199.0
    assert swarm.asked() is None
    swarm.now += 1.0
    assert swarm.asked() == 9


@pytest.mark.parametrize(
    ("authors", "may_be"), [((1,), True), ((1, 2), True), ((1, 2, 3), False), ((1, 99), False)]
)
def test_only_rounds_that_few_others_have_published_for_are_held_back(
    authors: tuple[int, ...], may_be: bool
) -> None:
    swarm = Swarm()
    swarm.asked()
    for author in authors:
        swarm.publish(author, 5)
    assert swarm.asked() == 5 and swarm.merge is not None and swarm.merge.unless_outliers is may_be


def test_what_the_swarm_had_when_we_came_is_not_held_back_nor_what_it_has_gone_past() -> None:
    swarm = Swarm(rounds=((1, 5),))
    assert swarm.asked() == 5 and swarm.merge is not None and not swarm.merge.unless_outliers
    swarm.answer()
    swarm.be(clock=7, horizon=8)
    swarm.publish(1, 6)
    assert swarm.asked() == 6 and swarm.merge is not None and not swarm.merge.unless_outliers


def test_we_are_ready_when_what_was_there_as_we_caught_up_is_merged() -> None:
    swarm = Swarm(rounds=((1, 3),))
    swarm.be(caught_up=False)
    assert swarm.merge_all() == [3] and not swarm.schedule.ready, "we have not heard of all there is"
    swarm.be(caught_up=True)
    swarm.publish(1, 4)
    assert swarm.asked() == 4 and not swarm.schedule.ready
    swarm.publish(1, 5)  # came since
    swarm.answer()
    assert swarm.asked() == 5 and swarm.schedule.ready


@pytest.mark.parametrize("missing", ["caught_up", "somebody_trains"])
def test_we_are_not_ready_while_the_swarm_may_have_more(missing: str) -> None:
    swarm = Swarm(rounds=((1, 9),))  # beyond the horizon: it may be all that others have done
    swarm.be(**{missing: False})
    assert swarm.asked() is None and not swarm.schedule.ready
    swarm.be(**{missing: True})
    assert swarm.asked() is None and swarm.schedule.ready
