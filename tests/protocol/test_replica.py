"""Whole cores, joined in memory: every record reaches everybody, in any weather and after any partition."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.payloads import encode_payload
from gossamer.protocol.records import Claim
from gossamer.protocol.replica import Replica
from tests.protocol import builders
from tests.protocol.cores import BRISK, STORM, check, swarm
from tests.protocol.wiring import Node, Weather, World

# --- everything reaches everybody -------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_records_reach_all_through_loss_duplicates_and_disorder(seed, count):
    world = swarm(seed, count, STORM, BRISK)
    for node in world.running():
        world.train(node, world.rng.uniform(0.2, 1.0), world.now + 20.0)
    world.run(21.0)  # what is published last is stored by then
    world.run(400.0, world.agree)  # a lost Ask costs the time-out of a fetch
    assert world.agree()
    check(world)
    ledger = world.nodes[0].core.ledger
    assert {d.author for d in ledger} == {n.identity.node_id for n in world.running()}
    assert len(ledger) == sum(
        len([d for d in n.disk if d.author == n.identity.node_id]) for n in world.running()
    )


def test_whom_every_push_passes_by_does_not_wait_for_anti_entropy(seed, monkeypatch):
    world = swarm(seed, 14)
    monkeypatch.setattr(limits, "PUSH_FANOUT", 1)
    monkeypatch.setattr(limits, "ANTI_ENTROPY_INTERVAL_S", 1000.0)
    world.run(15.0)  # the exchange that each had due
    world.publish(world.nodes[3])
    took = world.run(20.0, lambda: all(len(node.core.ledger) == 1 for node in world.running()))
    assert took < 3.0


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
    check(world)


def _zeros(node: Node) -> list[np.ndarray]:
    fragment = node.core.layout.fragments[0]
    return [np.zeros(slot.numel, dtype=np.int32) for slot in fragment.slots]


# --- partitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "seconds"), [(2, 100.0), (6, 50.0), (14, 50.0)])
def test_a_partition_heals_within_40_seconds(seed, count, seconds):
    """Both sides go on by themselves. With 14, each side has links enough without the other."""
    world = swarm(seed, count, of=BRISK)
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
    check(world)
    authors = {d.author for d in world.nodes[0].core.ledger}
    assert len(authors) == count, "the work of both sides counts"


# --- our own side -----------------------------------------------------------------------------------


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


def test_a_joiner_soon_fetches_the_model_from_all_who_claim_it(seed):
    """It is linked to one of them when it begins, and told there of the others."""
    world = swarm(seed, limits.LINKS_MIN)
    claim = Claim(8, 1000, bytes(32), b"root" * 8)
    for node in world.running():
        world.handle(node, ev.Sealed((claim,)))
    world.run(2 * limits.HEARTBEAT_INTERVAL_S)
    joiner = world.add(9, [0])
    world.run(10.0, lambda: joiner.core.sealing.adopting is not None)
    chunk = b"chunk" * 6 + b"--"
    world.handle(joiner, ev.Need(claim.key, ((chunk, 100),)))
    world.run(0.5)
    assert len(joiner.core.links) == limits.LINKS_MIN
    assert joiner.core.fetcher.wants.holders_of(claim.key, chunk) == set(joiner.links)


def test_nobody_is_believed_about_round_0_which_the_manifest_tells():
    """A node that has sealed nothing yet claims just that round, and so would stand alone against a liar."""
    world = swarm(6, 3)
    here, liar, other = world.running()
    world.publish(liar)
    world.handle(other, ev.Sealed((other.core.sealing._peers.genesis,)))
    world.handle(liar, ev.Sealed((Claim(0, 2**59, b"d" * 32, b"r" * 32),)))
    world.run(2 * limits.HEARTBEAT_INTERVAL_S)
    assert here.core.roster.get(liar.core.identity.node_id).record.body.claims == liar.core.sealing.claims
    assert here.core.sealing._peers.contributors() == [()]
    assert sorted(len(witness.claims) for witness in here.core.sealing._peers.members()) == [0, 1]


def test_a_snapshot_that_cannot_be_is_not_chosen_again_whoever_claims_it(seed):
    world = swarm(seed, 3)
    claim, lie = (Claim(round_, 1000, bytes(32), bytes([round_]) * 32) for round_ in (8, 16))
    for node in world.running():
        world.handle(node, ev.Sealed((lie, claim)))
    world.run(2 * limits.HEARTBEAT_INTERVAL_S)
    joiner = world.add(9, [0])
    world.run(10.0, lambda: joiner.core.sealing.adopting is not None)
    assert joiner.core.sealing.adopting == lie
    world.handle(joiner, ev.Need(lie.key, ((bytes(32), 100),)))
    world.handle(joiner, ev.Unusable(lie._replace(round=24)))
    assert joiner.core.sealing.adopting is None and lie.key not in joiner.core.fetcher.wants
    world.run(10.0, lambda: joiner.core.sealing.adopting is not None)
    assert joiner.core.sealing.adopting == claim


def test_only_those_whose_deltas_are_here_have_a_voice_about_our_history():
    world = swarm(5, 3)
    here, author, _ = world.running()
    voices = here.core.sealing._peers.contributors
    assert voices() == []
    world.publish(author)
    world.run(5.0)
    assert voices() == [author.core.sealing.claims]


def test_who_gives_closed_rounds_up_for_an_older_snapshot_takes_what_others_publish_since(seed):
    """Cut off, it had gone far beyond the others, and refused all that they did."""
    world = swarm(seed, 2)
    here, other = world.running()
    for round_ in (16, 8):
        world.handle(here, ev.Adopted(Claim(round_, 1000, bytes(32), bytes([round_]) * 32)))
    world.publish(other, 9)
    world.run(5.0)
    assert here.core.ledger.rounds() == [9]


def test_who_gives_its_history_up_keeps_no_record_that_the_others_would_not_take(seed):
    """It had run ahead alone. If the swarm then rests, all merge what they hold."""
    world = swarm(seed, 2)
    here, other = world.running()
    world.publish(other, 9)
    world.run(5.0)
    link = next(iter(here.links))
    world.handle(here, ev.LinkDown(link))
    far = 9 + world.manifest.history.retain + world.manifest.history.seal_after + 100
    world.publish(here, far)
    world.run(1.0)
    (own,) = (delta for delta in here.core.ledger if delta.round == far)
    assert not here.core.own_are_spread
    effects = here.core.handle(ev.Adopted(Claim(8, 1000, bytes(32), bytes([8]) * 32)), world.now)
    (close,) = (effect for effect in effects if isinstance(effect, fx.Close))
    assert close.round == 8 and own in close.deltas
    assert here.core.ledger.rounds() == [9] and not here.core.holds(own.record_id)
    assert here.core.own_last == far, "and signs no round up to that again"
    assert here.core.own_are_spread, "whoever leaves now waits for nobody to take it"


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize(("later", "joins"), [(500, [1]), (500, [0]), (-500, [1])])
def test_of_two_nodes_with_one_key_one_stops_before_it_publishes(seed, nodes, later, joins):
    """Both have just begun, with empty folders: as a rule it is the one that began later, if only by its
    clock. They share a peer, or have one each."""
    world = swarm(seed, nodes, Weather(delay=(0.01, 0.1)))
    first = world.add(8, [0])
    second = world.add(9, joins if nodes > 1 else [0], key_of=8, incarnation=first.info.incarnation + later)
    begun = world.now
    while not (stopped := [node for node in (first, second) if node.expelled]):
        assert all(node.core.clock_to_publish_by < 0 for node in (first, second))
        world.run(0.1)
        assert world.now - begun < limits.TWIN_PATIENCE_S
    (gone,) = stopped
    assert "another process runs with this node's key" in gone.expelled
    assert gone is (first if later < 0 else second)
    world.crash(gone)
    world.run(2 * limits.TWIN_PATIENCE_S)
    stays = first if gone is second else second
    assert stays.expelled is None and stays.core.clock_to_publish_by >= 0


def test_a_copy_of_a_node_that_trains_stops_and_costs_it_no_link_for_long(seed):
    world = swarm(seed, 4)
    original = world.nodes[3]
    copy = world.add(9, [1], key_of=3, incarnation=original.info.incarnation + 500)
    world.run(limits.TWIN_PATIENCE_S)
    assert copy.expelled and original.expelled is None
    world.crash(copy)
    world.run(2 * limits.TWIN_PATIENCE_S)
    for node in world.running():
        linked = [link.node_id for link in node.core.links.all()]
        assert len(linked) == len(set(linked)) == 3


def test_where_a_node_came_back_is_known_to_all_at_once(seed):
    """A pod: another address, an empty folder, the same key; nobody has noticed yet that it was gone."""
    world = swarm(seed, 24)
    node = world.nodes[3]
    world.crash(node, silently=True)
    node.address = "elsewhere:7700"
    world.restart(node, keep_disk=False)
    told = lambda one: one.core.roster.get(node.identity.node_id).record.body.addresses  # noqa: E731
    others = [one for one in world.running() if one is not node]
    world.run(5.0, lambda: all(told(one) == (node.address,) for one in others))
    assert all(told(one) == (node.address,) for one in others)


def test_a_node_whose_clock_was_set_back_is_heard_again(seed):
    world = swarm(seed, 3)
    node = world.nodes[2]
    world.crash(node)
    node.info = replace(node.info, incarnation=node.info.incarnation - 1500)
    world.restart(node)
    assert (
        node.core.own_record.incarnation
        < world.nodes[0].core.roster.get(node.identity.node_id).record.body.incarnation
    )
    world.run(2 * limits.HEARTBEAT_INTERVAL_S + 2.0)
    row = world.nodes[0].core.roster.get(node.identity.node_id).record.body
    assert row.age == node.core.own_record.age
    world.run(50.0)
    assert node.expelled is None, "that was no other process"


def test_who_publishes_for_a_round_that_is_closed_takes_part_all_the_same(seed):
    """It comes too late to be merged. But its author's word counts as that of one who trains."""
    world = swarm(seed, 2)
    node, late = world.nodes[0], builders.identity(7)
    world.publish(node, 1)
    node.core.ledger.close(5)
    delta, _ = builders.random_delta(np.random.default_rng(seed), late, 3)
    effects = world.inject(node, next(iter(node.links)), msg.encode(msg.Records(((delta.data, False),))))
    assert effects == [] and delta.record_id not in node.core.ledger
    assert node.core.ledger.last_round(late.node_id) == 3


