"""`gossamer.node.daemon.trainer_port`: by how much a trainer's next step is late."""

from __future__ import annotations

from gossamer.node.daemon.trainer_port import STRIDES, Pulse


def test_a_step_is_overdue_by_how_long_steps_take() -> None:
    pulse = Pulse()
    pulse.begin(100.0)
    assert pulse.overdue_s(100.0) == 0.0 and pulse.overdue_s(160.0) == 60.0
    pulse.note(500, 160.0)  # so many were done before it came
    assert pulse.usual_s == 0.0
    pulse.note(501, 180.0)
    assert pulse.usual_s == 20.0 * STRIDES
    pulse.note(501, 190.0)
    pulse.note(501, 300.0)
    assert pulse.overdue_s(300.0) == 120.0 - 20.0 * STRIDES, "reports without a step are none"


def test_nothing_is_overdue_before_a_trainer_has_come() -> None:
    assert Pulse().overdue_s(1e6) == 0.0


def test_who_goes_back_to_its_checkpoint_steps_too() -> None:
    pulse = Pulse()
    pulse.begin(0.0)
    pulse.note(500, 1.0)
    pulse.note(480, 3.0)
    assert pulse.overdue_s(3.0) == -2.0 * STRIDES


def test_who_evaluates_now_and_then_is_not_overdue_each_time() -> None:
    """With steps of a second and twenty minutes after each hundredth."""
    pulse, now, late = Pulse(), 0.0, []
    pulse.begin(now)
    for step in range(1000):
        pulse.note(step, now)
        length = 1200.0 if step % 100 == 99 else 1.0
        late.append(pulse.overdue_s(now + length))
        now += length
    assert late[99] > 1100.0, "nobody can know the first time"
    assert max(late[100:]) < 0.0
    assert pulse.usual_s <= 3600.0


def test_what_took_long_is_forgotten_in_hours() -> None:
    pulse = Pulse()
    pulse.begin(0.0)
    for step, now in enumerate((0.0, 1000.0)):
        pulse.note(step, now)
    for step in range(2, 10_000):
        pulse.note(step, 1000.0 + 10.0 * step)
    assert pulse.overdue_s(1000.0 + 100_000.0) > -40.0


def test_another_trainer_begins_anew() -> None:
    pulse = Pulse()
    pulse.begin(0.0)
    pulse.note(1, 100.0)
    pulse.note(2, 200.0)
    pulse.begin(1000.0)
    assert pulse.overdue_s(1000.0) == 0.0
    pulse.note(2, 1001.0)
    assert pulse.usual_s == 0.0
