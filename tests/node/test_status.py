"""`gossamer.node.daemon.monitoring.status`: docs/status.md has every field that there is, and none that is
not."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.node.daemon.dashboard.sse import admin_state
from gossamer.node.daemon.monitoring.status import one_line
from gossamer.protocol import limits
from gossamer.protocol.membership.members import Health
from tests.node.daemons import facts, founded, get, joining, publish, report, running, training
from tests.node.trainer_side import until
from tests.protocol import builders

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "status.md"
ROW = re.compile(r"^\| `([a-z_.\[\]]+)` \| ([a-z ]+) \|", re.MULTILINE)
TYPES = {
    "text": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
WHOLE = {"fetching", "members[].conduct", "door.causes"}
"""Documented as one thing, or elsewhere."""


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a status with its path: ``links[].outbound``."""
    if path in WHOLE:
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from flattened(inner, f"{path}[]")
    else:
        yield path, value


async def test_the_documented_fields_are_the_actual_ones(tmp_path: Path) -> None:
    of_status, _, _ = DOCUMENT.read_text("utf-8").partition("## What other commands say as JSON")
    documented = dict(ROW.findall(of_status))
    first = founded(tmp_path / "a")
    second = joining(tmp_path / "b", first)
    async with (
        running(first) as daemon,
        running(second, join=(facts(first)["address"],)),
        training(first) as link,
    ):
        members = daemon.core.roster.members
        await until(lambda: daemon.phi.loop.ready and any(m.record.body.dialled for m in members()), 20)
        link.send(report())
        await publish(first, link, 1)
        _, _, status = await get(first, "/status?digest=1&up_to=1")
    status["void"] = [{"node_id": "00" * 32, "round": 1}]  # it takes a liar to have one
    found = list(flattened(status))
    assert {path for path, _ in found} == set(documented)
    for path, value in found:
        kinds = documented[path].split(" or ")
        assert any(isinstance(value, TYPES[kind]) for kind in kinds), (path, value, kinds)
        assert not isinstance(value, bool) or "boolean" in kinds, path
    assert status["members"][0]["conduct"].keys() == status["conduct"].keys()


async def test_members_that_are_gone_come_last(tmp_path: Path) -> None:
    first = founded(tmp_path / "a")
    async with running(first) as daemon:
        roster = daemon.core.roster
        for number, health in enumerate((Health.LEFT, Health.DOWN, Health.SUSPECT, Health.ALIVE), 1):
            row = builders.row(builders.identity(number), name=f"n{number}")
            roster.update(row, time.monotonic())
            roster.judge(row.node_id, health, time.monotonic())
        _, _, status = await get(first, "/status")
    assert [member["name"] for member in status["members"]] == ["n3", "n4", "n1", "n2"]


@pytest.mark.parametrize(
    ("links", "healths", "end"),
    [
        (1, ["alive", "down"], "1 peer alive, 1 link"),
        (0, [], "0 peers alive, 0 links"),
        (2, ["alive"] * 3, "3 peers alive, 2 links"),
    ],
)
def test_one_of_a_kind_is_not_said_to_be_several(links: int, healths: list[str], end: str) -> None:
    members = [{"health": health} for health in healths]
    status = {"name": "ada", "state": "training", "trains": True, "round": 3, "clock": 4}
    said = one_line(status | {"members": members, "links": [{}] * links})
    assert said == f"ada: training, round 3 (swarm 4), {end}"


def test_who_does_not_train_is_where_the_swarm_is() -> None:
    status = {"name": "ada", "state": "serving", "trains": False, "round": 0, "clock": 4}
    said = one_line(status | {"members": [], "links": []})
    assert said == "ada: serving, round 4, 0 peers alive, 0 links"


async def test_who_has_no_trainer_any_more_has_no_speed(tmp_path: Path) -> None:
    """Here, and in what others are told."""
    home = founded(tmp_path / "a")
    async with running(home) as daemon:
        async with training(home) as link:
            link.send(report(tokens_per_s=50000.0))
            await until(lambda: daemon.phi.port.report)
            assert (
                admin_state(daemon.monitoring.view, daemon.monitoring.watching)["now"]["tokens_per_s"]
                == 50000.0
            )
        await until(lambda: not daemon.phi.port.attached)
        _, _, status = await get(home, "/status")
        state = admin_state(daemon.monitoring.view, daemon.monitoring.watching)
        _, _, metrics = await get(home, "/metrics")
        assert status["trainer"]["tokens_per_s"] == state["now"]["tokens_per_s"] == 0.0
        assert "\ngossamer_tokens_per_second 0.0\n" in metrics
        assert status["trainer"]["inner_steps"] == 10, "what it has done stays"
        daemon.core.presence.beat()
        assert daemon.core.own_record.tokens == 100 and daemon.core.own_record.tokens_per_s == 0.0


async def test_an_observer_with_a_model_serves_it_though_nobody_else_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bootstrap peer remembers members, and waits for them only for a while."""
    monkeypatch.setattr(limits, "RESUME_PATIENCE_S", 0.5)
    home = founded(tmp_path / "a")
    async with running(home, trains=False) as daemon:
        await until(lambda: daemon.monitoring.view.state == "serving")
    async with running(home, join=("127.0.0.1:1",), trains=False) as daemon:
        assert daemon.monitoring.view.state == "joining"
        await until(lambda: daemon.monitoring.view.state == "serving")
