"""`merge_schedule` and `held_back`: what is merged, what waits, for how long, and when we are ready."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge.schedule import HELD_BACK_MIN_S, HeldBack, MergeSchedule
from gossamer.protocol.records import Delta
from tests.protocol.builders import unsigned

OWN = unsigned(99, 1).author


class Swarm:
    """What a core would say of the swarm."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.identity = SimpleNamespace(node_id=OWN)
        self.clock, self.horizon = 4, 5
        self.caught_up = self.somebody_trains = True
        self.rests = False
        self.sealing = SimpleNamespace(joined=True)

    def add(self, *deltas: Delta) -> None:
        for delta in deltas:
            self.ledger.add(delta)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


def schedule_of(swarm: Swarm, floor: int = 0, reach: int = 0) -> MergeSchedule:
    schedule = MergeSchedule(swarm)  # type: ignore[arg-type]
    schedule.begin(floor, reach)
    return schedule


def merge(schedule: MergeSchedule, round_: int) -> None:
    schedule.take(round_)
    schedule.merged(round_)


def test_what_lies_above_the_floor_is_merged_in_order(swarm: Swarm) -> None:
    swarm.add(unsigned(1, 4), unsigned(1, 2), unsigned(2, 3))
    schedule = schedule_of(swarm, floor=2)
    schedule.mark(5)
    assert schedule.look(0.0) == [3, 4, 5]
    merge(schedule, 4)
    assert schedule.look(0.0) == schedule.waiting(5) == [3, 5] and schedule.waiting(4) == [3]


def test_a_round_that_changes_again_is_merged_once(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    for round_ in (3, 1, 3, 2, 1):
        schedule.mark(round_)
    for _ in range(2):
        schedule.take(2)
        schedule.put_back(2)
    assert schedule.look(0.0) == [1, 2, 3]
    schedule.take(4)
    merge(schedule, 2)
    assert schedule.look(0.0) == [1, 3]
    schedule.close(2)
    assert schedule.look(0.0) == [3]


def test_a_round_beyond_the_horizon_waits_until_the_swarm_is_there(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    schedule.mark(6)
    assert schedule.look(0.0) == [] and schedule.unmerged == 1
    swarm.horizon = 6
    assert schedule.look(0.0) == [6]


def test_what_was_reached_once_stays_reached(swarm: Swarm) -> None:
    schedule = schedule_of(swarm, reach=9)
    for round_ in (6, 9, 10):
        schedule.mark(round_)
    assert schedule.look(0.0) == [6, 9]
    merge(schedule, 9)
    merge(schedule, 6)
    assert schedule.horizon == 9


def test_a_swarm_that_rests_gets_no_further(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    schedule.mark(9)
    swarm.rests = True
    swarm.caught_up = False
    assert schedule.look(0.0) == [], "that it rests is not known yet"
    swarm.caught_up = True
    assert schedule.look(0.0) == [9]
    merge(schedule, 9)
    swarm.rests = False
    schedule.mark(9)
    assert schedule.look(0.0) == [9], "and what was merged stays within reach"


def test_what_is_closed_is_merged_no_more(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    schedule.mark(3)
    schedule.hold_back(4, 0.0)
    swarm.ledger.close(4)
    assert schedule.look(60.0) == [] and not schedule.unmerged
    assert schedule.held_back_until(4) is None


def test_what_is_held_back_waits_for_a_time(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    schedule.mark(4)
    assert not schedule.take(4)
    schedule.hold_back(4, 10.0)
    assert schedule.look(10.0) == [] and schedule.waiting(4) == [4]
    assert schedule.look(10.0 + HELD_BACK_MIN_S - 0.1) == []
    assert schedule.look(10.0 + HELD_BACK_MIN_S) == [4]
    assert schedule.take(4), "so that it is not held back once more"


@pytest.mark.parametrize("end", ["another delta", "the swarm has gone past it"])
def test_what_is_held_back_waits_no_longer_than_it_must(swarm: Swarm, end: str) -> None:
    schedule = schedule_of(swarm)
    schedule.hold_back(4, 10.0)
    if end == "another delta":
        schedule.mark(4)
    else:
        swarm.clock = 5
    assert schedule.look(10.0) == [4]


def test_only_rounds_under_way_that_others_alone_have_published_for_are_held_back(swarm: Swarm) -> None:
    swarm.add(unsigned(1, 5))
    schedule = schedule_of(swarm)
    alone = (unsigned(1, 6),)
    assert not schedule.stand_alone(6, alone), "it may be of what the swarm had when we came"
    merge(schedule, 5)
    schedule.look_whether_ready(0.0)
    assert schedule.ready
    assert schedule.stand_alone(6, alone)
    assert schedule.stand_alone(6, (*alone, unsigned(2, 6)))
    assert not schedule.stand_alone(6, (*alone, unsigned(2, 6), unsigned(3, 6))), "they show what is usual"
    assert not schedule.stand_alone(6, (*alone, unsigned(99, 6))), "our own is among them"
    assert not schedule.stand_alone(6, ()) and not schedule.stand_alone(5, (unsigned(1, 5),))
    swarm.clock = 7
    assert not schedule.stand_alone(6, alone), "the swarm has gone past it"


def test_we_are_ready_when_what_was_there_as_we_caught_up_is_merged(swarm: Swarm) -> None:
    schedule = schedule_of(swarm)
    schedule.mark(3)
    swarm.caught_up = False
    schedule.look_whether_ready(0.0)
    merge(schedule, 3)
    schedule.look_whether_ready(0.0)
    assert not schedule.ready, "nothing is left, but we have not heard of all there is"
    swarm.caught_up = True
    schedule.mark(4)
    schedule.look_whether_ready(0.0)
    assert not schedule.ready
    merge(schedule, 4)
    schedule.mark(5)
    schedule.look_whether_ready(0.0)
    assert schedule.ready, "round 5 came since"


@pytest.mark.parametrize("missing", ["joined", "somebody_trains"])
def test_we_are_not_ready_while_the_swarm_may_have_more(swarm: Swarm, missing: str) -> None:
    where = swarm.sealing if missing == "joined" else swarm
    setattr(where, missing, False)
    schedule = schedule_of(swarm)
    schedule.mark(9)  # beyond the horizon: it may be all that others have done
    schedule.look_whether_ready(0.0)
    assert not schedule.ready
    setattr(where, missing, True)
    schedule.look_whether_ready(0.0)
    assert schedule.ready


def test_a_round_waits_for_two_of_the_last_rounds() -> None:
    held_back = HeldBack()
    for clock, at in ((7, 0.0), (8, 100.0), (10, 300.0), (11, 4000.0)):  # 100, 100 and 3700 s; not the first
        held_back.note_clock(clock, at)
    held_back.hold(12, 4000.0)
    assert held_back.until(12) == 4200.0
    assert held_back.waits(12, 11, 4199.0) and not held_back.waits(12, 11, 4200.0)
