"""Attacks that need a swarm of their own: somebody in the middle, silence, bombs, and lies about the past."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path

import pytest
import zstandard

from gossamer.node.address import Contact
from gossamer.node.daemon.network.rpc import fetch_manifest, fetch_status
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import UnreachableError
from gossamer.protocol.limits import FORK_PATIENCE_S
from gossamer.protocol.payloads import payload_chunk_sizes
from gossamer.protocol.records import Claim
from tests.net.attacker import Member, where
from tests.net.middleman import Middleman, middleman
from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.protocol.builders import one_rung

pytestmark = pytest.mark.slow

HELLO_BYTES = 4096
"""More than an HTTP upgrade and a handshake that fails say in one direction."""


# -- somebody in the middle


def assert_nothing_leaked(man: Middleman, node: LocalNode) -> None:
    """Nothing passed in the clear but handshakes that failed."""
    store = RecordStore(node.home.ledger_path, node.manifest.swarm_id)
    records = [delta.data for delta in store.load(node.manifest.plan())]
    store.close()
    passed = man.asked + man.answered
    assert len(records) >= 4 and not any(record in passed for record in records)
    assert len(passed) < 2 * HELLO_BYTES * max(1, man.connections)


@pytest.mark.parametrize("pinned", [False, True], ids=["address", "gossamer address"])
async def test_a_node_that_dials_a_man_in_the_middle_gets_no_link(tmp_path: Path, pinned: bool) -> None:
    """The hello is signed over the certificate that each side sees, and they see different ones."""
    async with LocalNodes(tmp_path, *small_manifest()) as swarm:
        first, second = await swarm.grow(2)
        async with middleman(where(first)) as man:
            contact = Contact(man.address, first.home.identity().node_id if pinned else None)
            swarm.addresses["man"] = str(contact)
            victim = await swarm.add("n2", ["man"])
            await swarm.until(lambda: "the peer ended the handshake" in victim.log, 20, "the victim says so")
            await swarm.until(lambda: man.connections >= 2, 20, "it tries again, to no avail")
            assert victim.status["links"] == [] and victim.status["state"] == "joining"
            assert len(first.status["links"]) == 1
            assert_nothing_leaked(man, first)
        del swarm.nodes["n2"]
        await swarm.go_on(3)
        await victim.stop()
        assert "Traceback" not in first.log + second.log + victim.log


async def test_questions_through_a_man_in_the_middle_are_found_out_by_who_was_told_the_node_id(
    tmp_path: Path,
) -> None:
    async with LocalNodes(tmp_path, *small_manifest()) as swarm:
        first = (await swarm.grow(2))[0]
        own_id = first.home.identity().node_id
        async with middleman(where(first)) as man:
            contact = Contact(where(first), own_id)
            assert (
                await asyncio.to_thread(fetch_manifest, (contact,), None, plaintext=False) == swarm.manifest
            )
            assert (await fetch_status(str(contact)))["node_id"] == own_id.hex()
            bent = Contact(man.address, own_id)
            with pytest.raises(UnreachableError, match="does not prove which node it is"):
                await asyncio.to_thread(fetch_manifest, (bent,), None, plaintext=False)
            with pytest.raises(UnreachableError, match="does not prove which node it is"):
                await fetch_status(str(bent))
            assert man.connections >= 2
        await swarm.go_on(3)


# -- silence


async def test_a_member_that_says_it_holds_everything_and_serves_nothing(tmp_path: Path) -> None:
    """It costs a chunk that it was asked for a minute; then somebody else is asked."""
    async with LocalNodes(tmp_path, *small_manifest()) as swarm:
        nodes = await swarm.grow(3)
        async with Member(swarm.manifest) as mallory:
            mallory.mute = True
            mallory.on_seen = lambda delta, address: [
                msg.Records(((delta.data, True),)),
                msg.Have((delta.record_id,)),
            ]
            await mallory.link(*map(where, nodes))
            await mallory.publish(mallory.delta(nodes[0].status["clock"] + 1))
            start = max(node.status["round"] for node in nodes)
            await swarm.until(
                lambda: all(node.status["round"] >= start + 20 for node in nodes), 30, "nobody waits for it"
            )
            assert mallory.asked >= 3
            took = await swarm.agree(100)
            print(f"all honest payloads everywhere {took:.1f} s after the last was published")
            await swarm.until(
                lambda: all(node.status["payloads_missing"] == 1 for node in nodes),
                10,
                "its own is missing, which nobody has",
            )


async def test_a_member_that_dribbles_its_payload_keeps_no_joiner_from_training(tmp_path: Path) -> None:
    """It hands out one chunk after another, each just before it would be given up."""
    manifest, phi = small_manifest(1 << 24, outer=one_rung("int8"))
    async with LocalNodes(tmp_path, manifest, phi) as swarm:
        nodes = await swarm.grow(2, step_s=0.3)
        async with Member(manifest) as mallory:
            mallory.serve = lambda blob: None
            await mallory.link(*map(where, nodes))
            await swarm.until(lambda: nodes[0].status["clock"] >= 6, 60, "some rounds")
            clock = nodes[0].status["clock"]
            delta = mallory.delta(clock)
            await mallory.publish(delta)
            joiner = await swarm.add("late", ["n0"])
            await swarm.until(lambda: joiner.home.read_daemon() is not None, 20, "the joiner listens")
            mallory.serve, mallory.put_after_s = mallory.chunks.get, 5.0
            assert len(delta.body.chunks) * mallory.put_after_s > 150.0
            await mallory.link(where(joiner))
            await mallory.say(msg.Have((delta.record_id,)), where(joiner))
            joiner.train(0.3)
            await swarm.until(lambda: joiner.status["round"] > clock, 90, "the joiner trains")
            assert 5 <= len(mallory.answers) < len(delta.body.chunks)
            assert joiner.status["payloads_missing"] >= 1, "it is still under way"
            await swarm.go_on(3, closed=True)


# -- bombs


async def test_a_chunk_that_unpacks_to_a_gigabyte_is_not_unpacked(tmp_path: Path) -> None:
    """A frame may say and hold what it likes: no more than a chunk comes out, and its sender is to blame."""
    manifest, phi = small_manifest(1 << 20)
    layout = manifest.plan()
    bombs = [
        zstandard.ZstdCompressor(1).compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(1, write_content_size=False).compress(bytes(1 << 30)),
        os.urandom(100),
    ]
    bombs = [bytes([1]) + (1 << 18).to_bytes(3) + bomb for bomb in bombs]
    async with LocalNodes(tmp_path, manifest, phi) as swarm:
        nodes = await swarm.grow(2, step_s=0.3)
        await swarm.until(lambda: nodes[0].status["clock"] >= 4, 60, "some rounds")
        before = [node.process.memory_info().rss for node in nodes]
        async with Member(manifest) as mallory:
            await mallory.link(*map(where, nodes))
            mallory.encoding = "packed"
            answers = itertools.cycle(bombs)
            mallory.serve = lambda blob: next(answers)
            clock = nodes[0].status["clock"]
            round_ = next(r for r in range(clock, 0, -1) if layout.of_round(r).numel >= 1 << 19)
            delta = mallory.delta(round_)
            assert max(map(len, bombs)) < payload_chunk_sizes(delta.body.payload_bytes)[0]
            await mallory.publish(delta)
            await swarm.until(lambda: len(mallory.answers) >= len(bombs), 60, "asked for")
            assert set(mallory.answers) == {400}
            await swarm.until(
                lambda: sum(n.status["misbehaviours_seen"] for n in nodes) >= len(bombs), 30, "blamed"
            )
        await swarm.go_on(3)
        for node, rss in zip(nodes, before, strict=True):
            assert peak_of(node) - rss < 64 << 20


def peak_of(node: LocalNode) -> int:
    """The most memory that a daemon ever held, in bytes."""
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- lies about the past


async def test_one_liar_about_the_past_moves_nobody(tmp_path: Path) -> None:
    """For every round that the honest have sealed or are about to it claims a history of far more tokens."""
    history = {"seal_after": 4, "snapshot_every": 8, "retain": 64}
    async with LocalNodes(tmp_path, *small_manifest(history=history)) as swarm:
        nodes = await swarm.grow(3, step_s=0.1)
        lie = os.urandom(32)

        async def claim(mallory: Member, seconds: float) -> None:
            until = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until:
                await asyncio.gather(*(node.ask() for node in nodes))
                newest = max(node.status["sealed_round"] or 0 for node in nodes)
                claims = tuple(Claim(newest + ahead, 2**59, lie, lie) for ahead in (16, 8, 0, -8))
                claims = tuple(c for c in claims if c.round >= 0)
                await mallory.present(claims=claims, trains=True, round=nodes[0].status["round"])
                await asyncio.sleep(0.25)

        async with Member(swarm.manifest) as mallory:
            await mallory.link(*map(where, nodes))
            await claim(mallory, FORK_PATIENCE_S + 4)
            assert min(node.status["sealed_round"] for node in nodes) >= 8, "sealed under its eyes"
            await swarm.agree(closed=True)
            await claim(mallory, FORK_PATIENCE_S + 4)  # the same while nothing moves
            swarm.train_on()
            joiner = await swarm.add("n3", ["n0"])
            joiner.train(0.1)
            await swarm.until(lambda: joiner.status.get("round", 0) > 0, 40, "a joiner joins the honest")
            await swarm.go_on(3, closed=True)
        assert not any("A FORK" in node.log for node in swarm.nodes.values())


async def test_three_that_lie_alike_move_no_joiner_that_was_told_of_an_honest_one(tmp_path: Path) -> None:
    """They claim a newer snapshot than the two honest members have, which nobody could ever fetch."""
    history = {"seal_after": 4, "snapshot_every": 8, "retain": 64}
    async with LocalNodes(tmp_path, *small_manifest(history=history)) as swarm:
        nodes = await swarm.grow(2, step_s=0.1)
        lie = os.urandom(32)
        async with (
            Member(swarm.manifest) as one,
            Member(swarm.manifest) as two,
            Member(swarm.manifest) as three,
        ):
            liars = (one, two, three)
            for mallory in liars:
                await mallory.link(*map(where, nodes))

            async def lie_on() -> None:
                while True:
                    await asyncio.gather(*(node.ask() for node in nodes))
                    newest = max(node.status["sealed_round"] or 0 for node in nodes)
                    for mallory in liars:
                        await mallory.present(claims=(Claim(newest + 8, 2**59, lie, lie),))
                    await asyncio.sleep(0.25)

            lying = asyncio.create_task(lie_on())
            try:
                joiner = await swarm.add("n2", ["n0"])
                joiner.train(0.1)
                await swarm.until(lambda: joiner.status.get("round", 0) > 0, 40, "it joins the honest")
            finally:
                lying.cancel()
            await swarm.go_on(3, closed=True)
        assert not any("A FORK" in node.log for node in swarm.nodes.values())
