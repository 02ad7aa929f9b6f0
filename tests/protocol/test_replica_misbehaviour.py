"""Whole cores: nothing a peer signs, says or asks gets in the way of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import Offence
from gossamer.protocol.identity import short
from gossamer.protocol.records import RecordKind, seal
from gossamer.protocol.unix_time import UnixTime
from tests.protocol import builders
from tests.protocol.cores import conflicting, swarm
from tests.protocol.wiring import Node, World

# --- equivocators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(0, 1), (0, 1, 2)])
def test_an_equivocator_is_voided_everywhere(seed, pieces):
    """Each node hears another of its records first."""
    world = swarm(seed, 4)
    liar = builders.identity(66)
    pair = conflicting(world, liar, 3)
    world.publish(world.nodes[0], 3)
    world.run(1.0)
    for number in range(4):
        node = world.nodes[number]
        delta, payload = pair[pieces[number % len(pieces)]]
        node.blobs[delta.body.chunks[0]] = payload
        world.inject(node, next(iter(node.links)), msg.encode(msg.Records(((delta.data, False),))))
    world.run(30.0, world.agree)
    world.run(15.0)
    assert world.agree()
    for node in world.running():
        assert list(node.core.ledger.voided()) == [(liar.node_id, 3)]
        assert node.held() == {d.record_id for d in node.core.ledger.valid(3)}
        assert len(node.held()) == 1 and node.core.merges.waiting(3) == [3]
        said = f"{short(liar.node_id)} signed two deltas for round 3: both are void"  # nobody has its row
        assert said in node.notices
        assert not node.core.fetcher.wants


# --- what a peer may send ---------------------------------------------------------------------------


def _state(node: Node) -> tuple:
    core = node.core
    return (core.ledger.digests.root, len(core.ledger), core.own_record.age, core.clock, len(node.disk))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_malformed_bytes_cost_a_blame_and_nothing_else(data):
    world = World(1)
    world.add(0)
    world.add(1, [0])
    world.run(3.0)
    node = world.nodes[1]
    link = next(iter(node.links))
    before = _state(node)
    wrong = data.draw(st.binary(max_size=100))
    if data.draw(st.booleans()):
        good = bytearray(msg.encode(msg.RosterSummary(((bytes(32), 1, 1),) * 3, answer=True)))
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
        wrong = bytes(good)
    try:
        msg.decode(wrong)
    except Exception:
        effects = world.inject(node, link, wrong)
        assert [type(e) for e in effects] == [fx.Blame, fx.Hangup]
        assert effects[0].link == effects[1].link == link
        assert effects[0].reason.isprintable()
    assert _state(node) == before


def _bad_envelopes(world: World) -> dict[str, bytes]:
    stranger = builders.identity(66)
    delta, _ = builders.random_delta(np.random.default_rng(0), stranger, 3, of=world.manifest)
    other = builders.manifest(name="another")
    far, _ = builders.random_delta(np.random.default_rng(0), stranger, 2**31 - 1, of=world.manifest)
    exact, _ = builders.random_delta(np.random.default_rng(0), stranger, 3, of=world.manifest, codec="exact")
    return {
        "another codec": exact.data,
        "bad signature": delta.data[:-1] + bytes([delta.data[-1] ^ 1]),
        "another swarm": builders.random_delta(np.random.default_rng(0), stranger, 3, of=other)[0].data,
        "another kind": b"\x02" + delta.data[1:],
        "unknown kind": b"\x09" + delta.data[1:],
        "implausible round": far.data,
        "body of garbage": seal(stranger, RecordKind.DELTA, world.manifest.swarm_id, b"garbage").data,
        "row of garbage": seal(stranger, RecordKind.MEMBER, world.manifest.swarm_id, b"garbage").data,
        "small-order key": b"\x01" + (1).to_bytes(32, "little") * 2 + bytes(32) + b"body",
    }


OFFENCES = {
    "another codec": Offence.RELAYED,
    "bad signature": Offence.SIGNATURE,
    "another swarm": Offence.SIGNATURE,
    "another kind": Offence.SIGNATURE,
    "unknown kind": Offence.RECORD,
    "implausible round": Offence.IMPLAUSIBLE,
    "body of garbage": Offence.RELAYED,
    "row of garbage": Offence.RELAYED,
    "small-order key": Offence.SIGNATURE,
}


@pytest.mark.parametrize("what", sorted(_bad_envelopes(World(0))))
def test_a_record_that_does_not_hold_costs_a_blame_and_is_not_relayed(seed, what):
    world = swarm(seed, 3)
    node = world.nodes[1]
    link = next(iter(node.links))
    before = _state(node)
    good = builders.row(builders.identity(77)).data
    bad = _bad_envelopes(world)[what]
    entries = ((bad, True), (good, False))
    effects = world.inject(node, link, msg.encode(msg.Records(entries)))
    assert [type(e) for e in effects[:1]] == [fx.Blame]
    assert effects[0].reason.isprintable()
    assert effects[0].offence is OFFENCES[what]
    assert _state(node) == before
    assert node.core.roster.get(builders.identity(77).node_id) is not None, (
        "what else is in the message counts"
    )
    world.now = node.core.presence.deadline()
    effects += world.handle(node, ev.Wake())
    messages = [e.message for e in effects if isinstance(e, fx.Send)]
    relayed = [entry for message in messages if isinstance(message, msg.Records) for entry in message.entries]
    assert (good, False) in relayed
    assert bad not in [data for data, _ in relayed]


def test_a_node_that_slept_takes_what_the_swarm_did_meanwhile_once_it_knows_the_time(seed):
    """Its monotonic clock stood still, and so the rounds of hours seem to lie in the future."""
    world = swarm(seed, 2)
    awake, slept = world.nodes[0], world.nodes[1]
    right = slept.core._unix_time.offset_s
    slept.core._unix_time = slept.core._clock._unix_time = UnixTime(right - 8 * 3600.0)
    world.publish(awake)
    world.run(30.0)
    assert (len(awake.core.ledger), len(slept.core.ledger)) == (1, 0)
    world.handle(slept, ev.TimeSet(right))
    world.run(30.0, world.agree)
    assert len(slept.core.ledger) == 1


def test_an_implausible_record_does_not_go_round_between_two_nodes(seed):
    """One accepts it and the other, whose clock is behind, does not: once per exchange, not for ever."""
    world = swarm(seed, 2)
    a, b = world.nodes[0], world.nodes[1]
    b.core._clock._unix_time = UnixTime(b.core._unix_time.offset_s - 10**6)
    rng = np.random.default_rng(0)
    far, payload = builders.random_delta(rng, builders.identity(66), 9, of=world.manifest)
    a.blobs[far.body.chunks[0]] = payload
    world.inject(a, next(iter(a.links)), msg.encode(msg.Records(((far.data, True),))))
    before = world.messages
    world.run(60.0)
    assert len(a.core.ledger) == 1
    assert len(b.core.ledger) == 0
    assert world.messages - before < 400
    assert 1 <= len(b.blames) <= 30


def test_asking_for_a_chunk_on_the_wrong_side_of_a_link(seed):
    world = swarm(seed, 2)
    server, client = world.nodes[0], world.nodes[1]
    ask = msg.encode(msg.Want(bytes(32)))
    (link,) = server.links
    assert [type(e) for e in world.inject(server, link, ask)] == [fx.Blame]
    (link,) = client.links
    assert world.inject(client, link, ask) == [fx.Put(link, bytes(32))]


def test_events_of_links_that_are_gone_or_unknown_are_ignored(seed):
    world = swarm(seed, 2)
    node = world.nodes[0]
    before = _state(node)
    ping = msg.encode(msg.Ping(1))
    for event in (
        ev.Received(999, ping),
        ev.Received(999, b"garbage"),
        ev.LinkDown(999),
        ev.ChunkFailed(999, bytes(32)),
        ev.ChunkArrived(bytes(32)),
        ev.DialFailed("nowhere:1"),
    ):
        assert world.handle(node, event) == []
    assert _state(node) == before


def test_a_turned_away_peer_is_told_whom_else_to_ask(seed):
    world = swarm(seed, 3)
    node = world.nodes[0]
    for number in range(limits.LINKS_MAX + 5):
        effects = node.core.handle(ev.LinkUp(5000 + number, bytes([number]) * 32, False, None), world.now)
    (hangup,) = [e for e in effects if isinstance(e, fx.Hangup)]
    assert hangup.link == 5000 + number
    rows = [data for e in effects if isinstance(e, fx.Send) for data, _ in e.message.entries]
    assert len(rows) == 3
    assert effects.index(hangup) == len(effects) - 1, "after what it should still get"


def test_what_a_peer_signed_itself_is_a_graver_offence_than_what_it_relays(seed):
    world = swarm(seed, 2)
    node, author = world.nodes[0], world.nodes[1]
    link = next(iter(node.links))
    row_of_garbage = seal(author.core.identity, RecordKind.MEMBER, world.manifest.swarm_id, b"garbage").data
    effects = world.inject(node, link, msg.encode(msg.Records(((row_of_garbage, False),))))
    assert [effect.offence for effect in effects] == [Offence.RECORD]
