"""`vitals` and `clocks`: what a node says of itself, and how often."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gossamer.node.daemon.monitoring import health as connectivity
from gossamer.node.daemon.monitoring import health as keywatch
from gossamer.node.daemon.monitoring import health as trainerwatch
from gossamer.node.daemon.monitoring import health as vitals
from gossamer.node.daemon.monitoring.health import DISK_FREE_MIN, FILES_FREE_MIN, STUCK_S, Look, Vitals
from gossamer.node.daemon.network.clocks import judge
from gossamer.node.logs import REPEAT_S


class Shown:
    """Vitals that are shown one second after another."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.vitals = Vitals()
        self.now = 1000.0
        self._log = caplog

    def for_s(self, seconds: float, **look: Any) -> list[str]:
        """The same look once a second; returns what was said meanwhile."""
        self._log.clear()
        for _ in range(int(seconds)):
            self.vitals.look(Look(now=self.now, **look))
            self.now += 1.0
        return [record.getMessage() for record in self._log.records]


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> Shown:
    return Shown(caplog)


def test_a_node_that_is_alone_says_so_once_and_when_it_is_over(shown: Shown) -> None:
    assert shown.for_s(20, links=0, known=3) == []
    assert shown.for_s(20, links=1, known=3) == []
    assert shown.for_s(30, links=0, known=3) == []
    (said,) = shown.for_s(600, links=0, known=3)
    assert "alone: no link for 30 s. Still dialling the 3 known addresses" in said
    (said,) = shown.for_s(600, links=2, known=3)
    assert said == "linked to others again after 630 s"
    (said,) = shown.for_s(60, links=0, known=1)
    assert "Still dialling the 1 known address" in said


def test_a_node_that_is_alone_says_why_where_it_knows(shown: Shown) -> None:
    (said,) = shown.for_s(60, links=0, known=3, has_model=False)
    assert "nobody to get it from: start a node of the swarm" in said and "passed on" not in said
    shown.for_s(1, links=1)
    (said,) = shown.for_s(60, links=0, known=3, trains=False)
    assert said.endswith("the 3 known addresses; check this machine's network, and --join")
    shown.for_s(1, links=1)
    (said,) = shown.for_s(60, links=0, known=3, refused="the invitation of node abab ran out 5.5 hours ago")
    assert said.endswith("they no longer let this node in: the invitation of node abab ran out 5.5 hours ago")


def test_a_way_that_brings_nothing_is_told_of(shown: Shown) -> None:
    """Now and then somebody holds the next thing, and is not believed once it has failed."""
    lacking = {"links": 2, "missing": 7, "came": 1000}
    said = []
    for _ in range(9):
        said += shown.for_s(20, **lacking, others_hold=True) + shown.for_s(40, **lacking)
    assert len(said) == 1
    assert said[0].startswith("no part of 7 missing payloads or snapshots has arrived for 5 minutes")


def test_who_joins_where_nobody_has_the_model_any_more_is_told(shown: Shown) -> None:
    lacking = {"links": 2, "missing": 7}
    assert shown.for_s(120, **lacking) == [], "it has begun long ago"
    assert shown.for_s(50, **lacking, is_ready=False) == []
    assert shown.for_s(1, **lacking, is_ready=False, others_hold=True) == []
    (said,) = shown.for_s(120, **lacking, is_ready=False)
    assert said.startswith("joining: no linked node holds any of the 7 missing payloads or snapshots. Start")


@pytest.mark.parametrize("between", ["came", "missing", "others_hold", "links"])
def test_what_has_come_or_cannot_come_is_not_waited_for(shown: Shown, between: str) -> None:
    """An author that died before anybody had its payload leaves that missing for good."""
    lacking = {"links": 2, "missing": 7, "came": 0, "others_hold": True}
    for _ in range(3):
        assert shown.for_s(connectivity.STARVED_S - 10, **lacking) == []
        if between == "came":
            lacking["came"] += 1000
        else:
            assert shown.for_s(connectivity.HELD_KEPT_S + 2, **{**lacking, between: 0}) == []


def test_that_an_invitation_ends_is_said_once_a_day(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "DAY_S", 600.0)
    ends = "the invitation runs out in 2.9 days; have it renewed"
    assert (
        shown.for_s(1800, links=1, runs_out=ends) == [f"{ends}: gossamer invite NODE_ID --tell ADDRESS"] * 3
    )
    assert shown.for_s(10, links=1) == []
    assert len(shown.for_s(10, links=1, runs_out=ends)) == 1, "it was renewed in between"


