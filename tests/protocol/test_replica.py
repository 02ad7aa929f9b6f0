"""Whole cores, joined in memory: every record reaches everybody, and nothing a peer does gets in the way."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.protocol import effects as fx
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.envelope import Kind, seal
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.greylist import Offence
from gossamer.protocol.history import Claim
from gossamer.protocol.identity import Identity
from gossamer.protocol.payload import encode_payload
from gossamer.protocol.presence import NodeInfo
from gossamer.protocol.replica import Replica
from gossamer.protocol.unix_time import UnixTime
from gossamer.protocol.wire import pack
from tests.protocol import builders
from tests.protocol.wiring import Node, Weather, World

STORM = Weather(loss=0.05, duplicates=0.2, reorders=True, delay=(0.005, 0.4))

BRISK = builders.manifest(pace={"every_steps": 4, "min_round_seconds": 0.05})


def _swarm(seed: int, count: int, weather: Weather | None = None, of=builders.SMALL) -> World:
    world = World(seed, of, weather)
    for number in range(count):
        world.add(number, [0] if number else [])
    world.run(12.0)
    return world


def _check(world: World) -> None:
    """What holds at any quiet time: Ready told exactly what is held, and no honest node was blamed."""
    for node in world.running():
        assert node.ready == node.held()
        assert not node.core.fetcher.wants
        assert not node.blames


# --- everything reaches everybody -------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_records_reach_all_through_loss_duplicates_and_disorder(seed, count):
    world = _swarm(seed, count, STORM, BRISK)
    for node in world.running():
        world.train(node, world.rng.uniform(0.2, 1.0), world.now + 20.0)
    world.run(20.0)
    world.run(400.0, world.agree)  # a lost Ask costs the time-out of a fetch
    assert world.agree()
    _check(world)
    ledger = world.nodes[0].core.ledger
    assert {d.author for d in ledger} == {n.identity.node_id for n in world.running()}
    assert len(ledger) == sum(
        len([d for d in n.disk if d.author == n.identity.node_id]) for n in world.running()
    )


def test_pushed_records_arrive_in_a_second(seed):
    world = _swarm(seed, 8)
    world.publish(world.nodes[5])
    world.run(0.5)
    assert {len(node.core.ledger) for node in world.running()} == {1}
    world.run(3.0, world.agree)
    assert world.agree()
    _check(world)


def test_a_joiner_gets_a_long_history_at_once(seed):
    """Thousands of records, which are many anti-entropy rounds' worth: not one per ten seconds."""
    world = World(seed, builders.manifest(fragments=1))
    old = world.add(0)
    blank = encode_payload("int8", old.core.layout.fragments[0], _zeros(old))
    body = builders.body_of(blank, "int8", 1, 1)
    history = [
        builders.signed(builders.identity(50 + author), replace(body, round=r, base=r - 1), world.manifest)
        for r in range(1, 601)
        for author in range(3)
    ]
    old.disk += history
    old.blobs[body.chunks[0]] = blank
    world.restart(old)
    joiner = world.add(1, [0])
    took = world.run(30.0, world.agree)
    assert len(joiner.core.ledger) == len(history)
    assert took < 5.0
    assert world.run(5.0, lambda: joiner.core.caught_up) < 1.0
    _check(world)


def _zeros(node: Node) -> list[np.ndarray]:
    fragment = node.core.layout.fragments[0]
    return [np.zeros(slot.numel, dtype=np.int32) for slot in fragment.slots]


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_any_weather(seed):
    dice = random.Random(seed)
    weather = Weather(
        loss=dice.choice([0.0, 0.05, 0.2]),
        duplicates=dice.choice([0.0, 0.3]),
        reorders=dice.random() < 0.5,
        delay=(0.001, dice.choice([0.01, 0.3, 1.0])),
    )
    world = World(seed, BRISK, weather)
    count = dice.randint(2, 5)
    for number in range(count):
        world.add(number, [0] if number else [], dialable=number == 0 or dice.random() < 0.7)
        world.run(dice.uniform(0.0, 2.0))
    for node in world.running():
        world.train(node, dice.uniform(0.2, 3.0), world.now + 15.0)
    world.run(15.0)
    world.run(300.0, world.agree)
    assert world.agree()
    _check(world)


