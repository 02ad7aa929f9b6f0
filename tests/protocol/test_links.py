"""Which links: enough, one per pair, and always a way back to those who were lost."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.effects import Dial, Hangup, Outbox
from gossamer.protocol.events import LinkUp
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders
from tests.protocol.wiring import World

ROW = builders.row(builders.identity(1))


def _id(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Bench:
    """The links of node 100, with a roster of our choice."""

    def __init__(self, *bootstrap: str, own: int = 100) -> None:
        self.roster, self.outbox = Roster(_id(own)), Outbox()
        info = replace(builders.NOBODY, bootstrap=bootstrap)
        self.links = Links(_id(own), self.roster, info, random.Random(0), self.outbox)
        self.now = 100.0
        self.numbers = 0

    def member(self, number: int, *addresses: str, health: Health = Health.ALIVE) -> None:
        known = self.roster.get(_id(number))
        heartbeat = known.record.body.heartbeat + 1 if known else 1
        body = replace(ROW.body, addresses=addresses or (f"n{number}",), heartbeat=heartbeat)
        self.roster.update(MemberRecord(node_id=_id(number), body=body, data=b""), self.now)
        self.roster.judge(_id(number), health, self.now)

    def up(
        self, number: int, *, outbound: bool = False, address: str | None = None, group: str | None = None
    ):
        """A link comes up, and what has to go goes; returns whether it stays, and what went."""
        self.numbers += 1
        goes = self.links.up(LinkUp(self.numbers, _id(number), outbound, address, group=group), self.now)
        if goes is not None:
            self.links.down(goes.link)
        return goes is None or goes.link != self.numbers, goes

    def kept(self, *, outbound: bool) -> set[int]:
        return {link.number for link in self.links.all() if link.outbound == outbound}

    def look(self, seconds: float = limits.MEMBERS_INTERVAL_S) -> list[tuple[str, bytes | None]]:
        self.now += seconds
        self.links.wake(self.now)
        effects = self.outbox.drain()
        assert all(isinstance(e, Dial) for e in effects)
        return [(e.address, e.node_id) for e in effects]

    def dials(self, seconds: float, failing: bool = True, after: float = 0.0) -> list[tuple[float, str]]:
        """All dials within some time, each failing at once, or `after` some seconds."""
        found = []
        under_way: list[tuple[float, str]] = []
        end = self.now + seconds
        while self.now < end:
            for address, _ in self.look():
                found.append((self.now, address))
                under_way.append((self.now + after, address))
            for at, address in list(under_way):
                if failing and at <= self.now:
                    under_way.remove((at, address))
                    self.links.dial_failed(address)
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
            goes = ends[end].links.up(LinkUp(number, _id(own[1 - end]), outbound, None), 0.0)
            if goes is not None:
                ends[end].links.down(goes.link)
    kept = [[link.number for link in end.links.all()] for end in ends]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 1


def test_a_link_to_ourselves_is_hung_up():
    bench = Bench()
    assert bench.up(100, outbound=True, address="me") == (False, Hangup(1, "that is ourselves"))
    assert len(bench.links) == 0


def _full(outbound: int = 0) -> Bench:
    """A node whose links are all taken, the oldest of them dialled by itself."""
    bench = Bench()
    for number in range(limits.LINKS_MAX):
        assert bench.up(number, outbound=number < outbound, address=f"n{number}")[0]
    return bench


def test_a_full_node_lets_a_newcomer_in_now_and_then():
    bench = _full()
    stays, goes = bench.up(1000)
    assert stays and goes.reason == "making room for a newcomer"
    assert len(bench.links) == limits.LINKS_MAX
    assert bench.up(1001) == (False, Hangup(limits.LINKS_MAX + 2, "no room for more links"))
    bench.now += limits.YIELD_INTERVAL_S
    assert bench.up(1001)[0]


def test_newcomers_never_drive_out_our_own_choice_nor_the_longest_lived():
    bench = _full(outbound=8)
    inbound, ours = sorted(bench.kept(outbound=False)), bench.kept(outbound=True)
    for number in range(500):
        bench.now += limits.YIELD_INTERVAL_S
        assert bench.up(1000 + number)[0]
    assert bench.kept(outbound=True) == ours
    assert set(inbound[: len(inbound) // 2]) <= bench.kept(outbound=False)
    assert len(bench.links) == limits.LINKS_MAX


def test_the_largest_network_group_gives_way_first():
    bench = Bench()
    for number in range(limits.LINKS_MAX):
        assert bench.up(number, group="bad" if number % 4 == 0 else f"g{number}")[0]
    bad = {link.number for link in bench.links.all() if link.group == "bad"}
    for number in range(5):
        bench.now += limits.YIELD_INTERVAL_S
        assert bench.up(1000 + number, group=f"new {number}")[1].link in bad


def test_a_link_that_we_dialled_finds_room():
    stays, goes = _full(outbound=2).up(1000, outbound=True)
    assert stays and goes.link > limits.LINKS_MAX // 2, "one of those that came last"
    assert _full(outbound=limits.LINKS_MAX).up(1000, outbound=True)[0]


# --- whoever wants to surround us ---------------------------------------------------------------------


def test_dials_two_even_if_inbound_links_suffice():
    bench = Bench()
    for number in range(20):
        bench.up(number)
    for number in range(50, 60):
        bench.member(number)
    while dials := bench.look():
        for address, _ in dials:
            bench.up(int(address[1:]), outbound=True, address=address)
    assert len(bench.kept(outbound=True)) == limits.LINKS_OUTBOUND_MIN
    bench.links.down(min(bench.kept(outbound=True)))
    assert len(bench.look()) == 1


def test_no_more_than_two_outbound_links_into_one_network():
    bench = Bench()
    for number in range(limits.LINKS_MIN):
        bench.up(number)
    for number in range(50, 60):
        bench.member(number)
    for number in (50, 51):
        assert bench.up(number, outbound=True, address=f"n{number}", group="1.2.3")[0]
    stays, goes = bench.up(52, outbound=True, address="n52", group="1.2.3")
    assert not stays and goes.reason == "enough links into that network"
    assert bench.up(53, outbound=True, address="n53", group="9.9.9")[0]
    assert bench.up(54, outbound=True, address="n54", group=None)[0], "a LAN is no group"
    assert bench.up(55, group="1.2.3")[0], "who dials us may be behind the same router as others"
    bench.links.down(1)
    dialled = {address for _, address in bench.dials(30.0)}
    assert "n52" not in dialled, "it is known where that leads"


def test_whoever_was_down_may_be_the_other_half_and_takes_a_place_in_its_network():
    bench = Bench()
    for number in range(limits.LINKS_MIN):
        bench.up(number)
    for number in (50, 51):
        bench.up(number, outbound=True, address=f"n{number}", group="1.2.3")
    bench.member(52, health=Health.DOWN)
    assert bench.up(52, outbound=True, address="n52", group="1.2.3")[0]
    ours = [link.address for link in bench.links.all() if link.outbound]
    assert ours == ["n50", "n52"]


def test_anchors_are_the_two_oldest_that_we_chose():
    bench = Bench()
    bench.up(1)
    for number in (2, 3, 4):
        bench.up(number, outbound=True, address=f"n{number}")
    assert bench.links.anchors() == [("n2", _id(2)), ("n3", _id(3))]
    bench.links.down(2)
    assert bench.links.anchors() == [("n3", _id(3)), ("n4", _id(4))]


# --- whom to dial -----------------------------------------------------------------------------------


def test_a_member_with_several_addresses_is_dialled_once_at_a_time():
    """Two links that we dialled could be kept crosswise by the two ends, and both be closed."""
    bench = Bench()
    bench.member(1, "lan", "wan", "ipv6")
    ((first, _),) = bench.look()
    assert bench.look() == []
    bench.links.dial_failed(first)
    tried = {first}
    for _ in range(30):
        for address, _ in bench.look():
            tried.add(address)
            bench.links.dial_failed(address)
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


def test_those_who_left_are_not_dialled_and_those_who_came_back_are():
    bench = Bench()
    bench.member(1, health=Health.LEFT)
    assert bench.dials(60.0) == []
    bench.member(1)
    assert len(bench.dials(3.0)) == 1


def test_down_members_are_dialled_even_with_links_enough():
    """All of them may be in our half of a partition. Who is merely suspected mostly answers in a moment: in a
    calm swarm of 12 nodes (seed 486215926) each false suspicion made a link."""
    bench = Bench()
    bench.member(60, health=Health.SUSPECT)
    for number in range(1, 2 * limits.LINKS_WANTED):
        bench.member(number)
        bench.up(number)
    for number in range(50, 60):
        bench.member(number, health=Health.DOWN)
    found = bench.dials(limits.REDIAL_DOWN_INTERVAL_S)
    assert {address for _, address in found} == {f"n{number}" for number in range(50, 60)}
    assert len(found) == 10


@pytest.mark.parametrize("count", [12, 60])
def test_those_who_are_gone_leave_room_for_dials_to_the_living(count):
    """Their addresses may swallow packets, so that dials take long; and anybody can make such rows up."""
    bench = Bench()
    for number in range(limits.LINKS_WANTED):
        bench.up(number, outbound=number < limits.LINKS_OUTBOUND_MIN)
    for number in range(200, 200 + count):
        bench.member(number, health=Health.DOWN)
    assert len(bench.dials(60.0, failing=False)) > 2
    for number in range(limits.LINKS_OUTBOUND_MIN):
        bench.links.down(number + 1)
        bench.member(50 + number)
    dialled = [address for address, _ in bench.look()]
    assert {"n50", "n51"} <= set(dialled)
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


def test_whom_we_were_told_of_is_known_by_where_it_answers_and_by_its_pin():
    pins = {"told:1": _id(1), "old:1": _id(8)}
    addresses = ("told:1", "told:2", "old:1", "old:2")
    remembered = frozenset({"old:1", "old:2"})
    info = replace(builders.NOBODY, bootstrap=addresses, pins=pins, remembered=remembered)
    links = Links(_id(100), Roster(_id(100)), info, random.Random(0), Outbox())
    assert links.given_ids() == {_id(1)}
    for number, address in enumerate(("told:2", "old:2", "n5:7700"), 4):
        links.up(LinkUp(number, _id(number), True, address), 0.0)
    assert links.given_ids() == {_id(1), _id(4)}
