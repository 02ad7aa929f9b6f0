"""`gossamer.node.daemon.monitoring.health`: what a node finds wrong with itself, and how often it says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gossamer.node.daemon.monitoring import health
from gossamer.node.daemon.monitoring.health import CHECKS, HealthChecks, clock_problem
from gossamer.node.logs import REPEAT_S
from tests.node.statuses import link, member, status

LINKED = {"links": (link(1), link(2))}
REFUSAL = "the invitation of node abab ran out 5.5 hours ago"


class Checked:
    """Health checks that are made once a second."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.checks = HealthChecks()
        self.now = 1000.0
        self._log = caplog

    def for_s(self, seconds: float, **facts: Any) -> list[str]:
        """The same status once a second; returns what was logged meanwhile."""
        self._log.clear()
        for _ in range(int(seconds)):
            self.now += 1.0
            self.checks.check(status(**facts), self.now)
        return [record.getMessage() for record in self._log.records]

    @property
    def problem(self) -> str | None:
        return self.checks.problem


@pytest.fixture
def checked(caplog: pytest.LogCaptureFixture) -> Checked:
    return Checked(caplog)


FINDINGS: dict[str, tuple[float, dict[str, Any], str]] = {
    "space": (0, {"files_free": 7}, "the disk is full: 1048576 MiB, 7 files are free"),
    "refused": (0, {"refusal": REFUSAL}, REFUSAL),
    "diverged": (0, {"diverged": "fragment 1 reached 64"}, "gossamer revoke"),
    "early": (0, {"clock_contradicted": True}, "it is too early for the round that the other nodes are at"),
    "merging": (health.STUCK_S, {"rounds_behind": 4}, "merging is stuck: 4 rounds are waiting"),
    "no trainer": (health.TRAINER_S, {"has_trainer": False}, "there has been no trainer for 120 s"),
    "standstill": (0, {"step_overdue_s": 901.0}, "has not taken a step for 15 minutes: is it stuck?"),
    "alone": (health.ALONE_S, {"known_addresses": 3, "links": ()}, "alone: no link for 30 s"),
    "undialled": (
        health.REACH_S,
        {"addresses": ("1.2.3.4:7700",), "members": (member(1), member(2))},
        "nobody has dialled this node at 1.2.3.4:7700 within 10 minutes; if a firewall or NAT",
    ),
    "starved": (
        health.STARVED_S,
        {"payloads_missing": 7, "is_ready": False},
        "joining: no part of 7 missing payloads or snapshots has arrived for 5 minutes; no linked node holds",
    ),
    "clock": (
        0,
        {"clock_offsets": (90.0, 91.0, 89.0)},
        "90 s behind the clock(s) of 3 peer(s); set the one that is wrong (NTP)",
    ),
    "invitation": (0, {"invited_until": 1000 + 7200}, "the invitation runs out in 2.0 hours"),
    "slow": (0, {"late_s": 2.5}, "this node was busy for 2.5 s and answered nobody"),
}
"""By check: after how many seconds it finds something, in which status, and what is logged."""


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in FINDINGS], ids=lambda c: c.name)
def test_what_is_wrong_is_logged_now_and_then(checked: Checked, check: health.Check) -> None:
    after_s, facts, logged = FINDINGS[check.name]
    facts = ({} if check.name == "refused" else LINKED) | facts
    assert checked.for_s(10, **LINKED) == [] and checked.problem is None
    assert checked.for_s(after_s - 1, **facts) == []
    assert not checked.checks.is_found(check.name)
    lines = checked.for_s(REPEAT_S - 1, **facts)
    assert len(lines) == 1 and logged in lines[0]
    assert checked.checks.is_found(check.name)
    assert (checked.problem is not None) == check.is_problem
    assert len(checked.for_s(check.repeat_s, **facts)) == 1, "once in that time"
    checked.for_s(check.lasts_s + 1, **LINKED)
    assert not checked.checks.is_found(check.name) and checked.problem is None


def test_every_check_is_tested() -> None:
    assert FINDINGS.keys() | {"key", "trainer ends"} == {check.name for check in CHECKS}