# --- partitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "seconds"), [(2, 100.0), (6, 50.0), (14, 50.0)])
def test_a_partition_heals_within_40_seconds(seed, count, seconds):
    """Both sides go on by themselves. With 14, each side has links enough without the other."""
    world = _swarm(seed, count, of=BRISK)
    half = count // 2
    world.partition(range(half), range(half, count))
    for node in world.running():
        world.train(node, 0.4 * half, world.now + seconds)
    world.run(seconds)
    assert len(world.roots()) > 1
    for node in world.running():
        assert len(node.core.roster.live()) == (half if node.number < half else count - half) - 1
    world.heal()
    world.run(40.0, world.agree)
    assert world.agree()
    _check(world)
    authors = {d.author for d in world.nodes[0].core.ledger}
    assert len(authors) == count, "the work of both sides counts"


def test_halves_without_any_link_between_them_find_each_other(seed):
    """The partition outlasts every link; down members are redialled, the bootstrap address too."""
    world = _swarm(seed, 8)
    world.partition(range(4), range(4, 8))
    world.run(300.0)
    for a in range(4):
        for b in range(4, 8):
            assert world.nodes[a].core.links.to(world.nodes[b].identity.node_id) is None
    world.publish(world.nodes[0], 1)
    world.publish(world.nodes[7], 1)
    world.run(1.0)
    world.heal()
    world.run(40.0, world.agree)
    assert world.agree()
    assert len(world.nodes[3].core.ledger) == 2


def test_three_way_partition_and_two_heals(seed):
    world = _swarm(seed, 6)
    world.partition((0, 1), (2, 3), (4, 5))
    world.run(30.0)
    for number in range(6):
        world.publish(world.nodes[number], 1 + number % 2)
    world.run(1.0)
    world.partition((0, 1, 2, 3), (4, 5))
    world.run(40.0)
    assert world.nodes[0].core.ledger.digests.root == world.nodes[3].core.ledger.digests.root
    assert len(world.nodes[0].core.ledger) == 4
    world.heal()
    world.run(40.0, world.agree)
    assert world.agree()
    assert len(world.nodes[5].core.ledger) == 6


# --- equivocators -----------------------------------------------------------------------------------


def _pair(world: World, author: Identity, round_: int) -> list:
    """Different records of one author and round, and their payloads."""
    rng = np.random.default_rng(round_)
    return [builders.random_delta(rng, author, round_, of=world.manifest) for _ in range(3)]


@pytest.mark.parametrize("pieces", [(0, 1), (0, 1, 2)])
def test_an_equivocator_is_voided_everywhere(seed, pieces):
    """Each node hears another of its records first."""
    world = _swarm(seed, 4)
    liar = builders.identity(66)
    pair = _pair(world, liar, 3)
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
        assert node.ready == {d.record_id for d in node.core.ledger.valid(3)}
        assert len(node.ready) == 1
        assert any("signed two deltas for round 3" in text for text in node.notices)
        assert not node.core.fetcher.wants


def test_a_round_that_loses_a_record_is_announced_for_merging(seed):
    world = _swarm(seed, 2)
    node = world.nodes[1]
    (first, payload), (second, _), (third, _) = _pair(world, builders.identity(66), 3)
    link = next(iter(node.links))
    node.blobs[first.body.chunks[0]] = payload

    def give(delta) -> list[fx.Ready]:
        effects = world.inject(node, link, msg.encode(msg.Records(((delta.data, False),))))
        return [e for e in effects if isinstance(e, fx.Ready)]

    assert [e.delta for e in give(first)] == [first]
    assert [e.delta.round for e in give(second)] == [3]
    assert node.core.ledger.valid(3) == []
    assert give(third) == []
    assert give(first) == []


# --- restarts ---------------------------------------------------------------------------------------


def test_a_restarted_node_continues_and_never_signs_a_round_twice(seed):
    world = _swarm(seed, 3, of=BRISK)
    for node in world.running():
        world.train(node, 0.3, math.inf)
    node = world.nodes[2]
    for _ in range(6):
        world.run(world.rng.uniform(3.0, 6.0))
        world.crash(node)
        world.run(world.rng.uniform(0.0, 10.0))
        world.restart(node)
        assert not node.core.caught_up, "its disk may be an old copy: it compares notes first"
        world.run(5.0)
        assert node.core.caught_up
        world.train(node, 0.3, math.inf)
    world.run(5.0)
    for other in world.running():
        other.life += 1  # stops training
    world = _settled(world)
    assert list(world.nodes[0].core.ledger.voided()) == []
    mine = [d for d in node.disk if d.author == node.identity.node_id]
    assert len({d.round for d in mine}) == len(mine) >= 6
    _check(world)


