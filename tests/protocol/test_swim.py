"""Who is alive: crashes are seen, slowness is forgiven, and nobody can speak for another.

The first half drives one machine by hand; the second half several whole cores in virtual time.
"""

from __future__ import annotations

import random

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Notice, Outbox, Send
from gossamer.protocol.events import Leave
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.membership.swim import Swim
from gossamer.protocol.messages import Ack, Ping, PingFor, Records, Suspect, encode
from tests.protocol import builders
from tests.protocol.wiring import Node, World

IDS = {number: builders.identity(number).node_id for number in range(10)}


class Bench:
    """A membership machine with links 1..n to the nodes of the same numbers, all of them linked to each other
    unless it is told otherwise."""

    def __init__(self, links: int, seed: int = 0, *, are_linked: bool = True) -> None:
        self.dialled = tuple(IDS[n][: limits.LINK_PREFIX_BYTES] for n in range(links + 1) if are_linked)
        self.roster = Roster(IDS[0])
        outbox = Outbox()
        self.machine = builders.Drained(Swim(self.roster, random.Random(seed), outbox), outbox)
        self.now = 100.0
        for number in range(1, links + 1):
            self.row(number, 1, self.now)
            self.machine.link_up(number, IDS[number], self.now - limits.PROBE_TIMEOUT_S)
            self.machine.heard_on(number, self.now)

    def row(self, number: int, heartbeat: int, at: float) -> None:
        """A row of a node comes."""
        row = builders.row(builders.identity(number), heartbeat=heartbeat, dialled=self.dialled)
        self.roster.update(row, at)

    def wake(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.machine.wake(self.now)

    def health(self, number: int) -> Health:
        member = self.roster.get(IDS[number])
        assert member is not None
        return member.health

    def pass_time(self, seconds: float, silent: tuple[int, ...] = (), beats: bool = True) -> list[Effect]:
        """Let time pass, every wake on time; all but the silent answer and send heartbeats."""
        effects = []
        end = self.now + seconds
        while self.machine.deadline() <= end:
            self.now = self.machine.deadline()
            effects += self.machine.wake(self.now)
            for link, number in _pings(effects):
                if link not in silent:
                    self.machine.ack(link, Ack(number), self.now)
                    if beats:
                        self.roster.heard_from(self.machine._links[link].node_id, self.now)
        self.now = end
        return effects

    def until_ping(self, target: int) -> int:
        """Let time pass, everybody else answering, until `target` is pinged; returns the ping's number."""
        for _ in range(20):
            self.now = max(self.now, self.machine.deadline())
            found = None
            for link, number in _pings(self.machine.wake(self.now)):
                if link == target:
                    found = number
                else:
                    self.machine.ack(link, Ack(number), self.now)
            if found is not None:
                return found
        raise AssertionError("never pinged")


def _pings(effects: list[Effect]) -> list[tuple[int, int]]:
    return [
        (e.link, e.message.number) for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)
    ]


def _sent(effects: list[Effect], kind: type) -> list[Send]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def _lines(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Notice)]


def test_a_silent_link_is_pinged_and_one_that_carries_something_is_not():
    bench = Bench(6)
    pinged = []
    for _ in range(20):
        bench.now += limits.PROBE_INTERVAL_S
        for link in (1, 2, 3):
            bench.machine.heard_on(link, bench.now)
        pinged += [(link, bench.now) for link, _ in _pings(bench.machine.wake(bench.now))]
    assert {link for link, _ in pinged} == {4, 5, 6}
    first = min(at for _, at in pinged) - 100.0
    assert limits.PROBE_AFTER_S <= first < limits.PROBE_AFTER_S + limits.PROBE_INTERVAL_S


def test_whatever_comes_on_a_link_answers_a_ping_and_lifts_a_suspicion():
    bench = Bench(6)
    bench.until_ping(1)
    bench.machine.heard_on(1, bench.now + 0.1)
    assert _sent(bench.pass_time(limits.PROBE_TIMEOUT_S, silent=(1,)), PingFor) == []
    bench.until_ping(1)
    asked = _sent(bench.pass_time(limits.PROBE_TIMEOUT_S, silent=(1,)), PingFor)
    assert len({e.link for e in asked} - {1}) == limits.INDIRECT_PROBES and bench.health(1) is Health.ALIVE
    rumours = _sent(bench.pass_time(limits.PROBE_TIMEOUT_S, silent=(1,)), Suspect)
    assert {e.link for e in rumours} == {1, 2, 3, 4, 5, 6} and bench.health(1) is Health.SUSPECT
    bench.machine.heard_on(1, bench.now)
    bench.pass_time(limits.PROBE_INTERVAL_S, silent=(1,))
    assert bench.health(1) is Health.ALIVE


