"""Lies on the wire, told to a swarm that trains: what each costs, and that the honest stay bit-identical.

One swarm of three training nodes is attacked by all the quick tests, one after another. After each the honest
must have made more rounds and hold the same bits (`unharmed`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from gossamer.protocol import messages as msg
from gossamer.protocol.access.handshake import HELLO_BYTES_MAX, ClientHandshake
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, Identity
from gossamer.protocol.records import HEADER_BYTES, Delta, RecordKind, seal
from gossamer.protocol.wire import unpack
from tests.net.attacker import Member, impostor, knock, where
from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.protocol.builders import signed, turns_nobody_away

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS_MORE = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalNodes]:
    """Three honest nodes that train; whatever is done to them, none may ever be restarted or crash."""
    async with LocalNodes(tmp_path_factory.mktemp("attacked"), *small_manifest()) as nodes:
        honest = await nodes.grow(3)
        pids = [node.process.pid for node in honest]
        yield nodes
        assert [node.process.pid for node in honest] == pids
        assert all(node.process.is_running() for node in honest)
        assert not any("Traceback" in node.log for node in honest)


def everywhere(swarm: LocalNodes) -> list[str]:
    return [where(node) for node in swarm.nodes.values()]


async def unharmed(swarm: LocalNodes, rounds: int = ROUNDS_MORE, missing: int = 0) -> None:
    """The honest make more rounds, and when they rest hold the same bits, and lack so many payloads."""
    await swarm.go_on(rounds)
    honest = [node for node in swarm.nodes.values() if node.puppet is not None]
    # The digests in a status may be a moment older than the rest of it: a last delta may still be under way.
    await swarm.until(
        lambda: all(node.status["payloads_missing"] == missing for node in honest), 60, f"{missing} missing"
    )
    swarm.train_on()


async def until_alone_with_the_honest(swarm: LocalNodes, node: LocalNode) -> None:
    """Wait until a node is linked to all other honest ones, and to nobody else."""
    others = {other.status["node_id"] for other in swarm.nodes.values() if other is not node}
    await swarm.until(
        lambda: {link["node_id"] for link in node.status["links"]} == others, 60, "only the honest are linked"
    )


def _is_void(delta: Delta, node: LocalNode) -> bool:
    """Whether a node takes its author for one that signed two deltas for the round."""
    return {"node_id": delta.author.hex(), "round": delta.round} in node.status["void"]


async def until_blamed(swarm: LocalNodes, who: Identity, node: LocalNode, times: int = 1) -> None:
    """Wait until a node has named somebody in its log, and counted so many misbehaviours."""
    name = f"{who.node_id[:4].hex()} misbehaved"
    await swarm.until(
        lambda: name in node.log and node.status["misbehaviours_seen"] >= times,
        60,
        f"{times} complaints about {name}",
    )


async def an_honest_delta(swarm: LocalNodes, member: Member) -> Delta:
    """The next delta of an honest node that a member hears of."""
    known = set(member.seen)
    await swarm.until(lambda: bool(member.seen.keys() - known), 60, "a delta of somebody honest")
    return member.seen[(member.seen.keys() - known).pop()]


# -- who are you


async def test_a_hello_under_anothers_key_is_not_answered(swarm: LocalNodes) -> None:
    """It names an honest member's public key, and cannot sign with it."""
    first, second, _ = swarm.nodes.values()
    victim = second.home.identity()

    def hello(challenge: bytes, binding: bytes) -> bytes:
        thief = impostor(victim.public_key)
        return ClientHandshake(
            thief, swarm.manifest.swarm_id, binding, os.urandom(32), None, vet=turns_nobody_away
        ).hello(challenge)

    assert len(await knock(where(first), hello)) == 1, "the challenge, and then nothing"
    await unharmed(swarm)
    await until_alone_with_the_honest(swarm, first)


async def test_a_recorded_hello_cannot_be_sent_again(swarm: LocalNodes) -> None:
    """Neither to the node that it was for, nor to another."""
    first, second, _ = swarm.nodes.values()
    honest = Identity.from_seed(os.urandom(32))
    recorded: list[bytes] = []

    def record(challenge: bytes, binding: bytes) -> bytes:
        shake = ClientHandshake(
            honest, swarm.manifest.swarm_id, binding, os.urandom(32), None, vet=turns_nobody_away
        )
        recorded.append(shake.hello(challenge))
        return recorded[0]

    _, welcome = await knock(where(first), record)
    assert unpack(welcome, HELLO_BYTES_MAX)[0] is True
    for node in (first, second):
        assert len(await knock(where(node), lambda challenge, binding: recorded[0])) == 1
    await unharmed(swarm)


# -- what a linked member may send


