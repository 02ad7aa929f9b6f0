"""What is wanted: of which sizes, what is lacking of it, and when it is complete."""

from __future__ import annotations

import pytest

from gossamer.protocol import limits
from tests.protocol.cost import calls
from tests.protocol.fetching import Net, blob_of, key_of


@pytest.mark.parametrize("is_here_first", [True, False])
def test_a_chunk_is_not_taken_for_one_of_another_size(is_here_first):
    """Nor looked for as that: its hash has one size, so nobody can have the other."""
    net = Net(links={1: True})
    net.true_sizes[blob_of(1)] = 100
    if is_here_first:
        net.have.add(blob_of(1))
    net.want(1, 1, size=100)
    net.want(2, 1, 2, size=99)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    if not is_here_first:
        net.arrive(blob_of(1))
    assert net.fetched == [key_of(1)]
    assert key_of(2) not in net.fetcher.wants and not net.fetcher.wants.keys_of(blob_of(2))


def test_one_hash_with_two_sizes_is_not_looked_for():
    net = Net(links={1: True})
    assert not net.fetcher.want(key_of(1), ((blob_of(1), 100), (blob_of(2), 100), (blob_of(1), 7)), 0.0)
    assert key_of(1) not in net.fetcher.wants and net.plan() == []


def test_more_can_be_found_missing_of_what_is_on_its_way():
    """Another chunk of it turned out damaged on disk."""
    net = Net(links={1: True})
    net.want(1, 1)
    net.plan()
    net.want(1, 1, 2)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.arrive(blob_of(1))
    assert net.fetched == []
    net.plan()
    net.arrive(blob_of(2))
    assert net.fetched == [key_of(1)]


def test_completion_is_told_once_for_each_key():
    net = Net(links={1: True})
    net.want(1, 1, 2)
    net.want(2, 2, 3)
    net.want(2, 2, 3)
    net.want(3, 1, 1)
    net.arrive(blob_of(2))
    assert net.fetched == []
    net.arrive(blob_of(3))
    assert net.fetched == [key_of(2)]
    net.arrive(blob_of(1))
    assert net.fetched == [key_of(2), key_of(1), key_of(3)]
    net.arrive(blob_of(1))
    assert len(net.fetched) == 3
    net.want(4, 1, 2)
    assert net.fetched[3:] == [key_of(4)]
    assert len(net.fetcher.wants) == 0


def test_forgotten_keys_are_not_fetched():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.fetcher.wants.forget(key_of(1))
    net.fetcher.wants.forget(key_of(9))
    assert net.plan() == []
    net.arrive(blob_of(1))
    assert net.fetched == []


def test_what_is_lacking_of_what_was_wanted_by_a_time():
    """Later wants do not count, nor those that nobody has been known to hold for long."""
    net = Net(links={1: True, 2: True})
    for key in (1, 2):
        net.want(key, key, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, key_of(2))
    net.plan()
    net.pass_time(1.0)
    net.want(3, 3, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, key_of(3))
    net.plan()
    wants = net.fetcher.wants
    assert (len(wants), len(wants.lacking(0.5, net.now)), len(wants.lacking(1.0, net.now))) == (3, 2, 3)
    assert (wants.chunks_lacking(0.5), wants.chunks_lacking(1.0)) == (2, 3)
    net.pass_time(limits.ORPHAN_PATIENCE_S)
    net.plan()
    assert (len(wants), len(wants.lacking(0.5, net.now)), len(wants.lacking(1.0, net.now))) == (3, 1, 2)
    net.arrive(blob_of(2))
    assert (len(wants), wants.lacking(0.5, net.now)) == (2, [])


def test_a_chunk_of_many_payloads_costs_each_of_them_no_more():
    """A liar may list the same chunks in all its deltas, and say that it holds them: that took minutes."""

    def cost(payloads: int) -> int:
        net = Net(links={1: True, 2: True})

        def learn() -> None:
            for key in range(payloads):
                net.want(key, *range(8))
                net.fetcher.plan(net.now)
            net.pass_time()
            net.fetcher.plan(net.now)
            for key in range(payloads):
                net.fetcher.hint(1, key_of(key))
            net.fetcher.plan(net.now)
            net.pass_time()
            net.fetcher.plan(net.now)

        return calls(learn)

    assert cost(400) < 5 * cost(100)


def test_a_chunk_that_may_be_longer_is_asked_for_again_at_once():
    """Who was asked for it at the length that a liar states could not bring it."""
    net = Net(links={1: True})
    net.want(1, 1, size=7)
    for _ in range(8):
        while not net.plan():
            net.pass_time()
        net.fail(blob_of(1))  # it rests from it for seconds in the end
    net.want(2, 1, size=100)
    net.pass_time()
    assert net.plan() == [(1, blob_of(1))]
    assert net.sizes[blob_of(1)] == 100