def test_nobody_answers_a_direct_probe_for_another():
    """Numbers can be guessed. A liar that acknowledges everything keeps nobody but itself alive."""
    bench = Bench(2)
    number = bench.until_ping(1)
    for _ in range(20):
        for guess in range(number + 20):
            if guess not in bench.machine._probes or not bench.machine._probes[guess].indirect:
                bench.machine.ack(2, Ack(guess), bench.now)
        bench.pass_time(0.5, silent=(1, 2))
        if bench.health(1) is not Health.ALIVE:
            break
    assert bench.health(1) is Health.SUSPECT
    assert bench.health(2) is Health.ALIVE


def test_vouching_by_ping():
    bench = Bench(3)
    bench.now += 10.0  # no fresh heartbeat
    (ping,) = _sent(bench.machine.ping_for(2, PingFor(77, IDS[1]), bench.now), Ping)
    assert ping.link == 1
    assert bench.machine.ack(3, Ack(ping.message.number), bench.now) == [], "not from the one we pinged"
    (told,) = bench.machine.ack(1, Ack(ping.message.number), bench.now)
    assert (told.link, told.message) == (2, Ack(77))


def test_pings_for_one_asker_are_few_however_soon_they_are_answered():
    bench = Bench(3)
    pings = 0
    for number in range(500):
        for ping in _sent(bench.machine.ping_for(2, PingFor(number, IDS[1]), bench.now), Ping):
            pings += 1
            bench.machine.ack(1, Ack(ping.message.number), bench.now)
    assert pings == limits.VOUCHES_PER_LINK_MAX
    bench.now += limits.PROBE_TIMEOUT_S
    assert len(bench.machine.ping_for(2, PingFor(1, IDS[1]), bench.now)) == 1


def test_a_broken_link_is_a_reason_to_ask_at_once():
    bench = Bench(5)
    asked = _sent(bench.machine.link_down(1, bench.now), PingFor)
    assert len(asked) == limits.INDIRECT_PROBES
    bench.pass_time(limits.PROBE_TIMEOUT_S)
    assert bench.health(1) is Health.SUSPECT


def test_who_turns_us_away_is_not_suspected():
    """It has no room for links, and none of our other peers may be linked to it."""
    bench = Bench(5)
    bench.row(6, 1, bench.now)
    bench.machine.link_up(6, IDS[6], bench.now)
    assert bench.machine.link_down(6, bench.now + 0.1) == []
    bench.pass_time(2 * limits.PROBE_TIMEOUT_S)
    assert bench.health(6) is Health.ALIVE


def test_those_linked_to_a_member_are_the_first_to_be_asked_about_it():
    """As its own row says, or theirs."""
    bench = Bench(8, are_linked=False)
    prefixes = {number: id_[: limits.LINK_PREFIX_BYTES] for number, id_ in IDS.items()}
    its, theirs = builders.identity(1), builders.identity(4)
    bench.roster.update(builders.row(its, heartbeat=2, dialled=(prefixes[6],)), bench.now)
    bench.roster.update(builders.row(theirs, heartbeat=2, dialled=(prefixes[1],)), bench.now)
    asked = {effect.link for effect in _sent(bench.machine.link_down(1, bench.now), PingFor)}
    assert {4, 6} < asked, "and a third, whose row may be behind"
    assert len(asked) == limits.INDIRECT_PROBES


def test_rumours_are_believed_unless_we_know_better():
    bench = Bench(3)
    old = Suspect(IDS[1], *bench.roster.get(IDS[1]).record.body.age)
    assert bench.machine.suspicion(2, old, bench.now + 1.0) == [], "it has just come"
    bench.now += limits.RUMOUR_PAUSE_S
    bench.machine.heard_on(1, bench.now)
    assert bench.machine.suspicion(2, old, bench.now) == [Send(1, old)], "who has just spoken can refute it"
    bench.row(1, 2, bench.now)
    (newer,) = _sent(bench.machine.suspicion(2, old, bench.now), Records)
    assert newer.link == 2, "who missed what refutes it gets that"
    bench.now += limits.RUMOUR_PAUSE_S
    assert bench.machine.suspicion(2, old, bench.now) == [], "refuted long ago: that may have been its last"
    assert bench.machine.suspicion(2, Suspect(IDS[9], 1, 1), bench.now) == [], "a stranger"
    rumour = Suspect(IDS[1], *bench.roster.get(IDS[1]).record.body.age)
    relayed = _sent(bench.machine.suspicion(2, rumour, bench.now), Suspect)
    assert bench.health(1) is Health.SUSPECT
    assert 2 not in {e.link for e in relayed}
    assert bench.machine.suspicion(3, rumour, bench.now) == [], "relayed once"