def test_whom_nobody_lets_in_any_more_is_not_healthy(shown: Shown) -> None:
    refused = "the invitation of node abab ran out 5.5 hours ago"
    shown.for_s(5, links=1, refused=refused)
    assert shown.vitals.problem is None, "somebody's clock is slow"
    shown.for_s(1, links=0, refused=refused)
    assert shown.vitals.problem == refused
    shown.for_s(1, links=0)
    assert shown.vitals.problem is None, "it was renewed"


def test_a_node_whose_address_is_gone_says_what_cuts_it_off(shown: Shown) -> None:
    assert shown.for_s(20, links=1) == []
    (said,) = shown.for_s(20, links=1, lost_address="10.0.0.5")
    assert "no longer has the address 10.0.0.5" in said and "--listen" in said
    assert shown.for_s(20, links=1) == []


def test_a_founder_that_waits_for_others_is_not_alone(shown: Shown) -> None:
    assert shown.for_s(1000, links=0, known=0) == []


def test_a_node_whose_key_is_used_elsewhere_is_told_while_it_lasts(shown: Shown) -> None:
    assert shown.for_s(10, links=1) == []
    (said,) = shown.for_s(20, links=1, void=2)
    assert "its key signs other deltas" in said
    assert shown.for_s(400, links=1, void=2) == []
    assert "its key also signs elsewhere" in str(shown.vitals.problem)
    assert shown.for_s(keywatch.KEY_S, links=1, void=2) == [] and shown.vitals.problem is None, "that is over"
    assert len(shown.for_s(1, links=1, void=4)) == 1


def test_whose_key_is_used_elsewhere_is_told_so_whatever_else_is_wrong(shown: Shown) -> None:
    said = shown.for_s(20, links=1, disk_free=0, void=2)
    assert any("its key signs other deltas" in line for line in said)
    said = shown.for_s(200, links=1, void=2, overdue_s=trainerwatch.STANDSTILL_S + 1)
    assert any("has not taken a step" in line for line in said)


def test_a_node_whose_key_another_one_uses_is_told_though_it_publishes_nothing(shown: Shown) -> None:
    assert shown.for_s(10, links=1, outdone=keywatch.OUTDONE_MAX) == [], "a clock was set back"
    (said,) = shown.for_s(20, links=1, outdone=keywatch.OUTDONE_MAX + 1)
    assert "another node runs with this one's key" in said
    assert "its key also signs elsewhere" in str(shown.vitals.problem)
    assert shown.for_s(400, links=1, outdone=keywatch.OUTDONE_MAX + 1) == [], "that is over"
    assert len(shown.for_s(1, links=1, outdone=keywatch.OUTDONE_MAX + 9)) == 1


def test_a_node_that_nobody_dials_says_so_once(shown: Shown) -> None:
    usual: dict[str, Any] = {"links": 3, "live": 3, "known": 3, "addresses": ("1.2.3.4:7700",)}
    assert shown.for_s(connectivity.REACH_S, **usual) == [] and shown.vitals.reachable is None
    (said,) = shown.for_s(2000, **usual)
    assert "nobody has dialled this node at 1.2.3.4:7700 within 10 minutes" in said
    assert shown.vitals.reachable is False
    assert shown.for_s(10, **usual, dialled_by_others=1) == [] and shown.vitals.reachable is True


def test_who_was_dialled_at_another_address_is_not_known_to_be_reachable(shown: Shown) -> None:
    """A laptop goes from an office home, where a NAT is in the way."""
    usual: dict[str, Any] = {"links": 3, "live": 3, "known": 3, "dialled_by_others": 2}
    both = ("1.2.3.4:7700", "[2001:db8::1]:7700")
    shown.for_s(100, **usual, addresses=both[:1])
    shown.for_s(2000, **usual, addresses=both)
    assert shown.vitals.reachable is True, "one more address takes nothing away"
    assert shown.for_s(connectivity.REACH_S, **usual, addresses=("10.0.0.7:7700",)) == []
    assert shown.vitals.reachable is None
    (said,) = shown.for_s(2000, **usual, addresses=("10.0.0.7:7700",))
    assert "nobody has dialled this node at 10.0.0.7:7700 within 10 minutes" in said
    usual["dialled_by_others"] = 3
    shown.for_s(2, **usual, addresses=("10.0.0.8:7700",))
    assert shown.vitals.reachable is True, "who dials it there may be how it learns that address"


def test_that_nobody_dials_says_nothing_where_nobody_would(shown: Shown) -> None:
    assert shown.for_s(1000, links=1, live=1, known=1, addresses=("1.2.3.4:7700",)) == []
    assert shown.for_s(1000, links=3, live=3, known=3, addresses=()) == []
    assert shown.vitals.reachable is None


