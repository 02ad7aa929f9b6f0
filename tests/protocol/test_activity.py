"""Who trains: rows that tell of nothing new for long enough tell that nobody does there."""

from gossamer.protocol import limits
from gossamer.protocol.membership.members import Activity


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