@pytest.mark.parametrize(
    "facts",
    [
        {"refusal": REFUSAL, **LINKED},  # somebody's clock is slow
        {"disk_free": health.DISK_FREE_MIN, "files_free": health.FILES_FREE_MIN},
        {"rounds_behind": 4, "has_model": False},  # a joiner has nothing yet to merge into
        {"has_trainer": False, "trains": False},
        {"links": (), "known_addresses": 0},  # a founder that waits for others
        {"addresses": ("1.2.3.4:7700",), "members": (member(1),), **LINKED},  # nobody would dial
        {"members": (member(1), member(2)), **LINKED},  # it only dials out
        {"addresses": ("1.2.3.4:7700",), "members": (member(1), member(2)), "reachable": True, **LINKED},
        {"payloads_missing": 7, **LINKED},  # their authors died before anybody had them
        {"late_s": 0.9},
        {"late_s": 180.0},  # it slept, or was stopped
        {"step_overdue_s": health.STANDSTILL_S},
        {"trainer_starts": health.STARTS_FREE},
    ],
)
def test_what_is_nothing(checked: Checked, facts: dict[str, Any]) -> None:
    assert checked.for_s(2 * health.REACH_S, **facts) == [] and checked.problem is None


def test_progress_begins_the_wait_anew(checked: Checked) -> None:
    for version in range(5):
        assert checked.for_s(health.STUCK_S - 1, rounds_behind=4, version=version) == []
    for fetched in range(5):
        facts = {"payloads_missing": 7, "is_ready": False, "fetched_bytes": fetched, **LINKED}
        assert checked.for_s(health.STARVED_S - 1, **facts) == []
    (line,) = checked.for_s(health.STARVED_S, **facts, missing_is_held=True)
    assert "try a lower MTU" in line
    for addresses in (("1.2.3.4:7700",), ("10.0.0.7:7700",)):  # a laptop goes from an office home
        facts = {"addresses": addresses, "members": (member(1), member(2)), **LINKED}
        assert checked.for_s(health.REACH_S - 1, **facts) == []


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({}, "3 known address(es); check this machine's network, and --join"),
        (
            {"has_model": False},
            "it has no model yet: start a node of the swarm; check this machine's network",
        ),
        ({"refusal": REFUSAL}, f"they no longer let it in: {REFUSAL}"),
    ],
)
def test_a_node_that_is_alone_says_why_where_it_knows(
    checked: Checked, facts: dict[str, Any], end: str
) -> None:
    lines = checked.for_s(60, known_addresses=3, links=(), **facts)
    assert any(end in line for line in lines if line.startswith("alone"))


@pytest.mark.parametrize(
    ("name", "field", "free", "logged"),
    [
        ("key", "own_void", 0, "this node's key signs elsewhere"),
        ("trainer ends", "trainer_starts", health.STARTS_FREE, "the trainer has been started 4 times"),
    ],
)
def test_what_has_happened_is_a_problem_for_a_while(
    checked: Checked, name: str, field: str, free: int, logged: str
) -> None:
    assert checked.for_s(10, **{field: free}) == []
    (line,) = checked.for_s(20, **{field: free + 2})
    assert logged in line and checked.checks.is_found(name) and str(checked.problem) in line
    checked.for_s(health.KEY_S + REPEAT_S, **{field: free + 2})
    assert checked.problem is None, "that is over"
    assert len(checked.for_s(1, **{field: free + 3})) == 1


def test_the_first_problem_of_the_table_is_the_reason_and_all_are_logged(checked: Checked) -> None:
    checked.for_s(1)
    lines = checked.for_s(1, disk_free=0, own_void=2, diverged="x")
    assert len(lines) == 3 and checked.problem == lines[0]


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ((), ""),
        ((29.0, -29.0, 3.0), ""),
        ((1.0, 5000.0, 0.0), ""),
        ((-100.0,), "100 s ahead of the clock(s) of 1 peer(s)"),
        ((-99.0, -100.0), "99 s ahead of the clock(s) of 2 peer(s)"),
        ((0.5, 3600.0), ""),  # ours and one of them agree
        ((-3600.0, 0.5, -3600.0, -0.5), ""),
        ((-100.0, -90.0, 7.0), "90 s ahead of the clock(s) of 3 peer(s)"),
    ],
)
def test_the_median_peer_is_believed(offsets: tuple[float, ...], found: str) -> None:
    said = clock_problem(offsets)
    assert found in said and bool(found) == bool(said)
