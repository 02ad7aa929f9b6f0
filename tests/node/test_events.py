"""`gossamer.node.daemon.monitoring.events`: who comes, goes and differs, logged once and in few lines."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.node.daemon.monitoring.events import LINES_MAX, TEXT_MAX, LogRing, SwarmEvents
from gossamer.node.daemon.monitoring.status import MemberStatus
from gossamer.protocol.membership.members import Health
from tests.node.statuses import member, status

log = logging.getLogger("gossamer.some.part")


class Seen:
    """A swarm of which one status after another is seen."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "gossamer.node")
        self._events = SwarmEvents()
        self.now = self.wait_s = 0.0
        self._log = caplog

    def logged(self, *members: MemberStatus, **facts: Any) -> list[str]:
        """What is logged once these are the members."""
        self._log.clear()
        self.now += 1.0
        known: Any = [
            SimpleNamespace(
                label=one.label,
                health=Health(one.health),
                downs=one.downs,
                is_gone=not one.is_live,
                record=SimpleNamespace(node_id=one.node_id),
            )
            for one in members
        ]
        self._events.log(status(time=self.now, members=members, **facts), known, self.wait_s)
        return self._log.messages


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture) -> Seen:
    return Seen(caplog)


def same(number: int, round_: int = 16, replica: str = "same", **more: Any) -> MemberStatus:
    return member(number, replica=replica, replica_round=round_, **more)


def names(*numbers: int) -> str:
    return ", ".join(member(number).label for number in numbers)


def test_who_comes_and_goes(seen: Seen) -> None:
    one, two = member(1), member(2)
    assert seen.logged(one, two, member(3, health="down")) == [f"heard of {one.label} and {two.label}"]
    assert seen.logged(member(1, health="suspect"), member(2, health="left")) == [f"left: {two.label}"]
    assert seen.logged(member(1, health="down"), member(2, health="left")) == []
    assert seen.logged(one, member(2, health="left")) == [f"back again: {one.label}"]
    assert seen.logged(one, two) == [f"back again: {two.label}"]
    assert seen.logged(member(1, health="suspect"), two) == seen.logged(one, two) == []
    assert seen.logged(member(1, downs=1), two) == [f"back again: {one.label}"], "it was down in between"


def test_many_at_once_are_one_line(seen: Seen) -> None:
    assert seen.logged(*map(member, range(1, 10))) == [f"heard of {names(1, 2, 3, 4, 5)} and 4 more"]


def test_in_a_large_swarm_who_comes_within_a_while_is_one_line(seen: Seen) -> None:
    seen.wait_s = 3.0
    assert seen.logged(member(1)) == [f"heard of {names(1)}"]
    assert seen.logged(member(1), member(2)) == seen.logged(*map(member, range(1, 4))) == []
    assert seen.logged(*map(member, range(1, 5))) == [f"heard of {names(2, 3)} and {names(4)}"]


def test_that_all_agree_is_logged_once_a_snapshot(seen: Seen) -> None:
    seen.logged(same(1), same(2))
    assert seen.logged(same(1), same(2, 0), sealed_round=16) == [], "not everybody has it"
    line = "round 16 is sealed: all 3 replicas are identical"
    assert seen.logged(same(1), same(2), member(3, health="down"), sealed_round=16)[-1:] == [line]
    assert seen.logged(same(1), same(2), sealed_round=16) == []


def test_another_model_of_the_same_records_is_an_error(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    seen.logged(same(1), same(2))
    assert seen.logged(same(1, replica="records"), same(2)) == [], "a late record is not everywhere at once"
    line = f"the model of {names(1)} differs from ours at round 16"
    assert seen.logged(same(1, replica="other"), same(2)) == [line]
    assert caplog.records[0].levelname == "ERROR"
    assert seen.logged(same(1, replica="other"), same(2)) == []
    assert seen.logged(*(same(n, 0 if n == 9 else 16, "other") for n in (1, *range(3, 10))))[1:] == [
        f"the model of {names(9)} differs from ours at round 0",
        f"the model of {names(3, 4, 5, 6, 7)} and {names(8)} differs from ours at round 16",
    ], "one line for each of our snapshots, and who differed before is not logged again"


def test_the_latest_lines_of_the_log_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ring = LogRing()
    logging.getLogger("gossamer").addHandler(ring)
    try:
        log.debug("not for people")
        log.info("hello %s\x1b[2J", "there")
        log.warning("careful")
        log.error("x" * 2000)
    finally:
        logging.getLogger("gossamer").removeHandler(ring)
    log.error("after the end")
    kept = ring.since(0)
    assert [(line.level, line.text) for line in kept] == [
        ("info", "hello there\\x1b[2J"),
        ("warning", "careful"),
        ("error", "x" * TEXT_MAX),
    ]
    assert [line.number for line in ring.since(1)] == [2, 3]
    assert kept[1].to_json()["level"] == "warning"
    for number in range(LINES_MAX + 10):
        ring.handle(log.makeRecord(log.name, logging.INFO, "", 0, f"line {number}", (), None))
    kept = ring.since(0)
    assert len(kept) == LINES_MAX and kept[-1].text == f"line {LINES_MAX + 9}"