def _settled(world: World) -> World:
    for node in world.running():
        node.wake_at = math.inf
        world._set_timer(node)
    for node in world.running():
        for link in list(node.links):
            world._close(node, link)
    world.run(60.0, world.agree)
    assert world.agree()
    return world


def test_publishing_a_round_again_is_refused(seed):
    world = World(seed)
    node = world.add(0)
    world.publish(node, 5)
    world.run(1.0)
    for round_ in (5, 4, 1):
        world.publish(node, round_)
    world.run(1.0)
    assert [d.round for d in node.disk] == [5]
    assert "not signing round 5 again" in node.notices[0]
    world.crash(node)
    world.restart(node)
    assert node.core.own_last == 5
    world.publish(node, 5)
    world.publish(node, 6)
    world.run(1.0)
    assert [d.round for d in node.disk] == [5, 6]
    assert node.disk[1].body.previous == node.disk[0].record_id


def test_a_round_is_not_signed_twice_while_the_first_is_being_stored(seed):
    world = World(seed)
    node = world.add(0)
    first = _publish_effects(world, node, 5)
    assert [type(e) for e in first if isinstance(e, fx.Store | fx.Send | fx.Ready)] == [fx.Store]
    second = _publish_effects(world, node, 5)
    assert not [e for e in second if isinstance(e, fx.Store)]


def _publish_effects(world: World, node: Node, round_: int, **changes: object) -> list[fx.Effect]:
    payload = b"x" * 100
    body = builders.body_of(payload, "int8", round_, len(node.core.layout.fragments), **changes)
    return node.core.handle(fx.Publish(body), world.now)


def test_nothing_is_said_of_our_record_before_it_is_stored(seed):
    """Write before you speak."""
    world = _swarm(seed, 3)
    node = world.nodes[1]
    (store,) = _publish_effects(world, node, 1)
    assert isinstance(store, fx.Store)
    assert store.own
    assert len(node.core.ledger) == 0
    said = node.core.handle(fx.Stored(store.delta), world.now)
    assert any(isinstance(e, fx.Send) and isinstance(e.message, msg.Records) for e in said)
    assert fx.Ready(store.delta) in said


def test_a_backup_that_was_put_back_signs_nothing_before_it_knows_what_it_signed(seed):
    world = _swarm(seed, 3, of=BRISK)
    node = world.nodes[1]
    for round_ in range(1, 20):
        world.publish(node, round_)
        if round_ == 10:
            world.run(1.0)
            backup = list(node.disk)
    world.run(1.0)
    world.run(20.0, world.agree)
    world.crash(node)
    world.partition([0, 2], [1])
    world.restart(node, backup=backup)
    assert node.core.own_last == 10
    world.run(5 * limits.RESUME_PATIENCE_S)
    assert not node.core.caught_up, "nobody is there who could tell"
    world.heal()
    world.run(60.0, lambda: node.core.caught_up)
    assert node.core.caught_up
    assert node.core.own_last == 19


def test_a_node_that_lost_its_disk_learns_all_its_rounds_before_it_trains(seed):
    """Its key is the same: one more delta for a round it has forgotten would make it an equivocator."""
    world = _swarm(seed, 3, of=BRISK)
    node = world.nodes[1]
    for round_ in range(1, 300):
        world.publish(node, round_)
    world.run(1.0)
    world.run(20.0, world.agree)
    assert len(world.nodes[0].core.ledger) == 299
    world.crash(node)
    world.restart(node, keep_disk=False)
    assert node.core.own_last == 0
    assert not node.core.caught_up
    world.run(60.0, lambda: node.core.caught_up)
    assert node.core.caught_up
    assert node.core.own_last == 299


def test_restore_tells_what_is_ready_and_fetches_the_rest(seed):
    world = _swarm(seed, 2)
    for round_ in range(1, 6):
        world.publish(world.nodes[0], round_)
    world.run(1.0)
    world.run(20.0, world.agree)
    node = world.nodes[1]
    lost = node.disk[2].body.chunks[0]
    world.crash(node)
    del node.blobs[lost]
    world.restart(node)
    assert len(node.ready) == 4
    world.run(20.0, world.agree)
    assert len(node.ready) == 5
    _check(world)


