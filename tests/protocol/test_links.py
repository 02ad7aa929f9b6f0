"""Which links: enough, one per pair, and always a way back to those who were lost."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.effects import Dial, Hangup, Leave, LinkUp
from gossamer.protocol.links import Links
from gossamer.protocol.records import Peer
from gossamer.protocol.roster import Health, Roster
from tests.protocol import builders
from tests.protocol.wiring import World

ROW = builders.row(builders.identity(1))


def _id(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Bench:
    """The links of node 100, with a roster of our choice."""

    def __init__(self, *bootstrap: str, own: int = 100) -> None:
        self.roster = Roster(_id(own))
        self.links = Links(_id(own), self.roster, bootstrap, random.Random(0))
        self.now = 100.0
        self.numbers = 0

    def member(self, number: int, *addresses: str, health: Health = Health.ALIVE) -> None:
        known = self.roster.get(_id(number))
        heartbeat = known.peer.body.heartbeat + 1 if known else 1
        body = replace(ROW.body, addresses=addresses or (f"n{number}",), heartbeat=heartbeat)
        self.roster.update(Peer(node_id=_id(number), body=body, data=b""), self.now)
        self.roster.judge(_id(number), health, self.now)

    def up(self, number: int, *, outbound: bool = False, address: str | None = None) -> tuple[bool, list]:
        self.numbers += 1
        return self.links.up(LinkUp(self.numbers, _id(number), outbound, address))

    def look(self, seconds: float = 1.0) -> list[tuple[str, bytes | None]]:
        self.now += seconds
        effects = self.links.wake(self.now)
        assert self.links.deadline() > self.now
        assert all(isinstance(e, Dial) for e in effects)
        return [(e.address, e.node_id) for e in effects]

    def dials(self, seconds: float, failing: bool = True) -> list[tuple[float, str]]:
        """All dials within some time, each failing at once."""
        found = []
        end = self.now + seconds
        while self.now < end:
            for address, _ in self.look():
                found.append((self.now, address))
                if failing:
                    self.links.dial_failed(address, self.now)
        return found


# --- two links between a pair -----------------------------------------------------------------------


@given(st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_both_ends_keep_the_same_of_two_links(first_by_a, second_by_a, b_sees_second_first, a_is_smaller):
    """Whoever dialled, in whatever order the two ends see them, one link is left and it is the same one."""
    own = (1, 2) if a_is_smaller else (2, 1)
    ends = [Bench(own=own[0]), Bench(own=own[1])]
    dialled_by_a = {1: first_by_a, 2: second_by_a}
    if first_by_a == second_by_a and b_sees_second_first:
        return  # two dials in one direction: the dialler made the second since the first was gone
    for end, order in ((0, (1, 2)), (1, (2, 1) if b_sees_second_first else (1, 2))):
        for number in order:
            outbound = dialled_by_a[number] == (end == 0)
            _, effects = ends[end].links.up(LinkUp(number, _id(own[1 - end]), outbound, None))
            for hangup in effects:
                assert isinstance(hangup, Hangup)
                ends[end].links.down(hangup.link)
    kept = [[link.number for link in end.links.all()] for end in ends]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1


def test_a_link_to_ourselves_is_hung_up():
    bench = Bench()
    stays, effects = bench.up(100, outbound=True, address="me")
    assert not stays
    assert effects == [Hangup(1, "that is ourselves")]
    assert len(bench.links) == 0


def test_room_for_so_many_and_ours_come_first():
    bench = Bench()
    for number in range(limits.LINKS_MAX):
        assert bench.up(number)[0]
    stays, effects = bench.up(limits.LINKS_MAX + 1)
    assert not stays
    assert effects == [Hangup(limits.LINKS_MAX + 1, "no room for more links")]
    assert bench.up(limits.LINKS_MAX + 2, outbound=True)[0]
    stays, effects = bench.up(3)
    assert stays, "a member that lost its link may have it again"
    bench.links.down(effects[0].link)
    assert len(bench.links) == limits.LINKS_MAX + 1


# --- whom to dial -----------------------------------------------------------------------------------


def test_dials_until_links_are_enough():
    bench = Bench()
    for number in range(1, 21):
        bench.member(number)
    seen = []
    for _ in range(30):
        for address, node_id in bench.look():
            seen.append(address)
            assert node_id == _id(int(address[1:]))
            bench.up(int(address[1:]), outbound=True, address=address)
        if len(bench.links) >= limits.LINKS_WANTED:
            break
    assert len(bench.links) == len(set(seen)) == limits.LINKS_WANTED
    assert bench.look(30.0) == []


def test_dials_at_once_are_bounded():
    bench = Bench()
    for number in range(1, 21):
        bench.member(number)
    under_way = len(bench.look())
    assert under_way == limits.DIALS_AT_ONCE_MAX
    assert bench.look() == []


def test_a_member_with_several_addresses_is_dialled_once_at_a_time():
    """Two links that we dialled could be kept crosswise by the two ends, and both be closed."""
    bench = Bench()
    bench.member(1, "lan", "wan", "ipv6")
    ((first, _),) = bench.look()
    assert bench.look() == []
    bench.links.dial_failed(first, bench.now)
    tried = {first}
    for _ in range(30):
        for address, _ in bench.look():
            tried.add(address)
            bench.links.dial_failed(address, bench.now)
    assert tried == {"lan", "wan", "ipv6"}


@pytest.mark.parametrize(
    ("health", "wait"),
    [(Health.ALIVE, limits.REDIAL_INTERVAL_S), (Health.DOWN, limits.REDIAL_DOWN_INTERVAL_S)],
)
def test_redialling_keeps_its_distance(health, wait):
    bench = Bench()
    bench.member(1, health=health)
    times = [at for at, _ in bench.dials(100.0)]
    gaps = {b - a for a, b in pairwise(times)}
    assert gaps == {wait}


def test_a_dial_without_an_answer_is_given_up():
    bench = Bench()
    bench.member(1)
    assert len(bench.look()) == 1
    times = [at for at, _ in bench.dials(60.0, failing=False)]
    assert len(times) >= 4


def test_those_who_left_are_not_dialled_and_those_who_came_back_are():
    bench = Bench()
    bench.member(1, health=Health.LEFT)
    assert bench.dials(60.0) == []
    bench.member(1)
    assert len(bench.dials(3.0)) == 1


def test_down_members_are_dialled_even_with_links_enough():
    """All of them may be in our half of a partition."""
    bench = Bench()
    for number in range(1, 2 * limits.LINKS_WANTED):
        bench.member(number)
        bench.up(number)
    for number in range(50, 60):
        bench.member(number, health=Health.DOWN)
    found = bench.dials(limits.REDIAL_DOWN_INTERVAL_S)
    assert {address for _, address in found} == {f"n{number}" for number in range(50, 60)}
    assert len(found) == 10


def test_memory_of_dials_is_bounded():
    bench = Bench()
    for number in range(1000):
        bench.member(1, f"other{number}")
        for address, _ in bench.look():
            bench.links.dial_failed(address, bench.now)
    assert len(bench.links._tried) <= 1 + limits.REDIAL_DOWN_INTERVAL_S
    assert len(bench.links._dialling) <= limits.DIALS_AT_ONCE_MAX


# --- bootstrap addresses ----------------------------------------------------------------------------


def test_bootstrap_addresses_are_tried_until_links_suffice():
    bench = Bench("boot:1", "boot:2")
    times = [at for at, address in bench.dials(60.0) if address == "boot:1"]
    assert len(times) >= 11
    for number in range(limits.LINKS_MIN):
        bench.up(number)
    assert bench.dials(60.0) == []
    bench.links.down(1)
    assert len(bench.dials(6.0)) >= 2


@pytest.mark.parametrize("health", [Health.DOWN, Health.LEFT, Health.SUSPECT])
def test_a_bootstrap_peer_that_went_is_still_called_at_its_address(health):
    """It may be back, even under another key; and nobody else can tell us."""
    bench = Bench("boot:1")
    bench.member(1, "boot:1", health=health)
    bench.up(2)
    assert "boot:1" in [address for _, address in bench.dials(6.0)]
    bench.now += 60.0
    pinned = dict.fromkeys(node_id for _ in range(60) for _, node_id in bench.look())
    assert None in pinned


def test_a_bootstrap_peer_known_by_another_name_is_not_dialled_again_and_again():
    """`--join localhost:7700` leads to a peer that calls itself 10.0.0.5:7700."""
    bench = Bench("localhost:7700")
    ((address, _),) = bench.look()
    bench.up(1, outbound=True, address=address)
    bench.member(1, "10.0.0.5:7700")
    assert bench.dials(60.0) == []
    bench.links.down(1)
    assert len(bench.dials(6.0)) >= 1


def test_a_bootstrap_address_that_is_our_own_is_left_alone():
    bench = Bench("me:1")
    ((address, _),) = bench.look()
    bench.up(100, outbound=True, address=address)
    assert bench.dials(60.0) == []


# --- whole cores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5, 12])
def test_everybody_reaches_the_wanted_number_and_every_pair_agrees(seed, count):
    world = World(seed)
    for number in range(count):
        world.add(number, [0] if number else [])
    world.run(30.0)
    for node in world.running():
        assert min(count - 1, limits.LINKS_WANTED) <= len(node.core.links) <= limits.LINKS_MAX
        ours = {(link.number, link.node_id) for link in node.core.links.all()}
        assert len({node_id for _, node_id in ours}) == len(ours), "one link per pair"
        assert {number for number, _ in ours} == set(node.links), "the core's links are those that exist"
    before = {node.number: sorted(node.links) for node in world.running()}
    world.run(60.0)
    assert before == {node.number: sorted(node.links) for node in world.running()}, "and then they stay"


def test_no_suspicion_when_two_nodes_dial_each_other_at_once(seed):
    world = World(seed)
    a, b = world.add(0), world.add(1)
    world.connect(a, b)
    world.connect(b, a)
    world.run(30.0)
    assert len(a.core.links) == len(b.core.links) == 1
    assert not [x for node in (a, b) for x in node.judged if x[2] is not Health.ALIVE]


def test_a_node_that_can_only_dial_out_takes_part(seed):
    world = World(seed)
    world.add(0)
    world.add(1, [0], dialable=False)
    world.add(2, [0], dialable=False)
    world.run(10.0)
    world.publish(world.nodes[1])
    world.publish(world.nodes[0])
    world.run(1.0)
    world.run(10.0, world.agree)
    assert world.agree()
    assert len(world.nodes[2].core.ledger) == 2


def test_a_bootstrap_peer_that_restarts_gracefully_is_found_again(seed):
    """It says goodbye, so nobody suspects anything, and it comes back knowing nobody."""
    world = World(seed)
    for number in range(3):
        world.add(number, [0] if number else [])
    world.run(20.0)
    world.handle(world.nodes[0], Leave())
    world.run(1.0)
    world.crash(world.nodes[0])
    world.run(30.0)
    world.restart(world.nodes[0], keep_disk=False)
    world.run(10.0, lambda: len(world.nodes[0].core.links) == 2)
    assert len(world.nodes[0].core.links) == 2