def test_what_a_delta_is_worth_does_not_depend_on_what_else_a_node_has(seed):
    """A liar lists somebody's chunk with another size: where that chunk is, its payload would be complete,
    and nobody else could ever get it."""
    world = swarm(seed, 3)
    honest, liar = world.nodes[0], world.nodes[1]
    world.publish(honest)
    world.run(5.0)
    real = honest.core.ledger.get(honest.core.ledger.last_record(honest.identity.node_id))
    assert real is not None
    later = real.round + len(honest.core.layout.fragments)
    payload_bytes = real.body.payload_bytes - 1
    world.handle(
        liar, ev.Publish(replace(real.body, round=later, base=real.round, payload_bytes=payload_bytes))
    )
    world.run(5.0)
    lie = liar.core.ledger.last_record(liar.identity.node_id)
    late = world.add(9, [0])
    world.run(20.0)
    for node in (honest, world.nodes[2], late):
        assert node.core.holds(real.record_id)
        assert lie in node.core.ledger and not node.core.holds(lie)
        assert not node.core.fetcher.wants, "nobody can have it, so nobody is asked for it"


def test_a_short_payload_comes_along_and_nobody_asks_for_it(seed):
    world = swarm(seed, 4)
    world.sends_along = True
    author, *others = world.running()
    world.publish(author, 1)
    world.run(5.0)
    delta = author.core.ledger.get(author.core.ledger.last_record(author.identity.node_id))
    assert delta is not None and len(delta.body.chunks) == 1
    assert all(node.core.holds(delta.record_id) for node in others) and author.core.own_are_spread
    assert world.by_kind["NewDelta"] == len(author.links) and "Want" not in world.by_kind
    assert not any(node.blames for node in world.running())