def test_restoring_a_void_round_gives_nothing_to_merge(seed):
    world = World(seed)
    node = world.add(0)
    pair = _pair(world, builders.identity(66), 3)
    node.disk += [delta for delta, _ in pair[:2]]
    for delta, payload in pair[:2]:
        node.blobs[delta.body.chunks[0]] = payload
    world.restart(node)
    assert node.ready == node.held() == set()
    assert not node.core.fetcher.wants


# --- caught up --------------------------------------------------------------------------------------


def test_the_first_node_may_train_at_once(seed):
    assert World(seed).add(0).core.caught_up


def test_a_joiner_may_train_once_it_has_seen_a_ledger_and_has_its_payloads(seed):
    world = World(seed)
    old = world.add(0)
    for round_ in range(1, 30):
        world.publish(old, round_)
    world.run(5.0)
    joiner = world.add(1, [0])
    assert not joiner.core.caught_up
    world.run(30.0, lambda: joiner.core.caught_up)
    assert len(joiner.held()) == 29


def test_a_joiner_whose_bootstrap_peer_does_not_answer_waits(seed):
    world = World(seed)
    world.add(0)
    joiner = world.add(1, [7])
    world.run(60.0)
    assert not joiner.core.caught_up


def test_a_busy_swarm_does_not_keep_a_joiner_waiting(seed):
    """There is always a payload under way; it need not have those that came after it had joined."""
    world = _swarm(seed, 3, of=BRISK)
    for node in world.running():
        world.train(node, 0.2, math.inf)
    world.run(10.0)
    world.weather.delay = (0.3, 0.6)  # slower than the rounds
    joiner = world.add(3, [0])
    took = world.run(60.0, lambda: joiner.core.caught_up)
    assert joiner.core.caught_up
    assert took < 30.0


def test_a_payload_that_died_with_its_author_does_not_keep_joiners_from_training(seed):
    world = _swarm(seed, 3)
    author = world.nodes[2]
    world.publish(author, 1)
    author.blobs.clear()  # nobody ever gets it
    world.run(1.0)
    world.crash(author)
    joiner = world.add(3, [0])
    world.run(limits.ORPHAN_PATIENCE_S - 5.0)
    assert len(joiner.core.ledger) == 1
    assert not joiner.core.caught_up
    world.run(20.0)
    assert joiner.core.caught_up


def test_a_liar_that_claims_what_it_withholds_does_not_keep_joiners_from_training(seed):
    world = _swarm(seed, 3)
    liar = world.nodes[2]
    world.publish(world.nodes[0], 1)
    world.publish(liar, 1)
    liar.blobs.clear()  # nobody ever gets it
    world.run(1.0)
    honest, withheld = (
        next(delta.record_id for delta in liar.core.ledger if delta.author == node.core.identity.node_id)
        for node in (world.nodes[0], liar)
    )
    joiner = world.add(3, [0, 2])
    _insist(world, liar, withheld, limits.STALL_PATIENCE_S - 5.0)
    assert joiner.core.holds(honest)
    assert not joiner.core.caught_up
    _insist(world, liar, withheld, 10.0)
    assert not joiner.core.holds(withheld)
    assert joiner.core.caught_up


def _insist(world: World, liar: Node, record_id: bytes, seconds: float) -> None:
    """Claim to hold a payload again and again, at last just now."""
    for _ in range(int(seconds)):
        world.run(1.0)
        for link in list(liar.links):
            world._send(liar, link, msg.encode(msg.Holding((record_id,))))
    world.run(0.1)


def test_empty_swarm_of_two(seed):
    world = _swarm(seed, 2)
    assert world.nodes[0].core.caught_up
    assert world.nodes[1].core.caught_up


# --- what a peer may send ---------------------------------------------------------------------------


def _state(node: Node) -> tuple:
    core = node.core
    return (core.ledger.digests.root, len(core.ledger), core.own_row.age, core.clock, len(node.disk))


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
        good = bytearray(msg.encode(msg.Roster(((bytes(32), 1, 1),) * 3, answer=True)))
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
        "body of garbage": seal(stranger, Kind.DELTA, world.manifest.swarm_id, b"garbage").data,
        "row of garbage": seal(stranger, Kind.PEER, world.manifest.swarm_id, b"garbage").data,
        "small-order key": b"\x01" + (1).to_bytes(32, "little") * 2 + bytes(32) + b"body",
    }