async def test_a_record_of_somebody_else_cannot_be_changed_or_claimed(swarm: LocalNodes) -> None:
    """A's envelope with a changed body, and under B's key with A's signature: blamed, and kept by nobody."""
    node = swarm.nodes["n0"]
    async with Member(swarm.manifest) as mallory:
        await mallory.link(*everywhere(swarm))
        theirs = await an_honest_delta(swarm, mallory)
        key, signature = slice(1, 1 + PUBLIC_KEY_BYTES), slice(1 + PUBLIC_KEY_BYTES, HEADER_BYTES)
        head, body = theirs.data[:HEADER_BYTES], theirs.data[HEADER_BYTES:]
        louder = replace(theirs.body, tokens=theirs.body.tokens * 10).pack()
        forged = [
            head + louder,
            head[:1] + mallory.identity.public_key + head[signature] + body,
            head[:1] + head[key] + os.urandom(64) + body,
            bytes([RecordKind.MEMBER]) + head[1:] + body,
            seal(mallory.identity, RecordKind.DELTA, bytes(32), theirs.body.pack()).data,  # of another swarm
        ]
        for data in forged:
            await mallory.say(msg.Records(((data, True),)), where(node))
        await until_blamed(swarm, mallory.identity, node, len(forged))
        assert mallory.links, "blamed, and still heard"
    await unharmed(swarm)
    assert not _is_void(theirs, node), "nobody can make another equivocate"


async def test_a_stolen_payload_counts_for_the_thief_and_takes_nothing_from_its_author(
    swarm: LocalNodes,
) -> None:
    """B signs, as its own, A's window and payload. That is a record of B's; A's stays what it is."""
    async with Member(swarm.manifest) as mallory:
        await mallory.link(*everywhere(swarm))
        theirs = await an_honest_delta(swarm, mallory)
        before = {node.name: node.status["records"] for node in swarm.nodes.values()}
        stolen = signed(mallory.identity, theirs.body, swarm.manifest)
        assert stolen.record_id != theirs.record_id
        await mallory.publish(stolen)
        await unharmed(swarm)
    for node in swarm.nodes.values():
        assert node.status["records"] > before[node.name]
        assert not _is_void(theirs, node) and not _is_void(stolen, node)


async def test_two_deltas_for_one_round_are_void_everywhere(swarm: LocalNodes) -> None:
    """Half of the swarm is told one, half the other."""
    nodes = list(swarm.nodes.values())
    async with Member(swarm.manifest) as mallory:
        await mallory.link(*everywhere(swarm))
        round_ = nodes[0].status["clock"] + 1
        await mallory.publish(mallory.delta(round_), where(nodes[0]))
        await mallory.publish(mallory.delta(round_), *(where(node) for node in nodes[1:]))
        void = {"node_id": mallory.node_id, "round": round_}
        await swarm.until(lambda: all(void in node.status["void"] for node in nodes), 60, "void everywhere")
        await unharmed(swarm)
        await mallory.publish(mallory.delta(round_))  # a third adds nothing
        await unharmed(swarm, 1)
    assert all(node.status["void"].count(void) == 1 for node in nodes)
    assert all("signed two deltas" in node.log for node in nodes)


async def test_a_round_of_the_far_future_is_refused_and_races_nobody(swarm: LocalNodes) -> None:
    """What no clock can have reached is blamed; what one might have moves the honest nowhere."""
    nodes = list(swarm.nodes.values())
    async with Member(swarm.manifest) as mallory:
        await mallory.link(*everywhere(swarm))
        await mallory.publish(mallory.delta(1_000_000))
        for node in nodes:
            await until_blamed(swarm, mallory.identity, node)
        before = max(node.status["clock"] for node in nodes)
        for claimed in (2**31 - 1, before + 500):
            await mallory.present(round=claimed)
            await mallory.publish(mallory.delta(before + 1000))
            await unharmed(swarm, 4)
        await mallory.present(leaving=True)
    assert max(node.status["clock"] for node in nodes) < before + 400


async def test_a_chunk_that_is_not_what_its_hash_says_is_not_taken(swarm: LocalNodes) -> None:
    """Neither of its own delta, which is then merged nowhere, nor of honest ones: those come from others."""
    nodes = list(swarm.nodes.values())
    async with Member(swarm.manifest) as mallory, Member(swarm.manifest) as friend:
        mallory.serve = lambda blob: os.urandom(len(mallory.chunks.get(blob, b"x" * 1000)))
        mallory.on_seen = lambda delta, address: [msg.Have((delta.record_id,))]
        await mallory.link(*everywhere(swarm))
        delta = mallory.delta(nodes[0].status["clock"] + 1)
        await mallory.publish(delta)
        await swarm.until(lambda: len(mallory.answers) >= 3, 60, "it is asked, and answers")
        await unharmed(swarm, missing=1)
        assert set(mallory.answers) <= {400, 409}
        # Its links may have been cut by now, for lies enough. Anybody may bring the true one.
        friend.chunks.update(mallory.chunks)
        await friend.link(*everywhere(swarm))
        await friend.say(msg.Have((delta.record_id,)))
        await unharmed(swarm)
        await swarm.until(lambda: 204 in friend.answers, 60, "its answer has come")
        assert set(friend.answers) <= {204, 409}
