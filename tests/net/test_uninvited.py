"""An invited swarm and those whom it did not invite, or no longer wants: what they hear, and what counts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from gossamer.bootstrap.invites import invite, revoke
from gossamer.node.daemon.network.links import PREFIX, SESSION_HEADER
from gossamer.node.daemon.network.rpc import ASK_HEADER, deliver, fingerprint_at
from gossamer.node.daemon.network.sockets import client_context
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import Role
from gossamer.protocol.access.handshake import HELLO_BYTES_MAX, ClientHandshake, ask
from gossamer.protocol.fixedpoint import ONE
from gossamer.protocol.identity import Identity
from gossamer.protocol.records import Claim
from gossamer.protocol.wire import unpack
from tests.net.attacker import Member, knock, refused, where
from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.protocol.builders import row, turns_nobody_away

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OWNER = Identity.from_seed(os.urandom(32))
BYTES_FOR_A_STRANGER = 1024
"""Most that a handshake may say to somebody who is turned away, reason included."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalNodes]:
    """Three nodes that their owner has invited, and that train."""
    admission = {"mode": "invited", "owners": (OWNER.public_key.hex(),)}
    manifest, phi = small_manifest(admission=admission)
    base = tmp_path_factory.mktemp("invited")
    async with LocalNodes(base, manifest, phi, owner=OWNER) as nodes:
        honest = await nodes.grow(3)
        yield nodes
        assert not any("Traceback" in node.log for node in honest)


def anybody() -> Identity:
    return Identity.from_seed(os.urandom(32))


def granted(
    swarm: LocalNodes, to: Identity, *, by: Identity = OWNER, role: Role = Role.TRAIN, seconds: float = 0
) -> bytes:
    """A grant's envelope; for ever if no seconds are given."""
    swarm_id = swarm.manifest.swarm_id
    invitation = invite(by, swarm_id, to.node_id, role=role, days=seconds / 86400, contacts=())
    return invitation.grant.data


async def unharmed(swarm: LocalNodes, rounds: int = 2) -> int:
    """The honest make more rounds, then rest on the same bits; returns how many deltas they published."""
    await swarm.go_on(rounds)
    return sum(len(node.puppet.rounds) for node in swarm.nodes.values() if node.puppet is not None)


async def until_linked(swarm: LocalNodes, node: LocalNode, to: bytes, linked: bool) -> None:
    def holds() -> bool:
        return linked == any(link["node_id"] == to.hex() for link in node.status["links"])

    await swarm.until(holds, 15, f"{node.name} {'linked to' if linked else 'rid of'} {to.hex()[:8]}")


# -- at the door


async def test_a_stranger_hears_why_and_learns_nothing(swarm: LocalNodes) -> None:
    """Every byte it gets, at every door: no record, no row, no manifest, no chunk."""
    await swarm.agree()
    node = swarm.nodes["n0"]
    address, stranger = where(node), anybody()
    swarm_id = swarm.manifest.swarm_id

    def hello(challenge: bytes, binding: bytes) -> bytes:
        return ClientHandshake(
            stranger, swarm_id, binding, os.urandom(32), None, vet=turns_nobody_away
        ).hello(challenge)

    heard = await knock(address, hello)
    accepted, reason = unpack(heard[1], HELLO_BYTES_MAX)
    assert len(heard) == 2 and accepted is False
    assert "lets in invited nodes only" in reason and stranger.node_id.hex() in reason
    # What a member would send first, without a hello.
    heard += await knock(address, lambda *_: msg.encode(msg.Digest(0, (), whole=True)))
    heard += await knock(address, lambda *_: msg.encode(msg.RosterSummary((), False)))
    assert sum(map(len, heard)) < BYTES_FOR_A_STRANGER

    binding = await fingerprint_at(address)
    genesis = swarm.manifest.genesis.digest
    async with aiohttp.ClientSession() as http:
        for path in ("manifest", "status", "status?digest=1&up_to=3", f"chunk/{genesis}"):
            where_ = f"{PREFIX}/{path}"
            own = ask(stranger, swarm_id, binding, time.time(), where_, b"")
            elsewhere = ask(node.home.identity(), swarm_id, bytes(32), time.time(), where_, b"")
            old = ask(node.home.identity(), swarm_id, binding, time.time() - 1000, where_, b"")
            for question in (None, b"", b"\xc0", own, elsewhere, old):
                headers = {SESSION_HEADER: "00" * 32}
                if question is not None:
                    headers[ASK_HEADER] = question.hex()
                url = f"https://{address}{where_}"
                async with http.get(url, headers=headers, ssl=client_context()) as answer:
                    body = await answer.read()
                    assert answer.status == 403 and len(body) < 200
                    heard += [body, repr(answer.raw_headers).encode()]
        url = f"https://{address}{PREFIX}/chunk/{genesis}"
        async with http.put(url, data=b"x", ssl=client_context()) as answer:
            assert answer.status == 403
    store = RecordStore(node.home.ledger_path, swarm_id)
    records = [delta.data for delta in store.load(swarm.manifest.plan())]
    store.close()
    everything = b"".join(heard)
    assert len(records) >= 6
    assert not any(record in everything for record in records)
    assert not any(other.home.identity().public_key in everything for other in list(swarm.nodes.values())[1:])
    assert swarm.manifest.canonical()[:64] not in everything
    swarm.train_on()
    await unharmed(swarm)
    swarm.train_on()


