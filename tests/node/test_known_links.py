"""`known_links`: our links, and those that the living tell of, by the beginnings of ids."""

from __future__ import annotations

from gossamer.node.daemon.monitoring.status import known_links
from gossamer.protocol.membership.members import Health, Member
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders


def member(number: int, *dialled: int, health: Health = Health.ALIVE, node_id: bytes | None = None) -> Member:
    row = builders.row(builders.identity(number), dialled=tuple(start(n) for n in dialled))
    return Member(
        MemberRecord(node_id=node_id or row.node_id, body=row.body, data=row.data), health, 0.0, 0.0
    )


def start(number: int) -> bytes:
    return builders.identity(number).node_id[:4]


def ids(*numbers: int) -> list[bytes]:
    return [builders.identity(number).node_id for number in numbers]


def test_our_own_links_and_what_the_others_tell():
    others = [member(1, 2), member(2), member(3, 1, 2)]
    assert known_links(ids(1), others) == [(0, 1), (1, 2), (1, 3), (2, 3)]
    assert known_links([], []) == []


def test_of_our_links_nobody_tells_us_and_strangers_have_no_place():
    others = [member(1, 0, 9), member(2, 2)]
    assert known_links(ids(9), others) == []


def test_both_ends_may_tell_of_a_link():
    assert known_links([], [member(1, 2), member(2, 1)]) == [(1, 2)]


def test_the_dead_have_no_links():
    for gone in (Health.DOWN, Health.LEFT):
        assert known_links([], [member(1, 2, health=gone), member(2), member(3, 1)]) == []
    assert known_links([], [member(1, 2, health=Health.SUSPECT), member(2)]) == [(1, 2)]


def test_a_beginning_that_two_share_names_nobody():
    twin = start(2) + bytes(28)
    assert known_links([], [member(1, 2, 3), member(2), member(3), member(4, node_id=twin)]) == [(1, 3)]
    gone = member(4, node_id=twin, health=Health.DOWN)
    assert known_links([], [member(1, 2, 3), member(2), member(3), gone]) == [(1, 2), (1, 3)]
