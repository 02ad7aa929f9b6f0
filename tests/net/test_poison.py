"""Deltas meant to steer or to wreck the model, by members with a valid key: what Merge leaves of them.

Phi is a function of the set of records, so what one member did to it can be computed: `fold` merges what a
node has on its disk, with and without somebody's records, and apart from the node's own merging.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.phi.snapshots import digest
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.protocol import messages as msg
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge.merge import merge_round
from gossamer.protocol.records import Delta
from tests.net.attacker import Member, where
from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.protocol.builders import contribution, one_rung

pytestmark = pytest.mark.slow

DRIFT = 4096
"""What all honest deltas have in common: per value, four times their noise."""


def fold(node: LocalNode, phi: Ints, without: Collection[bytes] = ()) -> Ints:
    """Phi of the records and payloads in a node's folder, less those of some authors: int32[numel]."""
    layout = node.manifest.plan()
    chunks = ChunkStore(node.home.chunks_path)
    store = RecordStore(node.home.ledger_path, node.manifest.swarm_id)
    ledger = Ledger()
    for delta in store.load(layout):
        ledger.add(delta)
    store.close()
    result = phi.copy()
    for round_ in ledger.rounds():
        fragment = layout.of_round(round_)
        contributions = [
            contribution(delta, b"".join(map(chunks.get, delta.body.chunks)), layout)
            for delta in ledger.valid(round_)
            if delta.author not in without
        ]
        span = slice(fragment.offset, fragment.offset + fragment.numel)
        result[span] -= merge_round(contributions, fragment, node.manifest.outer)
    return result


def travelled(end: Ints, start: Ints) -> float:
    return float(np.linalg.norm(end.astype(np.float64) - start))


class Crowd:
    """Three training nodes, and members of a test's making that publish in every round they hear of.

    Use as an async context manager: the members go with it.
    """

    def __init__(self, swarm: LocalNodes, phi: Ints) -> None:
        self.swarm = swarm
        self.phi = phi
        self.nodes = list(swarm.nodes.values())
        self._answered: list[set[int]] = []
        """Rounds in which each member has published."""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def join(self, make: Callable[[Member, int], Delta]) -> Member:
        """A member that answers the first delta of each round with one of its own, told to all."""
        member = await self._stack.enter_async_context(Member(self.swarm.manifest))
        member.relays = True  # a liar in this one thing only
        answered: set[int] = set()
        self._answered.append(answered)

        def answer(delta: Delta, address: str) -> list[msg.Message]:
            if delta.author == member.identity.node_id or delta.round in answered:
                return []
            answered.add(delta.round)
            return [msg.Records(((make(member, delta.round).data, True),))]

        member.on_seen = answer
        await member.link(*map(where, self.nodes))
        return member

    async def train(self, rounds: int) -> int:
        """Let everybody publish so many rounds and come to rest; returns the rounds that there were."""
        start = max(node.status["round"] for node in self.nodes)
        await self.swarm.until(
            lambda: all(node.status["round"] >= start + rounds for node in self.nodes), 60, "rounds"
        )
        await self.swarm.agree()  # the puppets rest; the members may still have to answer the last of them
        own = [node.puppet.rounds for node in self.nodes if node.puppet is not None]
        last = max(map(max, own))

        def all_here() -> bool:
            published = sum(map(len, own)) + sum(map(len, self._answered))
            return all(last in answered for answered in self._answered) and all(
                node.status["records"] == published and not node.status["payloads_missing"]
                for node in self.nodes
            )

        await self.swarm.until(all_here, 40, "all that anybody published is everywhere")
        await self.swarm.agree()
        return last

    async def model(self) -> Ints:
        """Phi as the nodes have it, found by another way: from what the first one has on its disk.

        Records reach the disk a moment after they have been merged.
        """
        for _ in range(50):
            phi = fold(self.nodes[0], self.phi)
            if digest(phi).hex() == self.nodes[0].status["phi_digest"]:
                return phi
            await asyncio.sleep(0.1)
        raise AssertionError("the node's model is not the fold of its records")

    def without(self, *members: Member) -> Ints:
        """Phi as it would have been without what some members published."""
        return fold(self.nodes[0], self.phi, [member.identity.node_id for member in members])


@contextlib.asynccontextmanager
async def crowd(base: Path) -> AsyncIterator[Crowd]:
    """Three honest nodes whose deltas have a drift in common, and room for others.

    In `int8`: these are about merging, and a coarse code of values that are all alike is far from them.
    """
    manifest, phi = small_manifest(outer=one_rung("int8"))
    async with LocalNodes(base, manifest, phi) as swarm:
        for node in await swarm.grow(3, step_s=0.2):
            assert node.puppet is not None
            node.puppet.drift = DRIFT
        async with Crowd(swarm, phi) as people:
            yield people


def honest(member: Member, round_: int) -> Delta:
    """What the puppets publish, too: a common drift, and noise."""
    rng = np.random.default_rng()
    fragment = member.layout.of_round(round_)
    low, high = DRIFT - DRIFT // 4, DRIFT + DRIFT // 4
    values = [rng.integers(low, high, slot.numel, dtype=np.int32) for slot in fragment.slots]
    return member.delta(round_, values, tokens=200, steps=2)


