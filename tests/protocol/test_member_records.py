"""Rows: gathered, told to links in turn, and to nobody who has them."""

from __future__ import annotations

import math
import random

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Outbox, Send
from gossamer.protocol.events import LinkUp, Progress
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.member_records import Presence
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.messages import Records, RosterSummary, Suspect
from gossamer.protocol.records import Claim, MemberRecord
from tests.protocol import builders

OWN = builders.identity(0)


class Bench:
    """A presence with links 1..n to the nodes of the same numbers, and the times at which it wakes."""

    def __init__(self, links: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.now = 100.0
        self.roster = Roster(OWN.node_id)
        outbox = Outbox()
        self.links = Links(OWN.node_id, self.roster, builders.NOBODY, rng, outbox)
        for number in range(1, links + 1):
            self.links.up(LinkUp(number, builders.identity(number).node_id, True, None), 0.0)
        self.presence = Presence(
            OWN,
            builders.SMALL.swarm_id,
            builders.NOBODY,
            self.roster,
            self.links,
            rng,
            outbox,
        )
        self.machine = builders.Drained(self.presence, outbox)

    def receive(self, row: MemberRecord, link: int) -> list[Effect]:
        if self.machine.is_known(row.data, link):
            return []
        return self.machine.received(row, link, self.now)

    def tick(self) -> list[tuple[int, list[bytes]]]:
        """The rows told at the next wake, by link."""
        self.now = max(self.now, self.machine.deadline())
        told = _rows(self.machine.wake(self.now))
        assert self.machine.deadline() > self.now
        return told


def _rows(effects: list[Effect]) -> list[tuple[int, list[bytes]]]:
    return [
        (effect.link, [data for data, _ in effect.message.entries])
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Records)
    ]


def _row(number: int, heartbeat: int = 1, **changes: object) -> MemberRecord:
    return builders.row(builders.identity(number), heartbeat=heartbeat, **changes)


def test_rows_are_gathered_and_told_to_several_links_in_turn():
    bench = Bench(8)
    bench.tick()
    rows = [_row(number) for number in range(20, 25)]
    for row in rows:
        assert bench.receive(row, 1) == [], "not at once"
    links = []
    for _ in range(limits.MEMBERS_REPEATS):
        told = [(link, sent) for link, sent in bench.tick() if link != 1]
        assert 1 <= len(told) <= limits.MEMBERS_FANOUT
        for link, sent in told:
            assert {row.data for row in rows} <= set(sent)
            links.append(link)
    assert len(set(links)) == len(links)
    assert not any(row.data in sent for row in rows for _ in range(9) for _, sent in bench.tick())


def test_a_row_tells_what_the_trainer_reports_and_of_what_it_must_not_hold_the_bound():
    """A loss that has diverged, say: others would refuse the row."""
    bench = Bench(0)
    for loss, told in (
        (2.5, 2.5),
        (-2.5, -2.5),
        (math.nan, limits.LOSS_MAX),
        (math.inf, limits.LOSS_MAX),
        (2 * limits.LOSS_MAX, limits.LOSS_MAX),
        (-2 * limits.LOSS_MAX, -limits.LOSS_MAX),
    ):
        bench.machine.progress(Progress(1, 1, 30.0, loss, "cpu"))
        bench.machine.beat()
        assert (bench.machine.record.loss, bench.machine.record.tokens_per_s) == (told, 30.0)


def test_what_cannot_wait_does_not():
    bench = Bench(8)
    bench.receive(_row(20), 1)
    bench.roster.judge(builders.identity(20).node_id, Health.SUSPECT, bench.now)
    refutation = _row(20, heartbeat=2)
    told = _rows(bench.receive(refutation, 1))
    assert len(told) == limits.PUSH_FANOUT
    assert all(sent == [refutation.data] and link != 1 for link, sent in told)
    own = _rows(bench.machine.leave())
    assert [sent for _, sent in own] == [[bench.machine.data]] * 8, "who is linked to us hears it from us"
    assert bench.machine.record.leaving


def test_beats_come_at_their_interval_and_changes_with_the_next_rows():
    bench = Bench(1)
    bench.tick()
    first = bench.machine.record.heartbeat
    began = bench.now
    while bench.machine.record.heartbeat == first:
        bench.tick()
    assert bench.now - began == limits.HEARTBEAT_INTERVAL_S
    bench.presence.round = 1
    told = [sent for _, sent in bench.tick()]
    assert told == [[bench.machine.data]]
    assert bench.machine.record.heartbeat == first + 2


