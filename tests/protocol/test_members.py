"""The roster: the newest row of each author wins, in any order, and the table has an end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.membership.members import Activity, Health, Roster
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders

ROW = builders.row(builders.identity(1))


def _row(number: int, incarnation: int = 1, heartbeat: int = 1, leaving: bool = False) -> MemberRecord:
    body = replace(ROW.body, incarnation=incarnation, heartbeat=heartbeat, leaving=leaving)
    return MemberRecord(node_id=number.to_bytes(32, "big"), body=body, data=b"row")


ROWS = st.lists(
    st.builds(_row, st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=20
)


@given(ROWS, st.randoms(use_true_random=False))
def test_the_newest_row_wins_in_any_order(rows, rng):
    # A node never signs two rows of one age.
    rows = list({(row.node_id, row.body.age): row for row in rows}.values())
    rosters = []
    for _ in range(2):
        rng.shuffle(rows)
        roster = Roster(bytes(32))
        for row in rows + rows[: len(rows) // 2]:
            roster.update(row, 0.0)
        rosters.append(roster)
    one, other = ({m.record.node_id: m.record for m in roster.members()} for roster in rosters)
    assert one == other
    for node_id, peer in one.items():
        assert peer.body.age == max(row.body.age for row in rows if row.node_id == node_id)
    assert [m.record.node_id for m in rosters[0].members()] == sorted(one)


def test_health_follows_rows_and_signs_of_life():
    roster = Roster(bytes(32))
    me = _row(1).node_id
    roster.update(_row(1), 0.0)
    assert roster.get(me).health is Health.ALIVE
    for bad in (Health.SUSPECT, Health.DOWN):
        roster.judge(me, bad, 1.0)
        assert roster.get(me).since == 1.0
        roster.heard_from(me, 2.0)
        assert (roster.get(me).health, roster.get(me).since, roster.get(me).heard) == (Health.ALIVE, 2.0, 2.0)
    roster.judge(me, Health.DOWN, 3.0)
    roster.update(_row(1, heartbeat=2), 4.0)
    assert roster.get(me).health is Health.ALIVE
    roster.heard_from(b"stranger", 5.0)


def test_leaving_is_final_until_the_next_start():
    roster = Roster(bytes(32))
    me = _row(1).node_id
    roster.update(_row(1, heartbeat=2, leaving=True), 0.0)
    assert roster.get(me).health is Health.LEFT
    roster.heard_from(me, 1.0)
    assert not roster.update(_row(1, heartbeat=1), 1.0)
    assert roster.get(me).health is Health.LEFT
    assert roster.live() == []
    roster.update(_row(1, incarnation=2, heartbeat=0), 2.0)
    assert roster.get(me).health is Health.ALIVE


@pytest.mark.parametrize("health", list(Health))
def test_the_gone_are_forgotten_after_a_day(health):
    roster = Roster(bytes(32))
    roster.update(_row(1), 0.0)
    roster.judge(_row(1).node_id, health, 100.0)
    roster.forget_old(100.0 + limits.FORGET_DOWN_AFTER_S)
    assert len(roster.members()) == 1
    roster.forget_old(101.0 + limits.FORGET_DOWN_AFTER_S)
    assert len(roster.members()) == (health in (Health.ALIVE, Health.SUSPECT))


def test_the_table_has_an_end_and_the_gone_make_room_first():
    roster = Roster(bytes(32))
    for number in range(1, limits.MEMBERS_MAX + 1):
        assert roster.update(_row(number), 0.0)
    assert not roster.update(_row(5000), 0.0), "all are alive: no room"
    assert roster.update(_row(7, heartbeat=2), 0.0), "a member's newer row is always welcome"
    roster.judge(_row(3).node_id, Health.DOWN, 2.0)
    roster.judge(_row(4).node_id, Health.LEFT, 1.0)
    assert roster.update(_row(5000), 3.0)
    assert roster.get(_row(4).node_id) is None, "the one that is gone longest"
    assert roster.get(_row(3).node_id) is not None
    assert len(roster.members()) == limits.MEMBERS_MAX


# --- whether a member trains


def test_who_does_not_move_any_more_is_idle_in_a_while():
    activity = Activity(100.0)
    assert not activity.is_idle(100.0 + limits.IDLE_MIN_S), "it may be about to begin"
    assert activity.is_idle(101.0 + limits.IDLE_MIN_S)
    activity.note(1, 0, 120.0)
    activity.note(2, 0, 123.0)
    activity.note(2, 0, 160.0)
    assert activity.is_idle(160.0), "a row that says the same again is no sign of training"
    activity.note(2, 1, 161.0)
    assert not activity.is_idle(161.0), "a round is one"


def test_who_takes_long_for_a_step_is_given_long():
    activity = Activity(0.0)
    for step in range(1, 4):
        activity.note(step, 0, 60.0 * step)
    assert not activity.is_idle(180.0 + 60.0 * limits.IDLE_STRIDES)
    assert activity.is_idle(181.0 + 60.0 * limits.IDLE_STRIDES)


def test_who_was_not_heard_of_for_a_day_is_not_given_days():
    activity = Activity(0.0)
    activity.note(1, 1, 86_400.0)
    assert activity.is_idle(86_401.0 + limits.IDLE_STRIDES * limits.STRIDE_MAX_S)