@pytest.mark.parametrize("before", [{"links": 1, "live": 1}, {"links": 0, "live": 3}])
def test_whoever_comes_has_time_to_dial(shown: Shown, before: dict[str, int]) -> None:
    usual: dict[str, Any] = {"known": 3, "addresses": ("1.2.3.4:7700",)}
    shown.for_s(2 * connectivity.REACH_S, **usual, **before)
    said = shown.for_s(connectivity.REACH_S, **usual, links=3, live=3)
    assert not any("nobody has dialled" in line for line in said)
    assert shown.vitals.reachable is None
    (line,) = shown.for_s(2, **usual, links=3, live=3)
    assert "nobody has dialled this node at 1.2.3.4:7700 within 10 minutes" in line


def test_a_slow_node_says_so_now_and_then(shown: Shown) -> None:
    assert shown.for_s(10, late_s=0.9) == []
    (said,) = shown.for_s(REPEAT_S, late_s=2.5)
    assert "busy for 2.5 s" in said
    assert len(shown.for_s(REPEAT_S, late_s=2.5)) == 1
    assert shown.vitals.lag_s == 2.5
    shown.for_s(60)
    assert shown.vitals.lag_s == 0.0
    assert shown.for_s(REPEAT_S, late_s=180.0) == [], "it slept, or was stopped"


def test_a_full_disk_is_a_problem(shown: Shown) -> None:
    assert shown.for_s(5, disk_free=DISK_FREE_MIN) == [] and shown.vitals.problem is None
    (said,) = shown.for_s(100, disk_free=3 << 20)
    assert "3 MiB are free" in said
    assert shown.vitals.problem == "the disk is full: 3 MiB are free"
    shown.for_s(1, disk_free=1 << 40)
    assert shown.vitals.problem is None


def test_a_disk_without_room_for_more_files_is_full_too(shown: Shown) -> None:
    plenty = {"disk_free": 1 << 40}
    assert shown.for_s(5, **plenty, files_free=FILES_FREE_MIN) == []
    assert shown.vitals.problem is None
    (said,) = shown.for_s(100, **plenty, files_free=7)
    assert "room for 7 more files" in said
    assert shown.vitals.problem is not None
    shown.for_s(1, **plenty, files_free=None)
    assert shown.vitals.problem is None, "of a file system without that bound"


def test_a_folder_that_is_gone_is_a_problem(shown: Shown) -> None:
    (said,) = shown.for_s(100, folder_gone="/d")
    assert "the folder /d no longer exists" in said
    assert shown.vitals.problem == "the folder /d no longer exists"
    shown.for_s(1)
    assert shown.vitals.problem is None, "it was put back"


def test_a_model_that_diverged_is_said_as_long_as_it_is_so(shown: Shown) -> None:
    said = shown.for_s(2.5 * REPEAT_S, diverged="fragment 1 reached a magnitude of 64 in round 7, of abcd")
    assert len(said) == 3 and len(set(said)) == 1
    assert said[0].startswith("the model diverged: fragment 1") and "gossamer revoke" in said[0]
    assert shown.vitals.problem is not None and shown.vitals.problem in said[0]
    shown.for_s(1)
    assert shown.vitals.problem is None


def test_merging_is_stuck_if_rounds_wait_and_none_is_merged(shown: Shown) -> None:
    for version in range(5):
        assert shown.for_s(STUCK_S, behind=4, version=version) == []
    assert shown.for_s(1000, behind=0, version=4) == [], "nothing to do is no standstill"
    said = shown.for_s(1000, behind=4, version=4, has_model=False)
    assert not any("stuck" in line for line in said), "a joiner has nothing yet to merge into"
    (said,) = shown.for_s(STUCK_S + 2, behind=4, version=4)
    assert said == shown.vitals.problem
    assert "merging is stuck: 4 rounds are waiting" in said
    shown.for_s(1, behind=4, version=5)
    assert shown.vitals.problem is None


def test_a_trainer_that_stays_away_is_a_problem(shown: Shown) -> None:
    shown.for_s(trainerwatch.TRAINER_S, lacks_trainer=True)
    assert shown.vitals.problem is None
    shown.for_s(5, lacks_trainer=True)
    assert shown.vitals.problem == "there has been no trainer for 120 s"
    shown.for_s(1)
    assert shown.vitals.problem is None


def test_a_trouble_that_lasted_is_not_followed_by_others_that_there_are_none_of(shown: Shown) -> None:
    shown.for_s(10, links=1, version=3)
    shown.for_s(2 * STUCK_S, links=1, version=3, disk_free=0)
    assert shown.for_s(5, links=1, version=3, behind=4, lacks_trainer=True) == []
    assert shown.vitals.problem is None, "rounds wait, and the trainer is gone, only since a moment ago"