def test_in_a_large_swarm_rows_are_renewed_rarely_and_at_once_only_for_whether_one_publishes():
    bench = Bench(1)
    for seed in range(20, 148):
        bench.receive(_row(seed), 1)
    assert len(bench.roster.live()) == 128
    bench.tick()
    first = bench.machine.record.heartbeat
    bench.presence.round = 1
    bench.tick()
    assert bench.machine.record.heartbeat == first + 1, "it publishes now"
    bench.presence.round, bench.presence.claims = 2, (Claim(1, 1, bytes(32), bytes(32)),)
    renewed = bench.now
    while bench.machine.record.heartbeat == first + 1:
        bench.tick()
    assert 6.0 <= bench.now - renewed <= 14.0, "9 s on average"
    for member in bench.roster.live()[2:]:
        bench.roster.judge(member.record.node_id, Health.DOWN, bench.now)
    renewed = bench.now
    while bench.machine.record.heartbeat == first + 2:
        bench.tick()
    assert bench.now - renewed == limits.HEARTBEAT_INTERVAL_S, "as soon as the swarm is small again"
    assert bench.roster.delay_s > 4, "though others may not have noticed yet"


def test_a_row_tells_the_links_that_we_dialled_and_changes_with_the_next_beat():
    bench = Bench(limits.LINKS_STATED_MAX + 3)
    bench.links.up(LinkUp(99, builders.identity(99).node_id, False, None), 0.0)
    assert builders.identity(99).node_id[:4] not in bench.machine.record.dialled, "the other end tells of it"
    oldest = [builders.identity(number).node_id[:4] for number in range(1, limits.LINKS_STATED_MAX + 1)]
    assert list(bench.machine.record.dialled) == oldest
    bench.tick()
    signed = bench.machine.record.age
    bench.links.down(1)
    bench.tick()
    assert bench.machine.record.age == signed, "a link that comes or goes is no reason to sign anew"
    while bench.machine.record.age == signed:
        bench.tick()
    assert builders.identity(1).node_id[:4] not in bench.machine.record.dialled


def test_the_row_of_who_is_missing_is_no_news():
    """It is from before it went, and would pass for a sign of life."""
    bench = Bench(4)
    rows = [_row(20), _row(21)]
    for row in rows:
        bench.receive(row, 1)
    bench.roster.judge(rows[0].node_id, Health.SUSPECT, bench.now)
    told = [row for _ in range(limits.MEMBERS_REPEATS) for _, sent in bench.tick() for row in sent]
    assert rows[0].data not in told
    assert rows[1].data in told


@pytest.mark.parametrize("health", list(Health))
def test_a_roster_does_not_bring_the_missing_back(health):
    """Who left is of no use to those who have never heard of it."""
    bench = Bench(1)
    row = _row(20)
    bench.receive(row, 1)
    bench.roster.judge(row.node_id, health, bench.now)
    known = (), ((row.node_id, 0, 1),)
    sent = [bench.machine.exchange(1, RosterSummary(each, answer=True)) for each in known]
    is_alive = health is Health.ALIVE
    told = [any(row.data in data for _, data in _rows(effects)) for effects in sent]
    assert told == [is_alive, is_alive or health is Health.LEFT]


def test_who_asks_for_all_records_again_and_again_gets_them_a_few_times_in_a_while():
    """Each empty roster drew the rows of all members, megabytes in a large swarm."""
    bench = Bench(2)
    empty = RosterSummary((), answer=False)
    answered = [bool(bench.machine.exchange(1, empty)) for _ in range(100)]
    assert sum(answered) == limits.ROSTERS_PER_LINK_MAX
    assert bench.machine.exchange(2, empty), "others are answered"
    begun = bench.now
    while not bench.machine.exchange(1, empty):
        bench.tick()
    assert bench.now - begun <= limits.ANTI_ENTROPY_INTERVAL_S + limits.MEMBERS_INTERVAL_S


def test_a_suspicion_of_ourselves_costs_a_new_row_once_a_while():
    bench = Bench(6)
    own = bench.machine.record
    invented = Suspect(builders.identity(0).node_id, own.incarnation, 2**53)
    answer = bench.machine.refute(3, invented, bench.now)
    assert _rows(answer) == [(3, [bench.machine.data])] and bench.machine.record == own
    newest = [Suspect(invented.node_id, *bench.machine.record.age)]
    for _ in range(100):
        bench.machine.refute(3, newest[-1], bench.now)
        newest.append(Suspect(invented.node_id, *bench.machine.record.age))
    assert bench.machine.record.heartbeat == own.heartbeat + 1
