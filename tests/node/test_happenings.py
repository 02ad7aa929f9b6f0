"""`gossamer.node.daemon.monitoring.events`: who comes, goes and differs, said once and in few lines."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from gossamer.node.daemon.monitoring.events import Happenings
from gossamer.protocol.claims import Claim
from gossamer.protocol.membership.members import Health, Member, Roster
from tests.protocol import builders


def member(number: int, *claims: Claim, health: Health = Health.ALIVE) -> Member:
    row = builders.row(builders.identity(number), name=f"n{number}", claims=claims)
    return Member(row, health, 0.0, 0.0)


def named(number: int) -> str:
    return f"n{number} ({builders.identity(number).node_id.hex()[:8]})"


def claim(round_: int, root: bytes = b"m", records: bytes = b"r") -> Claim:
    return Claim(round_, round_, records * 32, root * 32)


def test_who_comes_and_goes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossamer.node")
    watch = Happenings()
    one, two = member(1), member(2)
    watch.look([one, two, member(3, health=Health.DOWN)], ())
    assert caplog.messages == [f"heard of {named(1)} and {named(2)}"]
    watch.look([replace(one, health=Health.SUSPECT), replace(two, health=Health.LEFT)], ())
    assert caplog.messages[1:] == [f"left: {named(2)}"]
    watch.look([replace(one, health=Health.DOWN), replace(two, health=Health.LEFT)], ())
    watch.look([one, replace(two, health=Health.LEFT)], ())
    watch.look([one, two], ())
    watch.look([one, two], ())
    assert caplog.messages[2:] == [f"back again: {named(1)}", f"back again: {named(2)}"]


def test_who_was_down_between_two_looks_is_said_to_be_back(caplog: pytest.LogCaptureFixture) -> None:
    """That it is down was said at once, and would be the last word."""
    caplog.set_level(logging.INFO, "gossamer.node")
    watch, roster = Happenings(), Roster(builders.identity(0).node_id)
    row = builders.row(builders.identity(1), name="n1")
    roster.update(row, 0.0)
    watch.look(roster.members(), ())
    roster.judge(row.node_id, Health.SUSPECT, 10.0)
    watch.look(roster.members(), ())
    roster.heard_from(row.node_id, 11.0)
    watch.look(roster.members(), ())
    assert caplog.messages[1:] == [], "a suspicion that is cleared up is nothing to tell"
    roster.judge(row.node_id, Health.SUSPECT, 20.0)
    watch.look(roster.members(), ())
    roster.judge(row.node_id, Health.DOWN, 26.0)
    roster.heard_from(row.node_id, 26.5)
    for _ in range(2):
        watch.look(roster.members(), ())
    assert caplog.messages[1:] == [f"back again: {named(1)}"]


def test_many_at_once_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossamer.node")
    Happenings().look([member(number) for number in range(1, 10)], ())
    (line,) = caplog.messages
    assert line == f"heard of {', '.join(named(number) for number in range(1, 6))} and 4 more"


def test_that_all_agree_is_said_once_a_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossamer.node")
    watch = Happenings()
    ours = (claim(16), claim(0))
    watch.look([member(1, claim(16)), member(2, claim(0))], ours)
    assert "sealed" not in caplog.text, "not everybody has it"
    watch.look([member(1, claim(16)), member(2, claim(16)), member(3, health=Health.DOWN)], ours)
    assert "sealed" in caplog.text, "who is down has no say"
    watch.look([member(1, claim(16)), member(2, claim(16))], ours)
    assert [line for line in caplog.messages if "sealed" in line] == [
        "round 16 is sealed: all 3 replicas are identical"
    ]


def test_another_model_of_the_same_records_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    watch = Happenings()
    ours = (claim(16),)
    watch.look([member(1, claim(16, records=b"l", root=b"x"))], ours)
    watch.look([member(1, claim(16, root=b"x"), health=Health.DOWN)], ours)
    assert not caplog.records, "a late record is not everywhere at once, and who is down tells nothing new"
    for _ in range(2):
        watch.look([member(1, claim(16, root=b"x"))], ours)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == f"the model of {named(1)} differs from ours at round 16"


def test_many_that_differ_are_one_line_for_each_of_our_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    """Keys cost nothing, and whoever has many may claim this and that with them each second."""
    ours = (claim(16), claim(0))
    members = [member(number, claim(0 if number == 9 else 16, root=b"x")) for number in range(1, 10)]
    Happenings().look(members, ours)
    assert caplog.messages == [
        f"the model of {named(9)} differs from ours at round 0",
        f"the model of {', '.join(named(number) for number in range(1, 6))} and 3 more differs from ours at"
        " round 16",
    ]
