"""Whole cores on machines that sleep: what a node knows, and publishes, when it wakes."""

from __future__ import annotations

import math

import pytest

from gossamer.protocol import events as ev
from gossamer.protocol import limits
from tests.protocol import builders
from tests.protocol.cores import BRISK, swarm
from tests.protocol.wiring import Node, World

SUSPENDED = pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "stopped"])
"""Whether the monotonic clock stands still meanwhile, as on Linux, or goes on, as after SIGSTOP."""

LATE_S = limits.RESUME_PATIENCE_S + 5.0


def _training(seed: int, count: int = 3) -> World:
    world = swarm(seed, count, of=BRISK)
    for node in world.running():
        world.train(node, 0.5, math.inf)
    world.run(20.0)
    return world


def _published(node: Node, since: int) -> list[int]:
    """The rounds after one that a node has published for."""
    own = [delta.round for delta in node.disk if delta.author == node.identity.node_id]
    return [round_ for round_ in own if round_ > since]


@SUSPENDED
def test_two_of_three_that_slept_go_on_where_the_third_is(seed, suspended):
    world = _training(seed)
    alone, *asleep = world.running()
    for node in asleep:
        world.sleep(node, 120.0, suspended=suspended)
    last = {node.number: node.core.own_last for node in asleep}
    world.run(120.0)
    reached = alone.core.own_last
    assert reached > 90
    world.run(LATE_S)
    assert len(_published(alone, reached)) > LATE_S / 2, "it does not wait for them"
    for node in asleep:
        in_passing, *rest = _published(node, last[node.number])
        assert min(rest) >= reached - 2, "what was trained meanwhile is not trained over again, beside it"
        assert in_passing >= reached - 2, "nor is the round opened again in which they fell asleep"
    world.run(10.0)
    rounds = [node.core.own_last for node in world.running()]
    assert max(rounds) - min(rounds) <= 2


def test_one_that_finds_nobody_when_it_wakes_goes_on_alone(seed):
    world = _training(seed)
    node = world.nodes[2]
    world.sleep(node, 120.0, suspended=True)
    world.run(60.0)
    for other in (0, 1):
        world.crash(world.nodes[other])
    last = node.core.own_last
    world.run(60.0 + limits.WAKE_PATIENCE_S)
    assert len(_published(node, last)) <= 1
    world.run(30.0)
    assert len(_published(node, last)) > 10


def test_a_slow_event_loop_has_not_slept(seed):
    world = _training(seed)
    node = world.nodes[1]
    for _ in range(10):
        world.freeze(node, 3.0)
        world.run(4.0)
        assert node.core.clock_to_publish_by == node.core.clock


@pytest.mark.parametrize(("forward_s", "silent"), [(3600.0, True), (5.0, False), (-3600.0, False)])
def test_a_clock_that_was_set_forward_costs_a_moment_of_silence(seed, forward_s, silent):
    world = _training(seed)
    node = world.nodes[1]
    world.handle(node, ev.TimeSet(builders.CREATED + 3600.0 + forward_s))
    reached = node.core.own_last
    world.run(limits.RESUME_PATIENCE_S - 1.0)
    assert (len(_published(node, reached)) <= 1) == silent
    world.run(21.0)
    assert len(_published(node, reached)) > 10
    others = [world.nodes[number].core for number in (0, 2)]
    assert all(core.own_last >= reached + 30 for core in others), "nobody waited for it"


def test_two_that_cannot_publish_do_not_hold_up_the_third(seed, monkeypatch):
    """Their disks are full, and they train on: what they do is published when there is room again."""
    world = swarm(seed, 3, of=BRISK)
    alone, *stuck = world.running()
    steps = {node.number: 0 for node in world.running()}
    full: set[int] = set()

    def report(node: Node) -> None:
        steps[node.number] += 1
        world.handle(node, ev.Progress(steps[node.number], 0, 0.0, 0.0, ""))
        world.after(0.5, lambda: report(node))

    publish = world.publish
    monkeypatch.setattr(
        world,
        "publish",
        lambda node, round_: (
            world.handle(node, ev.Paused()) if node.number in full else publish(node, round_)
        ),
    )
    for node in world.running():
        report(node)
        world.train(node, 0.5, math.inf)
    world.run(20.0)
    full.update(node.number for node in stuck)
    before = alone.core.own_last
    world.run(60.0)
    assert alone.core.own_last > before + 40
    assert all(node.core.own_record.round == 0 for node in stuck)
    full.clear()
    world.run(20.0)
    assert all(node.core.own_last > before + 40 and node.core.own_record.round for node in stuck)