OFFENCES = {
    "another codec": Offence.RELAYED,
    "bad signature": Offence.SIGNATURE,
    "another swarm": Offence.SIGNATURE,
    "another kind": Offence.SIGNATURE,
    "unknown kind": Offence.UNSUPPORTED,
    "implausible round": Offence.IMPLAUSIBLE,
    "body of garbage": Offence.RELAYED,
    "row of garbage": Offence.RELAYED,
    "small-order key": Offence.SIGNATURE,
}


@pytest.mark.parametrize("what", sorted(_bad_envelopes(World(0))))
def test_a_record_that_does_not_hold_costs_a_blame_and_is_not_relayed(seed, what):
    world = _swarm(seed, 3)
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
    effects += world.handle(node, fx.Wake())
    messages = [e.message for e in effects if isinstance(e, fx.Send)]
    relayed = [entry for message in messages if isinstance(message, msg.Records) for entry in message.entries]
    assert (good, False) in relayed
    assert bad not in [data for data, _ in relayed]


def test_a_node_that_slept_takes_what_the_swarm_did_meanwhile_once_it_knows_the_time(seed):
    """Its monotonic clock stood still, and so the rounds of hours seem to lie in the future."""
    world = _swarm(seed, 2)
    awake, slept = world.nodes[0], world.nodes[1]
    right = slept.core._unix_time.offset_s
    slept.core._unix_time = slept.core._clock._unix_time = UnixTime(right - 8 * 3600.0)
    world.publish(awake)
    world.run(30.0)
    assert (len(awake.core.ledger), len(slept.core.ledger)) == (1, 0)
    world.handle(slept, fx.TimeSet(right))
    world.run(30.0, world.agree)
    assert len(slept.core.ledger) == 1


def test_an_implausible_record_does_not_go_round_between_two_nodes(seed):
    """One accepts it and the other, whose clock is behind, does not: once per exchange, not for ever."""
    world = _swarm(seed, 2)
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


def test_a_clock_is_followed_forward_and_set_back_makes_nothing_impossible(seed):
    """A machine that boots in 1970 refuses all rounds, until its clock is set; set back, it refuses none."""
    core = _swarm(seed, 1).nodes[0].core
    right = core._unix_time.offset_s
    core._unix_time = core._clock._unix_time = UnixTime(-1e9)
    assert not core._clock.allows(100, now=0.0)
    core.handle(fx.TimeSet(right), 0.0)
    assert core._clock.allows(100, now=0.0)
    core.handle(fx.TimeSet(-1e9), 0.0)
    assert core._clock.allows(100, now=0.0)


def test_asking_for_a_chunk_on_the_wrong_side_of_a_link(seed):
    world = _swarm(seed, 2)
    server, client = world.nodes[0], world.nodes[1]
    ask = msg.encode(msg.Ask(bytes(32)))
    (link,) = server.links
    assert [type(e) for e in world.inject(server, link, ask)] == [fx.Blame]
    (link,) = client.links
    assert world.inject(client, link, ask) == [fx.Put(link, bytes(32))]


def test_events_of_links_that_are_gone_or_unknown_are_ignored(seed):
    world = _swarm(seed, 2)
    node = world.nodes[0]
    before = _state(node)
    ping = msg.encode(msg.Ping(1))
    for event in (
        fx.Received(999, ping),
        fx.Received(999, b"garbage"),
        fx.LinkDown(999),
        fx.ChunkFailed(999, bytes(32)),
        fx.ChunkArrived(bytes(32)),
        fx.DialFailed("nowhere:1"),
    ):
        assert world.handle(node, event) == []
    assert _state(node) == before


