"""Who takes part: those who are gone count, unless most of the others have been there ever since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.protocol.history.peer_claims import STAYED_S, Company
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders

ROW = builders.row(builders.identity(0))


class Swarm:
    """What a node knows of as many others, all of whom have published; and time, in looks of a minute."""

    def __init__(self, members: int) -> None:
        self.roster, self.ledger = Roster(bytes(32)), Ledger()
        self.company = Company(self.roster, self.ledger)
        self.now = 0.0
        for number in range(1, members + 1):
            self.come(number)

    def come(self, number: int, incarnation: int = 1, *, leaving: bool = False) -> None:
        node_id = bytes([number]) * 32
        self.ledger.note_last(node_id, 1, b"record")
        body = replace(ROW.body, incarnation=incarnation, leaving=leaving)
        self.roster.update(MemberRecord(node_id=node_id, body=body, data=bytes([number])), self.now)

    def go(self, *numbers: int) -> None:
        for number in numbers:
            self.roster.judge(bytes([number]) * 32, Health.DOWN, self.now)

    def count(self, minutes: float = 0.0) -> int:
        """How many take part after so long."""
        until = self.now + 60.0 * minutes
        while self.now <= until:
            self.company.look(self.now)
            self.now += 60.0
        return len(self.company)


HOUR = STAYED_S / 60.0


def test_who_went_while_most_stayed_takes_part_for_an_hour_more():
    swarm = Swarm(5)
    swarm.go(5)
    assert swarm.count(HOUR - 5) == 5
    assert swarm.count(6) == 4


def test_who_comes_back_takes_part_again():
    swarm = Swarm(5)
    swarm.go(5)
    assert swarm.count(HOUR + 5) == 4
    swarm.come(5, incarnation=2)
    assert swarm.count(1) == 5
    swarm.go(5)
    assert swarm.count(HOUR - 5) == 5, "it went anew"


def test_who_leaves_takes_no_part_from_then_on():
    swarm = Swarm(5)
    swarm.come(5, incarnation=2, leaving=True)
    assert swarm.count() == 4


def test_members_that_come_once_and_die_are_never_most_of_a_swarm():
    swarm = Swarm(4)
    for number in range(5, 105):
        swarm.come(number)
        swarm.count(5)
        swarm.go(number)
        swarm.count(25)
    assert len(swarm.roster.members()) == 104 and swarm.count() <= 4 + 3


@pytest.mark.parametrize("gone", [(3, 4, 5, 6), (4, 5, 6)])
def test_where_most_are_gone_or_half_all_count(gone):
    """It may be we who are cut off from them, with a few others or with liars."""
    swarm = Swarm(6)
    swarm.go(*gone)
    assert swarm.count(3 * HOUR) == 6


def test_after_most_came_back_the_others_have_an_hour_to_do_so_too():
    swarm = Swarm(7)
    swarm.go(3, 4, 5, 6, 7)
    swarm.count(3 * HOUR)
    swarm.come(3, incarnation=2)
    swarm.come(4, incarnation=2)
    assert swarm.count(HOUR - 5) == 7
    assert swarm.count(10) == 4
