"""Swarms of whole cores, joined in memory, and checks that hold whenever they are quiet."""

from __future__ import annotations

import numpy as np

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import ROUND_MAX
from tests.protocol import builders
from tests.protocol.wiring import Node, Weather, World

STORM = Weather(loss=0.05, duplicates=0.2, reorders=True, delay=(0.005, 0.4))

BRISK = builders.manifest(pace={"every_steps": 4, "min_round_seconds": 0.05})


def swarm(seed: int, count: int, weather: Weather | None = None, of=builders.SMALL) -> World:
    world = World(seed, of, weather)
    for number in range(count):
        world.add(number, [0] if number else [])
    world.run(12.0)
    return world


def check(world: World) -> None:
    """Check what holds in quiet: all is here and due to be merged, and no honest node was blamed."""
    for node in world.running():
        assert {delta.round for delta in node.core.ledger} <= set(node.core.merges.waiting(ROUND_MAX))
        assert not node.core.fetcher.wants
        assert not node.blames


def conflicting(world: World, author: Identity, round_: int) -> list:
    """Different records of one author and round, and their payloads."""
    rng = np.random.default_rng(round_)
    return [builders.random_delta(rng, author, round_, of=world.manifest) for _ in range(3)]


def publish_effects(world: World, node: Node, round_: int, **changes: object) -> list[fx.Effect]:
    payload = b"x" * 100
    body = builders.body_of(payload, "int8", round_, len(node.core.layout.fragments), **changes)
    return node.core.handle(ev.Publish(body), world.now)