def test_a_turned_away_peer_is_told_whom_else_to_ask(seed):
    world = _swarm(seed, 3)
    node = world.nodes[0]
    for number in range(limits.LINKS_MAX + 5):
        effects = node.core.handle(fx.LinkUp(5000 + number, bytes([number]) * 32, False, None), world.now)
    (hangup,) = [e for e in effects if isinstance(e, fx.Hangup)]
    assert hangup.link == 5000 + number
    rows = [data for e in effects if isinstance(e, fx.Send) for data, _ in e.message.entries]
    assert len(rows) == 3
    assert effects.index(hangup) == len(effects) - 1, "after what it should still get"


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_a_peer_that_says_anything_cannot_break_a_core(seed):
    """Valid messages of random content from a member: no exception, no flood, and the swarm goes on."""
    dice = random.Random(seed)
    world = World(seed)
    for number in range(3):
        world.add(number, [0] if number else [])
    world.run(5.0)
    node = world.nodes[1]
    link = next(iter(node.links))
    ids = [n.identity.node_id for n in world.running()] + [bytes(32)]
    world.publish(world.nodes[0], 1)
    world.run(2.0)
    hashes = [*ids, *(d.record_id for d in node.core.ledger), *(b for b in node.blobs)]

    def some(count: int) -> tuple[bytes, ...]:
        return tuple(dice.choice(hashes) for _ in range(dice.randrange(count)))

    for _ in range(30):
        message = dice.choice(
            [
                msg.Holding(some(5)),
                msg.Compare(
                    dice.randrange(8), tuple((dice.randrange(2**31), h) for h in some(9)), dice.random() < 0.5
                ),
                msg.Inventory(tuple((dice.randrange(9), some(5)) for _ in range(5))),
                msg.Request(some(9)),
                msg.Roster(
                    tuple((h, dice.randrange(9), dice.randrange(9)) for h in some(9)), dice.random() < 0.5
                ),
                msg.Ping(dice.randrange(100)),
                msg.Ack(dice.randrange(100)),
                msg.PingFor(dice.randrange(100), dice.choice(hashes)),
                msg.Suspect(dice.choice(hashes), dice.randrange(9), dice.randrange(2**53)),
                msg.Ask(dice.choice(hashes)),
                msg.Decline(dice.choice(hashes)),
            ]
        )
        effects = world.inject(node, link, msg.encode(message))
        assert len(effects) <= 40
        world.run(dice.choice([0.0, 0.1, 3.0]))
    world.publish(world.nodes[2], 2)
    world.run(1.0)
    world.run(60.0, world.agree)
    assert world.agree()
    assert len(node.core.ledger) == 2


# --- our own side -----------------------------------------------------------------------------------


def test_a_diverged_loss_is_not_published_and_does_not_make_our_row_invalid(seed):
    """Others would refuse it, and take us for a liar."""
    world = _swarm(seed, 2)
    node = world.nodes[0]
    effects = _publish_effects(world, node, 1, loss=math.nan)
    assert [type(e) for e in effects] == [fx.Notice]
    assert node.core.own_last == 0, "the round is not lost"
    world.handle(node, fx.Progress(5, 100, math.inf, math.nan, "cpu"))
    world.run(10.0)
    _check(world)
    row = world.nodes[1].core.roster.get(node.identity.node_id).peer.body
    assert (row.inner_steps, row.loss) == (5, limits.LOSS_MAX)


@pytest.mark.parametrize(
    "changes", [{"name": "x" * 300}, {"name": "a\x1b[2J"}, {"name": "\udcfc"}, {"incarnation": -1}]
)
def test_a_node_that_others_would_refuse_does_not_start(changes):
    info = NodeInfo(**{"name": "n", "trains": True, "incarnation": 1, **changes})
    with pytest.raises(ConfigError, match="cannot present itself"):
        Replica(
            identity=builders.identity(0),
            manifest=builders.SMALL,
            info=info,
            fits=lambda blob, size: None,
            unix_offset_s=0.0,
            rng=random.Random(0),
        )


def test_need_fetches_chunks_under_any_key(seed):
    """Genesis and snapshots come this way."""
    world = _swarm(seed, 2)
    data = os.urandom(100)
    (blob,) = builders.chunk_hashes(data)
    world.nodes[0].blobs[blob] = data
    world.handle(world.nodes[1], fx.Need(b"genesis", ((blob, 100),)))
    world.run(5.0)
    assert world.nodes[1].fetched == [b"genesis"]
    assert world.nodes[1].blobs[blob] == data


def test_a_joiner_soon_fetches_the_model_from_all_who_claim_it(seed):
    """It is linked to one of them when it begins, and told there of the others."""
    world = _swarm(seed, limits.LINKS_MIN)
    claim = Claim(8, 1000, bytes(32), b"root" * 8)
    for node in world.running():
        world.handle(node, fx.Sealed((claim,)))
    world.run(2 * limits.HEARTBEAT_INTERVAL_S)
    joiner = world.add(9, [0])
    world.run(0.5, lambda: len(joiner.core.links) == 1)
    joiner.core._fetch_only(claim)
    chunk = b"chunk" * 6 + b"--"
    world.handle(joiner, fx.Need(claim.root, ((chunk, 100),)))
    world.run(0.5)
    assert len(joiner.core.links) == limits.LINKS_MIN
    assert joiner.core.fetcher.wants.holders_of(claim.root, chunk) == set(joiner.links)


