"""Whole cores that restart, lose their disk, or slept: what they sign, and what they know before they do."""

from __future__ import annotations

import math

import pytest

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.records import Claim
from gossamer.protocol.replica import BEFORE_ALL_ROUNDS
from tests.protocol import builders
from tests.protocol.cores import BRISK, check, conflicting, publish_effects, swarm
from tests.protocol.wiring import UNIX_OFFSET_S, Node, World

# --- restarts ---------------------------------------------------------------------------------------


def test_a_restarted_node_continues_and_never_signs_a_round_twice(seed):
    world = swarm(seed, 3, of=BRISK)
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
    check(world)


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


def test_nothing_is_said_of_our_record_before_it_is_stored(seed):
    """Write before you speak."""
    world = swarm(seed, 3)
    node = world.nodes[1]
    (store,) = publish_effects(world, node, 1)
    assert isinstance(store, fx.Store)
    assert store.own
    assert len(node.core.ledger) == 0
    said = node.core.handle(ev.Stored(store.delta), world.now)
    assert any(isinstance(e, fx.Send) and isinstance(e.message, msg.Records) for e in said)
    assert node.core.holds(store.delta.record_id)


def test_nobody_hears_of_our_record_if_its_round_was_closed_while_it_was_being_stored(seed):
    """Others, whose history has that round open yet, would have merged it, and ours never."""
    world = swarm(seed, 3)
    node = world.nodes[1]
    (store,) = publish_effects(world, node, 5)
    assert isinstance(store, fx.Store)
    world.handle(node, ev.Adopted(Claim(16, 1000, bytes(32), b"r" * 32)))
    (notice,) = node.core.handle(ev.Stored(store.delta), world.now)
    assert isinstance(notice, fx.Notice) and "not publishing round 5" in notice.text
    assert not node.core.holds(store.delta.record_id)
    assert node.core.own_are_spread, "there is nothing to wait for"
    world.run(30.0)
    assert not any(len(other.core.ledger) for other in world.running())


def test_a_copy_of_us_that_was_faster_is_told_of_and_its_payload_looked_for_no_more(seed):
    """It signed the round that we had signed, and was not heard of until we were about to store ours."""
    world = swarm(seed, 3)
    node = world.nodes[1]
    (store,) = publish_effects(world, node, 3)
    assert isinstance(store, fx.Store)
    theirs = conflicting(world, node.identity, 3)[0][0]
    world.inject(node, next(iter(node.links)), msg.encode(msg.Records(((theirs.data, False),))))
    assert theirs.record_id in node.core.fetcher.wants
    said = world.handle(node, ev.Stored(store.delta))
    assert node.core.merges.waiting(3) == [3]
    assert any("signed two deltas for round 3" in e.text for e in said if isinstance(e, fx.Notice))
    assert theirs.record_id not in node.core.fetcher.wants
    world.run(30.0)
    for other in world.running():
        assert list(other.core.ledger.voided()) == [(node.identity.node_id, 3)]


def test_a_backup_that_was_put_back_signs_nothing_before_it_knows_what_it_signed(seed):
    world = swarm(seed, 3, of=BRISK)
    node = world.nodes[1]
    for round_ in range(1, 20):
        world.publish(node, round_)
        if round_ == 10:
            world.run(1.0)
            backup = list(node.disk)
    world.run(1.0)
    world.run(20.0, world.agree)
    world.crash(node)
    world.restart(node, backup=backup)
    assert node.core.own_last == 10
    assert node.core.clock_to_publish_by == BEFORE_ALL_ROUNDS
    assert not [e for e in publish_effects(world, node, 11) if isinstance(e, fx.Store)]
    world.run(60.0, lambda: node.core.caught_up)
    assert node.core.caught_up
    assert node.core.own_last == 19


def test_a_node_that_lost_its_disk_learns_all_its_rounds_before_it_trains(seed):
    """Its key is the same: one more delta for a round it has forgotten would make it an equivocator."""
    world = swarm(seed, 3, of=BRISK)
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


# --- caught up --------------------------------------------------------------------------------------


def test_a_payload_that_died_with_its_author_does_not_keep_joiners_from_training(seed):
    world = swarm(seed, 3)
    author = world.nodes[2]
    world.publish(author, 1)
    author.blobs.clear()  # nobody ever gets it
    world.run(1.0)
    world.crash(author)
    joiner = world.add(3, [0])
    world.run(limits.PAYLOAD_PATIENCE_S - 5.0)
    assert len(joiner.core.ledger) == 1
    assert not joiner.core.caught_up
    world.run(20.0)
    assert joiner.core.caught_up


def test_a_liar_that_claims_what_it_withholds_does_not_keep_joiners_from_training(seed):
    world = swarm(seed, 3)
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
    _insist(world, liar, withheld, limits.PAYLOAD_PATIENCE_S - 5.0)
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
            world._send(liar, link, msg.encode(msg.Have((record_id,))))
    world.run(0.1)


def test_empty_swarm_of_two(seed):
    world = swarm(seed, 2)
    assert world.nodes[0].core.caught_up
    assert world.nodes[1].core.caught_up


def test_a_joiner_whose_clock_is_not_set_yet_waits_until_it_is(seed):
    """It would refuse all that the others publish, and train beside them."""
    world = swarm(seed, 3)
    for node in world.running():
        world.publish(node, 90)
    world.run(5.0)
    joiner = world.add(3, [0], unix_offset_s=0.0)
    world.run(60.0)
    assert joiner.core.is_contradicted
    assert not joiner.core.caught_up
    assert not any(node.core.is_contradicted for node in world.running() if node is not joiner)
    world.handle(joiner, ev.TimeSet(UNIX_OFFSET_S))
    world.run(60.0, lambda: joiner.core.caught_up)
    assert joiner.core.caught_up
    assert not joiner.core.is_contradicted
    assert len(joiner.held()) == 3


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
