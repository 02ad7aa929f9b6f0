"""Whom a chunk is asked for: holders first, the least busy of them, then anybody."""

from __future__ import annotations

from gossamer.protocol import limits
from tests.protocol.fetching import Net, blob_of, key_of


def test_load_is_shared_between_holders():
    net = Net(links=dict.fromkeys(range(1, 5), True))
    net.want(1, *range(8))
    for link in net.links:
        net.fetcher.hint(link, key_of(1))
    links = [link for link, _ in net.plan()]
    assert sorted(links) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_holders_come_first_and_anybody_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    assert net.plan() == []
    net.fetcher.hint(2, key_of(1))
    assert net.plan() == [(2, blob_of(1))]
    net.want(2, 2)
    assert net.plan() == []
    net.pass_time()
    assert [blob for _, blob in net.plan()] == [blob_of(2)]


def test_a_busy_holder_is_helped_out_by_others_after_a_moment():
    """A joiner is told of everything by the first peer it meets; the others have it too."""
    net = Net(links={1: True, 2: True, 3: False})
    net.want(1, *range(50))
    net.fetcher.hint(1, key_of(1))
    assert [link for link, _ in net.plan()] == [1] * limits.FETCHES_PER_LINK_MAX
    net.pass_time()
    assert sorted(link for link, _ in net.plan()) == [2] * 4 + [3] * 4


def test_a_holder_of_parts_is_asked_for_few_at_a_time():
    net = Net(links={1: True})
    net.want(1, *range(6))
    for number in range(6):
        net.fetcher.hint_part(1, key_of(1), blob_of(number))
    assert len(net.plan()) == limits.PARTS_PER_LINK_MAX
    net.fetcher.hint(1, key_of(1))
    assert len(net.plan()) == limits.FETCHES_PER_LINK_MAX - limits.PARTS_PER_LINK_MAX


def test_nobody_is_guessed_at_while_parts_come_along():
    net = Net(links={1: True, 2: True})
    net.want(1, *range(12))
    for number in range(10):
        net.fetcher.hint_part(1, key_of(1), blob_of(number))
        net.plan()
        net.pass_time(limits.FETCH_RETRY_S / 2)
    assert set(net.flights.values()) == {1}
    net.pass_time()
    net.fetcher.hint_part(1, key_of(1), blob_of(9))  # no news
    net.plan()
    assert 2 in net.flights.values()