def scaled(member: Member, round_: int, factor: int) -> Delta:
    """The honest drift times a factor."""
    fragment = member.layout.of_round(round_)
    values = [np.full(slot.numel, factor * DRIFT, dtype=np.int32) for slot in fragment.slots]
    return member.delta(round_, values, tokens=200, steps=2)


async def test_tokens_overstated_a_thousandfold_weigh_four_times(tmp_path: Path) -> None:
    """The cap on weights holds: a liar's direction counts as that of four honest members, not of 10^6."""
    async with crowd(tmp_path) as people:
        await people.join(honest)

        def liar_says(member: Member, round_: int) -> Delta:
            fragment = member.layout.of_round(round_)
            values = [
                np.full(slot.numel, DRIFT, dtype=np.int32) * (-1) ** np.arange(slot.numel, dtype=np.int32)
                for slot in fragment.slots
            ]
            return member.delta(round_, values, tokens=200_000, steps=2)

        liar = await people.join(liar_says)
        rounds = await people.train(8)
        with_, without = await people.model(), people.without(liar)
        shift, way = travelled(with_, without), travelled(without, people.phi)
        kept = kept_of(people.phi, without, with_, slice(None))
        print(f"{rounds} rounds: moved {shift / way:.2f} of the honest way elsewhere, kept {kept:.2f} of it")
        assert kept > 1 / 3
        assert shift < 1.5 * way


async def test_a_norm_a_thousand_times_too_large_is_clipped_to_three(tmp_path: Path) -> None:
    async with crowd(tmp_path) as people:
        await people.join(honest)

        def roar(member: Member, round_: int) -> Delta:
            rng = np.random.default_rng()
            fragment = member.layout.of_round(round_)
            signs = [rng.choice(np.array([-1, 1], np.int32), slot.numel) for slot in fragment.slots]
            return member.delta(round_, [s * 1000 * DRIFT for s in signs], tokens=200, steps=2)

        liar = await people.join(roar)
        rounds = await people.train(8)
        with_, without = await people.model(), people.without(liar)
        shift, way = travelled(with_, without), travelled(without, people.phi)
        print(f"{rounds} rounds: moved {shift / way:.2f} of the honest way elsewhere")
        assert shift < 1.5 * way, "unclipped it would be 200 times the way"


@pytest.mark.parametrize("liars", [1, 2])
async def test_sign_flipped_deltas_of_one_and_two_in_eight(tmp_path: Path, liars: int) -> None:
    async with crowd(tmp_path) as people:
        for _ in range(5 - liars):
            await people.join(honest)
        flipped = [await people.join(lambda member, r: scaled(member, r, -10)) for _ in range(liars)]
        rounds = await people.train(8)
        with_, without = await people.model(), people.without(*flipped)
        kept = {
            slot.spec.averaging: kept_of(people.phi, without, with_, span)
            for fragment in people.swarm.manifest.plan().fragments
            for slot in fragment.slots
            if (span := slice(fragment.offset + slot.span.start, fragment.offset + slot.span.stop))
        }
        print(f"{rounds} rounds, {liars} in eight: kept {kept} of the honest way")
        assert 0.5 < kept["rda"] < 2, "directions are averaged: the liar's counts as one"
        assert -0.25 < kept["mean"] < 1, "means take a liar's norm, up to thrice the median"


def kept_of(start: Ints, without: Ints, with_: Ints, span: slice) -> float:
    """How far Phi went along the way that it would have gone without the liars, as a part of that way."""
    way = without[span].astype(np.float64) - start[span]
    moved = with_[span].astype(np.float64) - start[span]
    return float(moved @ way) / float(way @ way)


async def test_rounds_that_one_member_has_to_itself_cannot_wreck_the_model(tmp_path: Path) -> None:
    """Deltas of the greatest values, for the next round, soon, and far ahead of everybody's clock.

    They are not merged before the swarm gets there, and then they are clipped by what is usual there. Of
    those that are far ahead and taken all the same, three of a fragment would take the model out of range.
    """
    manifest, phi = small_manifest()
    fragments = len(manifest.plan().fragments)
    async with LocalNodes(tmp_path, manifest, phi) as swarm:
        nodes = await swarm.grow(3)
        async with Member(manifest) as mallory:
            await mallory.link(*map(where, nodes))
            clock = max(node.status["clock"] for node in nodes)
            for ahead in (1, 12, *range(150, 150 + 3 * fragments, fragments), 500, 500 + fragments):
                round_ = clock + ahead
                fragment = mallory.layout.of_round(round_)
                values = [np.full(slot.numel, 127 << 22, dtype=np.int32) for slot in fragment.slots]
                await mallory.publish(mallory.delta(round_, values))

            def ended() -> bool:
                return any(node.child is not None and node.child.poll() is not None for node in nodes)

            # Longer than what is held back for others' deltas alone would wait.
            await swarm.until(
                lambda: ended() or all(node.status["round"] > clock + 60 for node in nodes), 60, "either"
            )
            assert not ended(), nodes[0].log.splitlines()[-1]
            assert not any("diverged" in node.log for node in nodes)