def test_trainers_are_counted_when_they_come_whatever_else_is_wrong(shown: Shown) -> None:
    for starts in range(1, trainerwatch.STARTS_MAX + 1):
        shown.for_s(20, links=1, starts=starts, disk_free=0)
    shown.for_s(1, links=1, starts=trainerwatch.STARTS_MAX)
    assert "the trainer keeps ending" in str(shown.vitals.problem)


def test_a_trainer_that_hangs_is_a_problem_and_said_once(shown: Shown) -> None:
    assert shown.for_s(60, overdue_s=trainerwatch.STANDSTILL_S) == [] and shown.vitals.problem is None
    (said,) = shown.for_s(2 * REPEAT_S, overdue_s=trainerwatch.STANDSTILL_S + 1)
    assert said == shown.vitals.problem == "the trainer has not taken a step for 15 minutes: is it stuck?"
    assert shown.for_s(5, overdue_s=-1.0) == [] and shown.vitals.problem is None
    assert shown.for_s(5, overdue_s=trainerwatch.STANDSTILL_S + 1) == [], "a notebook rests again and again"
    assert shown.vitals.problem is not None
    assert len(shown.for_s(5, overdue_s=trainerwatch.STANDSTILL_S + 1, starts=1)) == 1, "another trainer"


def test_a_trainer_that_ends_again_and_again_is_a_problem(shown: Shown) -> None:
    for starts in range(trainerwatch.STARTS_MAX):
        shown.for_s(30, starts=starts)
        assert shown.vitals.problem is None
    shown.for_s(30, starts=trainerwatch.STARTS_MAX, lacks_trainer=True)
    assert shown.vitals.problem == "the trainer keeps ending: it was started 5 times within 10 minutes"
    shown.for_s(trainerwatch.TRAINER_S, starts=trainerwatch.STARTS_MAX)
    assert shown.vitals.problem is None, "the last has been there for a while"


def test_trainers_that_come_seldom_are_none(shown: Shown) -> None:
    for starts in range(2 * trainerwatch.STARTS_MAX):
        shown.for_s(1, starts=starts)
        assert shown.vitals.problem is None
        shown.for_s(trainerwatch.STARTS_S / 4, starts=starts)
        assert shown.vitals.problem is None


def test_a_clock_that_is_off_is_said_now_and_then(shown: Shown) -> None:
    said = shown.for_s(REPEAT_S + 1, offsets=(90.0, 91.0, None, 89.0))
    assert said == ["this machine's clock is 90 s behind the clocks of 3 peers: set it (NTP)"] * 2


def test_a_clock_by_which_the_others_cannot_be_where_they_are_is_a_problem(shown: Shown) -> None:
    (said,) = shown.for_s(5, contradicted=True)
    found = "by this machine's clock, it is too early for the round that the other nodes are at"
    assert shown.vitals.problem == found
    assert "what they publish is refused: set it (NTP)" in said
    shown.for_s(1)
    assert shown.vitals.problem is None


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ((), None),
        ((None, None), None),
        ((29.0, -29.0, 3.0), None),
        ((1.0, 5000.0, 0.0), None),
        ((-100.0,), "this machine's clock and that of 1 peer(s) differ by 100 s, and one is wrong"),
        ((-99.0, -100.0), "this machine's clock and that of 2 peer(s) differ by 99 s, and one is wrong"),
        ((0.5, 3600.0), None),  # ours and one of them agree
        ((-3600.0, 0.5, -3600.0, -0.5), None),
        ((-100.0, -90.0, 7.0), "this machine's clock is 90 s ahead of the clocks of 3 peers"),
    ],
)
def test_the_median_peer_is_believed(offsets: tuple[float | None, ...], said: str | None) -> None:
    assert judge(offsets) == said


def test_a_folder_that_cannot_be_written_to_is_a_problem(shown: Shown) -> None:
    (said,) = shown.for_s(100, folder_read_only="/d")
    assert "the folder /d cannot be written to: nothing is published or fetched" in said
    assert shown.vitals.problem == "the folder /d cannot be written to"


def test_a_file_that_is_gone_is_said_before_the_node_is_started_without_it(shown: Shown) -> None:
    (said,) = shown.for_s(100, file_lost="/d/key")
    assert "the file /d/key no longer exists: put it back before restarting this node" in said
    assert shown.vitals.problem == "the file /d/key no longer exists"
    shown.for_s(1)
    assert shown.vitals.problem is None