def test_many_who_fall_silent_at_once_are_one_line():
    """Half of a large swarm, when a line breaks, or the keys of one liar."""
    bench = Bench(9)
    lines = _lines(bench.pass_time(30.0, silent=range(1, 10)))
    labels = sorted(bench.roster.get(IDS[number]).label for number in range(1, 10))
    names = f"{', '.join(labels[:5])} and 4 more"
    assert lines == [f"{names} are down"]


def test_a_member_without_a_link_is_judged_by_its_heartbeat():
    bench = Bench(1)
    bench.roster.update(builders.row(builders.identity(5)), bench.now)
    bench.pass_time(limits.SILENCE_SUSPECT_S)
    assert bench.health(5) is Health.ALIVE
    bench.pass_time(2 * limits.PROBE_INTERVAL_S)
    assert bench.health(5) is Health.SUSPECT
    bench.pass_time(limits.SUSPICION_TIMEOUT_S + limits.PROBE_INTERVAL_S)
    assert bench.health(5) is Health.DOWN
    assert bench.health(1) is Health.ALIVE


def test_being_slow_makes_patient_and_being_on_time_heals():
    bench = Bench(1)
    bench.wake()
    for expected in range(1, 20):
        for link, number in _pings(bench.wake(limits.PROBE_INTERVAL_S + 3.0)):
            bench.machine.ack(link, Ack(number), bench.now)
        assert bench.machine.local_health == min(expected, limits.LOCAL_HEALTH_MAX - 1)
    assert bench.health(1) is Health.ALIVE
    bench.pass_time(30 * limits.PROBE_INTERVAL_S)
    assert bench.machine.local_health == 0


def test_a_night_asleep_kills_nobody():
    bench = Bench(4)
    bench.wake(limits.PROBE_INTERVAL_S)
    bench.wake(8 * 3600.0)
    assert {bench.health(n) for n in range(1, 5)} == {Health.ALIVE}


# --- whole cores ------------------------------------------------------------------------------------


def _world(seed: int, count: int) -> World:
    """`count` nodes that know each other, their timers out of step."""
    world = World(seed)
    for number in range(count):
        world.add(number, [0] if number else [])
        world.run(world.rng.uniform(0.0, 2.0))
    world.run(20.0 + world.rng.uniform(0.0, 3.0))
    for node in world.running():
        assert len(node.core.roster.live()) == count - 1
        node.judged.clear()
    return world


def _verdicts(node: Node, about: int) -> list[Health]:
    return [health for _, number, health in node.judged if number == about]


@pytest.mark.parametrize("silently", [True, False], ids=["power cut", "process killed"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_crash_is_detected_within_20_seconds_by_all(seed, count, silently):
    world = _world(seed, count)
    victim = world.nodes[count - 1]
    world.crash(victim, silently=silently)
    world.run(20.0)
    for node in world.running():
        assert node.core.roster.get(victim.identity.node_id).health is Health.DOWN
        assert node.core.links.to(victim.identity.node_id) is None, "a dead link is not kept"
        assert not [n for _, n, health in node.judged if n != victim.number and health is Health.DOWN]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_node_frozen_for_3_seconds_is_not_called_down_nor_calls_others_down(seed, count):
    world = _world(seed, count)
    for _ in range(10):
        world.freeze(world.nodes[count - 1], 3.0)
        world.run(3.0 + world.rng.uniform(0.5, 4.0))
    world.run(30.0)
    for node in world.running():
        assert Health.DOWN not in [health for _, _, health in node.judged]
        assert {m.health for m in node.core.roster.members()} == {Health.ALIVE}


def test_a_false_rumour_is_refuted(seed):
    world = _world(seed, 5)
    liar, victim = world.nodes[1], world.nodes[4]
    for _ in range(5):
        age = victim.core.own_record.age
        for link in list(liar.links):
            world._send(liar, link, encode(Suspect(victim.identity.node_id, *age)))
        world.run(5.0)
    world.run(10.0)
    for node in world.running():
        if node is not victim:
            assert Health.DOWN not in _verdicts(node, victim.number)
            assert node.core.roster.get(victim.identity.node_id).health is Health.ALIVE


def test_leaving_is_seen_at_once(seed):
    """By those whom the leaver is linked to; the others hear of it from them."""
    world = _world(seed, 8)
    leaver = world.nodes[3]
    linked = [world.nodes[number] for number, _ in leaver.links.values()]
    assert len(linked) >= limits.PUSH_FANOUT
    world.handle(leaver, Leave())
    world.after(0.5, lambda: world.crash(leaver))
    world.run(1.0)
    for node in linked:
        assert node.core.roster.get(leaver.identity.node_id).health is Health.LEFT
    world.run(30.0)
    for node in world.running():
        assert _verdicts(node, leaver.number) == [Health.LEFT]