async def test_an_invitation_that_runs_out_while_linked_ends_the_link(swarm: LocalNodes) -> None:
    node = swarm.nodes["n0"]
    async with Member(swarm.manifest) as guest:
        guest.credential = granted(swarm, guest.identity, seconds=3)
        await guest.link(where(node))
        await until_linked(swarm, node, guest.identity.node_id, True)
        await until_linked(swarm, node, guest.identity.node_id, False)
        assert not guest.links
        assert "ran out" in await refused(where(node), swarm.manifest, guest.identity, guest.credential)


async def test_a_member_cannot_invite(swarm: LocalNodes) -> None:
    """Neither by a grant nor by rows and deltas of those it would like to bring."""
    node = swarm.nodes["n0"]
    async with Member(swarm.manifest) as member, Member(swarm.manifest) as friend:
        member.credential = granted(swarm, member.identity)
        await member.link(where(node))
        grant = granted(swarm, friend.identity, by=member.identity)
        delta = friend.delta(node.status["clock"] + 1)
        friends = row(friend.identity, of=swarm.manifest, claims=(Claim(8, 2**59, bytes(32), bytes(32)),))
        await member.say(msg.Records(((grant, False), (friends.data, False), (delta.data, True))))
        name = f"{member.identity.node_id[:4].hex()} misbehaved"
        await swarm.until(lambda: name in node.log, 5, "blamed for the grant")
        published = await unharmed(swarm)
        for other in swarm.nodes.values():
            assert other.status["records"] == published
            assert friend.node_id not in {known["node_id"] for known in other.status["members"]}
        assert "lets in" in await refused(where(node), swarm.manifest, friend.identity, b"")
    swarm.train_on()


async def test_what_an_observer_publishes_counts_nowhere(swarm: LocalNodes) -> None:
    async with Member(swarm.manifest) as observer:
        observer.credential = granted(swarm, observer.identity, role=Role.OBSERVE)
        await observer.link(*map(where, swarm.nodes.values()))
        clock = swarm.nodes["n0"].status["clock"]
        for ahead in range(4):
            await observer.publish(observer.delta(clock + ahead))
        published = await unharmed(swarm)
        assert all(node.status["records"] == published for node in swarm.nodes.values())
        assert not observer.asked, "nobody fetched its payload"
        assert len(observer.links) == 3, "and it may go on reading"
    swarm.train_on()


# -- out again