def test_two_nodes_with_one_key_do_not_flood_the_swarm(seed):
    """A folder was copied: each outdoes the other's row, but no faster than hearts beat."""
    world = _swarm(seed, 4, Weather(delay=(0.0003, 0.001)))
    original = world.nodes[3]
    copy = world.add(9, [1], key_of=3)
    before = world.messages
    world.run(10.0)
    assert copy.core.own_row.incarnation > original.info.incarnation, "they did hear of each other"
    assert world.messages - before < 1500
    world.run(50.0)
    assert min(node.core.presence.outdone for node in (original, copy)) > 2, "they can tell"


def test_a_node_whose_clock_was_set_back_is_heard_again(seed):
    world = _swarm(seed, 3)
    node = world.nodes[2]
    world.crash(node)
    node.info = replace(node.info, incarnation=-1 + node.info.incarnation - 1)
    world.restart(node)
    assert (
        node.core.own_row.incarnation
        < world.nodes[0].core.roster.get(node.identity.node_id).peer.body.incarnation
    )
    world.run(2 * limits.HEARTBEAT_INTERVAL_S + 2.0)
    row = world.nodes[0].core.roster.get(node.identity.node_id).peer.body
    assert row.age == node.core.own_row.age
    world.run(50.0)
    assert node.core.presence.outdone in (1, 2)


def test_clock_counts_live_trainers_only(seed):
    world = World(seed)
    world.add(0, trains=False)
    for number in (1, 2):
        world.add(number, [0])
    world.run(10.0)
    assert world.nodes[0].core.clock == 0
    world.publish(world.nodes[1], 1)
    world.run(1.0)
    assert {n.core.clock for n in world.running()} == {1}
    world.publish(world.nodes[2], 1)
    world.publish(world.nodes[1], 2)
    world.crash(world.nodes[1])
    world.run(30.0)
    assert world.nodes[2].core.clock == 1, "the dead do not set the pace"


def test_who_comes_when_all_others_are_gone_goes_on_where_they_left_off(seed):
    world = World(seed)
    world.add(0, trains=False)
    world.add(1, [0])
    world.run(10.0)
    for round_ in range(1, 21):
        world.publish(world.nodes[1], round_)
    world.run(20.0)
    world.crash(world.nodes[1])
    world.run(30.0)
    late = world.add(2, [0])
    world.run(20.0)
    assert len(late.core.ledger) == 20
    assert late.core.clock == 20, "it would publish rounds that are closed, one after another"


def test_what_a_delta_is_worth_does_not_depend_on_what_else_a_node_has(seed):
    """A liar lists somebody's chunk with another size: where that chunk is, its payload would be complete,
    and nobody else could ever get it."""
    world = _swarm(seed, 3)
    honest, liar = world.nodes[0], world.nodes[1]
    world.publish(honest)
    world.run(5.0)
    real = honest.core.ledger.get(honest.core.ledger.last_record(honest.identity.node_id))
    assert real is not None
    later = real.round + len(honest.core.layout.fragments)
    payload_bytes = real.body.payload_bytes - 1
    world.handle(
        liar, fx.Publish(replace(real.body, round=later, base=real.round, payload_bytes=payload_bytes))
    )
    world.run(5.0)
    lie = liar.core.ledger.last_record(liar.identity.node_id)
    late = world.add(9, [0])
    world.run(20.0)
    for node in (honest, world.nodes[2], late):
        assert node.core.holds(real.record_id)
        assert lie in node.core.ledger and not node.core.holds(lie)
        assert not node.core.fetcher.wants, "nobody can have it, so nobody is asked for it"