def test_a_chunk_comes_along_only_with_a_record_that_counts(seed):
    world = swarm(seed, 2)
    node = world.nodes[0]
    link = next(iter(node.links))
    delta, _ = builders.random_delta(np.random.default_rng(seed), builders.identity(7), 1)
    damaged = bytearray(delta.data)
    damaged[-1] ^= 1
    effects = world.inject(node, link, msg.encode(msg.NewDelta(bytes(damaged), b"x")))
    assert [type(effect) for effect in effects] == [fx.Blame]
    row = next(iter(world.nodes.values())).core.presence.data
    assert world.inject(node, link, msg.encode(msg.NewDelta(row, b"x"))) == [], "it names no chunk"


def test_one_key_cannot_sign_for_all_rounds_of_an_old_swarm(seed):
    """The swarm is old enough for thousands of rounds, and has made none of them."""
    world = swarm(seed, 3)
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


# --- time and determinism ---------------------------------------------------------------------------


def test_traffic_of_an_idle_swarm_is_bounded(seed):
    world = swarm(seed, 8)
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
            timeout=200,
            check=False,
            cwd=root,
        )
        assert done.returncode == 0, done.stderr
        results.add(done.stdout)
    assert len(results) == 1
    assert _run(seed) + "\n" in results
    assert _run(seed + 1) + "\n" not in results


@pytest.mark.parametrize(("every_s", "codec"), [(0.02, "topk"), (5.0, "int8")])
def test_who_publishes_faster_than_its_peers_hear_of_it_takes_a_coarser_codec(seed, every_s, codec):
    ladder = {"codecs": [{"name": "int8"}, {"name": "topk"}]}
    world = swarm(seed, 3, of=builders.manifest(outer=ladder, pace={"every_steps": 4}))
    author = world.nodes[0]
    for _ in range(10):
        world.publish(author)
        world.run(every_s)
    assert author.core.codec.name == codec
    world.run(20.0, world.agree)
    check(world)
    world.restart(author)
    assert author.core.codec.name == "int8", "that of its last delta"
