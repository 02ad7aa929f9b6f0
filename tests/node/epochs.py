"""A light simulation of a swarm that goes through its data: rounds, the fold and the walks; no network."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from gossamer.node.trainer.draws import Block, Walk
from gossamer.protocol.blocks import pack_blocks
from gossamer.protocol.history.data_claims import DataClaims, taken
from gossamer.protocol.records import Delta, DeltaBody
from tests.protocol.builders import body_of, identity

FRAGMENTS = 4
"""A block is claimed once this many deltas have come out since, its own included."""

LAG = FRAGMENTS + 2
"""Rounds from drawing a block to hearing of its claim."""

CAP = 4.0


class Said(NamedTuple):
    """What the fold reads of a delta."""

    author: bytes
    body: DeltaBody


@dataclass
class Node:
    node_id: bytes
    walk: Walk
    speed: float
    side: int
    credit: float = 0.0
    windows: list[list[Block]] = field(default_factory=list)
    """What was drawn in each of the last rounds, and is not claimed yet."""
    drawn: set[Block] = field(default_factory=set)

    def round(self, blocks: float) -> Said:
        """Train, and publish."""
        self.credit += blocks * self.speed
        self.windows.append([self.walk.draw() for _ in range(int(self.credit))])
        self.drawn.update(self.windows[-1])
        self.credit %= 1.0
        ready = [block for window in self.windows[: 1 - FRAGMENTS] for block in window]
        epoch = min((epoch for epoch, _ in ready), default=0)
        claim, left = pack_blocks(number for one, number in ready if one == epoch)
        rest = [*((epoch, number) for number in left), *(block for block in ready if block[0] != epoch)]
        self.windows = [rest, *self.windows[1 - FRAGMENTS :]]
        return Said(self.node_id, body_of(b"1", "int8", 9, 1, epoch=epoch, blocks=claim))


class Outcome(NamedTuple):
    seen: float
    """Share of the blocks of the first epoch that were claimed."""
    again: float
    """And how many of them more than once, at most."""
    common: float
    """How many nodes on both sides of a partition drew."""
    bytes_max: int


def run(
    nodes: int,
    rounds: int,
    *,
    speeds: Sequence[float] = (1.0,),
    crash_every: int = 0,
    split: tuple[int, int] = (0, 0),
    blocks: int = 8192,
    seed: int = 0,
) -> Outcome:
    """One epoch of about `rounds` rounds. A node crashes at intervals, and another comes 3 rounds later; half
    of the nodes do not hear of the others in the rounds of `split`."""
    rng = random.Random(seed)
    a_round = blocks / rounds / sum(speeds[i % len(speeds)] for i in range(nodes))
    ids = (identity(number).node_id for number in range(10_000))

    def node(speed: float, side: int) -> Node:
        node_id = next(ids)
        return Node(node_id, Walk(blocks, int.from_bytes(node_id[:8])), speed, side, rng.random())

    swarm = [node(speeds[i % len(speeds)], i % 2) for i in range(nodes)]
    heard: list[list[list[Said]]] = [[], []]
    """By side: all that it knows, by round."""
    folds = [DataClaims(blocks), DataClaims(blocks)]
    coming: list[tuple[int, float]] = []
    sizes = Counter[int]()
    for now in range(20 * rounds):
        for each in swarm:
            recent = [said for round_ in heard[each.side][-LAG:-1] for said in round_]
            each.walk.learn(taken(folds[each.side], cast("list[Delta]", recent), each.node_id))
        said = {each.node_id: each.round(a_round) for each in swarm}
        sizes.update(len(one.body.blocks) for one in said.values())
        is_split = split[0] <= now < split[1]
        for side in (0, 1):
            heard[side].append([said[e.node_id] for e in swarm if e.side == side or not is_split])
            if now > 0:  # that of the round before: this one is still on its way
                add(folds[side], heard[side][-2])
        if now == split[1] > 0:
            merged = [[*a, *(one for one in b if one not in a)] for a, b in zip(*heard, strict=True)]
            heard = [list(merged), list(merged)]
            folds = [folded(merged[:-1], blocks), folded(merged[:-1], blocks)]
        if crash_every and now % crash_every == crash_every - 1:
            gone = swarm.pop(rng.randrange(len(swarm)))
            coming.append((now + 3, gone.speed))
        while coming and coming[0][0] <= now:
            swarm.append(node(coming.pop(0)[1], len(swarm) % 2))
        if folds[0].epoch > 0 and not any(e == 0 for each in swarm for w in each.windows for e, _ in w):
            break
    found = folds[0].before
    sides = [{block for e in swarm if e.side == side for block in e.drawn if not block[0]} for side in (0, 1)]
    common = len(sides[0] & sides[1]) / blocks
    return Outcome(float(found.claimed.mean()), found.again / blocks, common, max(sizes))


def folded(rounds: Sequence[Sequence[Said]], blocks: int) -> DataClaims:
    """The fold over all of these rounds."""
    claims = DataClaims(blocks)
    for said in rounds:
        add(claims, said)
    return claims


def add(claims: DataClaims, round_: Sequence[Said]) -> None:
    claims.add([(one.body.epoch, one.body.blocks) for one in round_ if one.body.blocks], CAP)


if __name__ == "__main__":
    np.set_printoptions(precision=3)
    for count in (8, 64, 256):
        for length in (30, 100, 300):
            print(count, length, run(count, length, blocks=max(8192, count * length)))
            churn = run(count, length, speeds=(1, 1, 0.5, 0.25), crash_every=12)
            print(count, length, "churn", churn)
    print(run(8, 300, split=(60, 120)))