async def test_a_revoked_member_is_cut_off_and_what_it_signed_later_is_void(swarm: LocalNodes) -> None:
    """Also on a node that was down when it was revoked, and whoever brings its records."""
    first, second, third = swarm.nodes.values()
    swarm_id = swarm.manifest.swarm_id
    async with Member(swarm.manifest) as traitor, Member(swarm.manifest) as friend:
        for member in (traitor, friend):
            member.credential = granted(swarm, member.identity)
            await member.link(*map(where, swarm.nodes.values()))
        clock = max(node.status["clock"] for node in swarm.nodes.values())
        deltas = [traitor.delta(clock + ahead) for ahead in range(1, 6)]
        for delta in deltas:
            await traitor.publish(delta)
        published = await unharmed(swarm, 6)
        assert all(node.status["records"] == published + 5 for node in swarm.nodes.values())
        before = first.status["phi_digest"]

        third.signal(signal.SIGKILL)
        assert third.child is not None
        await asyncio.to_thread(third.child.end, 5)
        third.home.daemon_path.unlink()
        order = revoke(OWNER, swarm_id, traitor.identity.node_id, last_round=clock + 2, reason="a test")
        await deliver(where(first), order)
        for node in (first, second):
            await until_linked(swarm, node, traitor.identity.node_id, False)
            said = await refused(where(node), swarm.manifest, traitor.identity, traitor.credential)
            assert "was revoked" in said and "a test" in said
        third.status = {}
        third.start()
        await swarm.until(lambda: bool(third.status), 30, "the third is back")
        swarm.train_on()
        await swarm.until(lambda: "was revoked by an owner" in third.log, 30, "it has heard of it")
        late = traitor.delta(clock + 20)
        await friend.say(msg.Records(((late.data, True), (deltas[-1].data, True))))
        published = await unharmed(swarm)
        for node in swarm.nodes.values():
            assert node.status["records"] == published + 2, "the earlier two are kept, the later gone"
            members = [member["node_id"] for member in node.status["members"]]
            assert traitor.node_id not in members
            said = await refused(where(node), swarm.manifest, traitor.identity, traitor.credential)
            assert "was revoked" in said
        assert first.status["phi_digest"] != before
    swarm.train_on()


async def test_one_key_cannot_end_a_swarm_that_rests(swarm: LocalNodes) -> None:
    """Alone in their rounds its deltas are clipped by nothing; the model is of no use until they are void."""
    nodes = list(swarm.nodes.values())
    puppets = [node.puppet for node in nodes if node.puppet is not None]
    await unharmed(swarm)
    before = nodes[0].status["phi_digest"]
    async with Member(swarm.manifest) as traitor:
        traitor.credential = granted(swarm, traitor.identity)
        await traitor.link(*map(where, nodes))
        clock = max(node.status["clock"] for node in nodes)
        for round_ in range(clock + 1, clock + 9):
            slots = swarm.manifest.plan().of_round(round_).slots
            large = [np.full(slot.numel, 31 * ONE, dtype=np.int32) for slot in slots]
            await traitor.publish(traitor.delta(round_, large))
        said = f"of {traitor.node_id[:8]}; nothing is published until"
        await swarm.until(lambda: all(said in node.log for node in nodes), 60, "all say whose doing it is")
        published = [len(puppet.rounds) for puppet in puppets]
        swarm.train_on()
        await asyncio.sleep(3.0)  # thirty steps
        assert [len(puppet.rounds) for puppet in puppets] == published
        await swarm.agree()
        assert nodes[0].status["phi_digest"] != before
        swarm_id, node_id = swarm.manifest.swarm_id, traitor.identity.node_id
        await deliver(where(nodes[0]), revoke(OWNER, swarm_id, node_id, last_round=clock, reason="a test"))
        await swarm.until(
            lambda: all(node.status["phi_digest"] == before for node in nodes), 30, "the model is back"
        )
    swarm.train_on()
    await unharmed(swarm)
    swarm.train_on()


async def test_a_revoked_node_ends_and_says_why(swarm: LocalNodes) -> None:
    """With exit status 2, which tells the supervisor not to start it again; and so at the next start."""
    node = await swarm.add("n3", ["n0"])
    node.train(0.1)
    await swarm.until(lambda: node.status.get("round", 0) >= 2, 30, "it trains")
    last = node.status["clock"] + 1000
    order = revoke(
        OWNER, swarm.manifest.swarm_id, node.home.identity().node_id, last_round=last, reason="moved"
    )
    await deliver(where(swarm.nodes["n0"]), order)
    clear = "an owner of this swarm has revoked this node: moved"
    assert node.child is not None and node.puppet is not None
    assert await asyncio.to_thread(node.child.wait, 20) == 2
    await node.puppet.stop()
    assert clear in node.log.splitlines()[-1] and "Traceback" not in node.log
    node.start()
    assert await asyncio.to_thread(node.child.wait, 20) == 2
    said: Any = node.log.splitlines()[-1]
    assert "revoked" in said and "moved" in said
    del swarm.nodes["n3"]
    await unharmed(swarm)
