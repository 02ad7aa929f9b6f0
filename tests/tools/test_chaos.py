"""The storm's script and what counts as recovered, over processes that only pretend."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from gossamer.bootstrap.processes import NodeProcess
from tests.tools import chaos
from tests.tools.chaos import Kind, Storm

ROUNDS = 40


class Pretended(NodeProcess):
    """A node whose status the test writes."""

    def start(self) -> None:
        self.killed = False

    def says(self, round_: int, state: str = "training", **more: Any) -> None:
        self.status = {"round": round_, "state": state, **more}


class Stage:
    """A storm over three pretended nodes, and a fourth that may join."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self.boot = pretended("bootstrap")
        self.nodes: list[NodeProcess] = [pretended(f"node-{i + 1}") for i in range(3)]
        self.storm = Storm(rounds, self.boot, self.nodes, self.another)

    def another(self) -> NodeProcess:
        self.nodes.append(pretended(f"node-{len(self.nodes) + 1}"))
        return self.nodes[-1]

    def all_in(self, round_: int) -> None:
        """All that live are in this round; the storm looks."""
        for node in self.nodes:
            if isinstance(node, Pretended) and not node.killed:
                node.says(round_)
        self.storm.check()

    @property
    def kinds(self) -> list[Kind]:
        return [fault.kind for fault in self.storm.faults]

    def recovered(self, kind: Kind) -> bool:
        (fault,) = [fault for fault in self.storm.faults if fault.kind == kind]
        return fault.recovered_s is not None


def pretended(name: str) -> Pretended:
    return Pretended(name, Path("nowhere") / name, [])


def pretend_to_kill(process: NodeProcess) -> None:
    process.killed, process.status = True, None


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PAUSE_S", 0)
    monkeypatch.setattr(chaos, "kill", pretend_to_kill)


def test_each_event_has_its_fraction_of_the_rounds() -> None:
    stage = Stage()
    seen: dict[Kind, int] = {}
    for round_ in range(1, ROUNDS + 1):
        stage.all_in(round_)
        for kind in stage.kinds:
            seen.setdefault(kind, round_)
    assert seen == {
        Kind.KILLED: 6,
        Kind.RETURNED: 12,
        Kind.JOINED: 14,
        Kind.SPLIT: 20,
        Kind.HEALED: 28,
        Kind.BOOTSTRAP_DIED: 32,
    }
    assert stage.boot.killed
    assert [node.name for node in stage.nodes] == ["node-1", "node-2", "node-3", "node-4"]


def test_returned_is_over_when_it_trains_within_a_round() -> None:
    stage = Stage()
    stage.all_in(6)
    stage.all_in(12)
    assert stage.kinds[-1] == Kind.RETURNED
    two = stage.nodes[1]
    assert isinstance(two, Pretended)
    for round_, state, over in ((5, "joining", False), (5, "training", False), (11, "training", True)):
        two.says(round_, state)
        stage.storm.check()
        assert stage.recovered(Kind.RETURNED) is over


def test_healed_is_over_when_all_have_merged_the_same() -> None:
    stage = Stage()
    for round_ in (6, 12, 14, 20, 28):
        stage.all_in(round_)
    assert stage.storm.up_to == 28

    def say(digests: list[str | None], up_to: int = 28) -> bool:
        for node, digest in zip_longest(stage.nodes, digests, fillvalue=""):
            assert isinstance(node, Pretended)
            node.says(29, **({} if digest == "" else {"prefix": {"up_to": up_to, "digest": digest}}))
        stage.storm.check()
        return stage.recovered(Kind.HEALED)

    assert not say(["x", "x", "y", "y"])
    assert not say(["x", "x", "x", None])
    assert not say(["x", "x", "x"]), "the fourth has not been asked for it yet"
    assert not say(["x", "x", "x", "x"], up_to=27)
    assert say(["x", "x", "x", "x"])


def test_it_is_over_when_all_has_happened_and_recovered() -> None:
    stage = Stage()
    for round_ in range(1, ROUNDS):
        stage.all_in(round_)
        assert not stage.storm.over
    for node in stage.nodes:
        assert isinstance(node, Pretended)
        node.says(ROUNDS, "finished", prefix={"up_to": stage.storm.up_to, "digest": "x"})
    stage.storm.check()
    assert stage.storm.over
    assert all(fault.to_json()["recovered_s"] is not None for fault in stage.storm.faults)
