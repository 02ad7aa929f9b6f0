"""`gossamer.node.daemon.monitoring.status`: what is shown of a node, and to whom."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from gossamer.node.daemon.monitoring.members import JUST_DOWN_S, LISTED
from gossamer.node.daemon.monitoring.status import (
    Likeness,
    compare,
    data_in_words,
    one_line,
    to_json,
    unlisted,
)
from gossamer.protocol import limits
from gossamer.protocol.membership.members import Health
from gossamer.protocol.records import Claim
from tests.node import statuses
from tests.node.daemons import founded, get, report, running, training
from tests.node.trainer_side import until
from tests.protocol import builders

GENESIS = Claim(0, 0, bytes(32), b"g" * 32)


def test_others_are_not_told_what_concerns_this_machine_alone() -> None:
    status = statuses.status(trainer=statuses.trainer(), members=(statuses.member(1),))
    ours, theirs = to_json(status), to_json(status, is_for_others=True)
    assert {"folder", "problem", "vitals", "disk_free"} <= ours.keys() - theirs.keys()
    assert theirs.items() <= ours.items() and theirs["trainer"]["loss"] == 2.0
    assert theirs["members"][0]["addresses"] == ["192.0.2.1:7700"]


async def test_of_many_members_those_that_matter_are_listed_and_all_counted(tmp_path: Path) -> None:
    first = founded(tmp_path / "a")
    async with running(first) as daemon:
        roster, now = daemon.core.roster, time.monotonic()
        healths = (Health.LEFT, Health.DOWN, Health.DOWN, Health.SUSPECT, *[Health.ALIVE] * (LISTED + 10))
        for number, health in enumerate(healths, 1):
            row = builders.row(builders.identity(number), name=f"n{number:02}", trains=number > 5)
            roster.update(row, now)
            roster.judge(row.node_id, health, now - 2 * JUST_DOWN_S * (number == 2))
        read = daemon.monitor.read()
        _, _, page = await get(first, f"/status?members=7&skip={LISTED}")
        _, _, none = await get(first, "/status?members=0")
    names = [member.name for member in read.members]
    assert names[:2] == ["n03", "n04"] and len(names) == LISTED, "just down, or silent"
    assert read.by_health == {"alive": LISTED + 10, "suspect": 1, "down": 2, "left": 1}
    assert read.live == sum(read.replicas.values()) == LISTED + 11 and unlisted(page) == LISTED + 7
    assert not {member["name"] for member in page["members"]} & {*names, "n01", "n02"}, "in turn"
    assert none["members"] == [] and "by_health" in none


@pytest.mark.parametrize(
    ("links", "healths", "end"),
    [
        (1, ["alive", "down"], "1 peer alive, 1 link"),
        (0, [], "0 peers alive, 0 links"),
        (2, ["alive"] * 3, "3 peers alive, 2 links"),
    ],
)
def test_one_of_a_kind_is_not_said_to_be_several(links: int, healths: list[str], end: str) -> None:
    status = {"name": "ada", "state": "training", "trains": True, "round": 3, "clock": 4}
    said = one_line(status | {"by_health": Counter(healths), "links": [{}] * links})
    assert said == f"ada: training, round 3 (swarm 4), {end}"


def test_the_averaged_model_comes_first() -> None:
    said = one_line(to_json(statuses.status(trainer=statuses.trainer())))
    assert said.startswith(
        "me: training, round 3 (swarm 4), loss 2.000, held-out 2.250 averaged, 2.500 live, 0"
    )


def test_who_does_not_train_is_where_the_swarm_is() -> None:
    status = {"name": "ada", "state": "serving", "trains": False, "round": 0, "clock": 4}
    said = one_line(status | {"by_health": {}, "links": []})
    assert said == "ada: serving, round 4, 0 peers alive, 0 links"


async def test_who_has_no_trainer_any_more_has_no_speed(tmp_path: Path) -> None:
    """Here, and in what others are told."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        async with training(home) as link:
            link.send(report(tokens_per_s=50000.0))
            await until(lambda: daemon.phi.port.report)
            assert daemon.monitor.read().trainer.tokens_per_s == 50000.0
        await until(lambda: not daemon.phi.port.attached)
        _, _, status = await get(home, "/status")
        _, _, metrics = await get(home, "/metrics")
        assert status["trainer"]["tokens_per_s"] == status["itself"]["tokens_per_s"] == 0.0
        assert "\ngossamer_tokens_per_second 0.0\n" in metrics
        assert status["trainer"]["inner_steps"] == 10, "what it has done stays"
        daemon.core.presence.beat()
        assert daemon.core.own_record.tokens == 100 and daemon.core.own_record.tokens_per_s == 0.0


async def test_an_observer_with_a_model_serves_it_though_nobody_else_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bootstrap peer remembers members, and waits for them only for a while."""
    home = founded(tmp_path / "a")
    async with running(home, observe=True) as daemon:
        await until(lambda: daemon.monitor.read().state == "serving")
    async with running(home, join=("127.0.0.1:1",), observe=True) as daemon:
        assert daemon.monitor.read().state == "joining"
        monkeypatch.setattr(limits, "RESUME_PATIENCE_S", 0.5)
        await until(lambda: daemon.monitor.read().state == "serving")


# -- replicas


def claim(round_: int, *, records: bytes = b"r", model: bytes = b"m") -> Claim:
    return Claim(round_, 100 * round_, records * 32, model * 32)


def test_replicas_are_compared_at_the_newest_round_that_both_have() -> None:
    ours = (claim(48), claim(32), claim(16))
    assert compare(ours, (claim(64), claim(48), claim(32))) == (Likeness.SAME, 48)
    assert compare(ours, (claim(32, model=b"x"), claim(16))) == (Likeness.OTHER, 32)
    assert compare((GENESIS,), (GENESIS,)) == (Likeness.SAME, 0)


def test_other_records_are_not_yet_another_model() -> None:
    late = claim(16, records=b"l", model=b"x")
    assert compare((claim(16),), (late,)) == (Likeness.RECORDS, 16)


def test_without_a_round_in_common_nothing_is_said() -> None:
    assert compare((), (claim(16),)) == (None, None)
    assert compare((claim(16),), ()) == (None, None)
    assert compare((claim(16),), (claim(32), GENESIS)) == (None, None)


def test_how_far_the_swarm_is_with_its_data_is_one_line():
    data = {"epoch": 0, "seen_once": 0.41, "seen_again": 0.003, "not_seen": 0.587}
    first = data | {"before_seen": None, "before_seen_again": None}
    assert data_in_words(first) == "epoch 0 of the data: 41.0 % seen once, 0.3 % again, 58.7 % not yet"
    later = data | {"epoch": 1, "before_seen": 0.995, "before_seen_again": 0.004}
    assert data_in_words(later).endswith("; in the epoch before 99.5 % were seen, 0.4 % again")