def test_one_key_cannot_sign_for_all_rounds_of_an_old_swarm(seed):
    """The swarm is old enough for thousands of rounds, and has made none of them."""
    world = _swarm(seed, 3)
    for node in world.running():
        world.publish(node, 1)
    world.run(5.0)
    victim = world.nodes[0]
    newest = 1 + limits.ROUND_SLACK + world.manifest.history.retain
    for round_ in (2, newest, newest + 1, 2 * newest, 3000):
        delta, _ = builders.random_delta(
            np.random.default_rng(round_), builders.identity(66), round_, of=world.manifest
        )
        world.inject(victim, next(iter(victim.links)), msg.encode(msg.Records(((delta.data, True),))))
    assert victim.core.ledger.rounds() == [1, 2, newest]
    assert not victim.blames, "whoever relays it may be the other half of a partition"


def test_what_came_too_early_is_taken_when_the_swarm_has_come_near(seed):
    world = _swarm(seed, 2)
    behind, before = world.nodes[0], world.nodes[1]
    behind.core._clock._ahead = 5
    for round_ in range(1, 12):
        world.publish(before, round_)
        world.publish(behind, round_)
    delta, payload = builders.random_delta(
        np.random.default_rng(0), builders.identity(66), 20, of=world.manifest
    )
    before.blobs[delta.body.chunks[0]] = payload
    world.inject(before, next(iter(before.links)), msg.encode(msg.Records(((delta.data, True),))))
    world.run(20.0)
    assert delta.record_id in before.core.ledger
    assert delta.record_id not in behind.core.ledger
    world.publish(before, 15)
    world.publish(behind, 15)
    world.run(30.0, world.agree)
    assert delta.record_id in behind.core.ledger


# --- time and determinism ---------------------------------------------------------------------------


def test_a_core_never_asks_for_a_wake_that_is_due_already(seed):
    """`World` checks it after every Wake; here with all slots taken, failures and time-outs of every kind."""
    world = _swarm(seed, 4, STORM, BRISK)
    for node in world.running():
        world.train(node, 0.4, world.now + 60.0)
    author = world.nodes[3]
    for round_ in range(1, 60):
        world.publish(author, round_)
        if round_ % 2:
            author.blobs.popitem()
    world.run(30.0)
    world.crash(author, silently=True)
    world.run(60.0)
    wakes = 0
    real = world._wake

    def counted(node, timer, life):
        nonlocal wakes
        wakes += 1
        real(node, timer, life)

    world._wake = counted
    world.run(30.0)
    assert wakes < 30 * 3 * 30, "no more than some tens a second and node"


def test_traffic_of_an_idle_swarm_is_bounded(seed):
    world = _swarm(seed, 8)
    before = world.messages
    world.run(60.0)
    assert (world.messages - before) / 60.0 / 8 < 25.0, "messages a second and node"


def _run(seed: int) -> str:
    world = World(seed, BRISK, STORM)
    for number in range(5):
        world.add(number, [0] if number else [])
        world.run(1.0)
    for node in world.running():
        world.train(node, 0.3, world.now + 15.0)
    world.run(10.0)
    world.partition((0, 1), (2, 3, 4))
    world.run(10.0)
    world.crash(world.nodes[1])
    world.heal()
    world.run(10.0)
    return world.transcript.hexdigest()


def test_same_seed_same_run_in_another_process_too(seed):
    """Hashes of bytes differ from process to process: no effect may follow a set's order."""
    root = Path(__file__).resolve().parents[2]
    script = f"from tests.protocol import test_replica as t; print(t._run({seed}))"
    paths = os.pathsep.join([str(root), *(p for p in sys.path if p)])
    results = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=root,
        )
        assert done.returncode == 0, done.stderr
        results.add(done.stdout)
    assert len(results) == 1
    assert _run(seed) + "\n" in results
    assert _run(seed + 1) + "\n" not in results


def test_what_a_peer_signed_itself_is_a_graver_offence_than_what_it_relays(seed):
    world = _swarm(seed, 2)
    node, author = world.nodes[0], world.nodes[1]
    link = next(iter(node.links))
    row_of_garbage = seal(author.core.identity, Kind.PEER, world.manifest.swarm_id, b"garbage").data
    effects = world.inject(node, link, msg.encode(msg.Records(((row_of_garbage, False),))))
    assert [effect.offence for effect in effects] == [Offence.RECORD]


def test_a_message_of_an_unknown_kind_is_hardly_an_offence(seed):
    world = _swarm(seed, 2)
    node = world.nodes[0]
    blame, hangup = world.inject(node, next(iter(node.links)), pack([200]))
    assert (blame.offence, type(hangup)) == (Offence.UNSUPPORTED, fx.Hangup)
