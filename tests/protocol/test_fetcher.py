"""Fetching: within bounds, each chunk once at a time, and everything in the end, whoever lies or dies."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from tests.protocol.fetching import Net, blob_of, key_of


def test_bounds_are_kept_and_used():
    net = Net(links=dict.fromkeys(range(1, 7), True))
    net.want(1, *range(100))
    for link in net.links:
        net.fetcher.hint(link, key_of(1))
    assert len(net.plan()) == limits.FETCHES_MAX
    net = Net(links={1: True, 2: False})
    net.want(1, *range(100))
    net.fetcher.hint(1, key_of(1))
    net.fetcher.hint(2, key_of(1))
    assert len(net.plan()) == 2 * limits.FETCHES_PER_LINK_MAX


def test_outbound_gets_and_inbound_asks():
    for outbound in (True, False):
        net = Net(links={1: outbound})
        net.want(1, 1)
        net.fetcher.hint(1, key_of(1))
        assert net.plan() == [(1, blob_of(1))]  # `plan` checks which


def test_a_large_chunk_is_given_more_time_and_so_is_what_waits_behind_it():
    net = Net(links={1: True})
    net.want(1, 1, 2, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, key_of(1))
    assert len(net.plan()) == 2
    first, second = (flight.deadline for flight in net.fetcher.requests)
    assert first == limits.FETCH_TIMEOUT_S
    assert second == 2 * limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S


def test_what_comes_slowly_is_not_stalled():
    net = Net(links={1: True})
    fetcher = net.fetcher
    assert not fetcher.is_stalled(key_of(1), 1e9)
    net.want(1, *range(3))
    for chunk in range(3):
        net.plan()
        net.pass_time(limits.FETCH_TIMEOUT_S - 1)
        assert not fetcher.is_stalled(key_of(1), net.now)
        assert fetcher.is_stalled(key_of(1), net.now + 2)
        net.plan()
        net.arrive(blob_of(chunk))
    assert not fetcher.is_stalled(key_of(1), 1e9), "it is here"


def test_a_chunk_that_waits_behind_others_on_its_link_is_not_stalled():
    """It is waited for as long as these may take. Once it was asked for in vain, asking again is no reason to
    wait longer."""
    net = Net(links={1: True})
    net.want(1, *range(3), size=limits.CHUNK_BYTES_MAX)
    net.want(2, 3, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, key_of(1))
    net.fetcher.hint(1, key_of(2))
    net.plan()
    last = net.fetcher.requests.current[blob_of(3)]
    assert last.deadline > 3 * limits.FETCH_TIMEOUT_S, "behind three others"
    while net.now + 2 * limits.FETCH_RETRY_S < last.deadline:
        net.pass_time()
        net.plan()
        assert not net.fetcher.is_stalled(key_of(2), net.now)
    net.pass_time(3 * limits.FETCH_RETRY_S)
    net.plan()
    net.pass_time(limits.FETCH_RETRY_S)
    net.plan()
    assert blob_of(3) in net.fetcher.requests.current, "it is asked for again"
    assert net.fetcher.is_stalled(key_of(2), net.now)


def test_what_a_link_took_with_it_is_fetched_elsewhere():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.drop(1)
    assert net.plan() == [] or net.flights == {blob_of(1): 2}
    net.pass_time()
    net.plan()
    assert net.flights == {blob_of(1): 2}


def test_only_what_is_on_its_way_may_be_put_to_us():
    net = Net(links={1: False})
    net.want(1, 1, size=77)
    assert net.fetcher.expected_size(blob_of(1)) is None
    net.fetcher.hint(1, key_of(1))
    net.plan()
    assert net.fetcher.expected_size(blob_of(1)) == 77
    assert net.fetcher.expected_size(blob_of(2)) is None
    net.arrive(blob_of(1))
    assert net.fetcher.expected_size(blob_of(1)) is None


def test_hints_are_for_wants_and_links_that_there_are():
    net = Net(links={1: True})
    net.fetcher.hint(1, key_of(1))
    net.want(1, 1)
    net.fetcher.hint(99, key_of(1))
    assert net.plan() == []
    net.pass_time()
    assert net.plan() == [(1, blob_of(1))]


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 12))
def test_everything_arrives_whatever_fails(seed, links, wants):
    """Random failures, silences, links that come and go, wrong hints and forgotten keys."""
    rng = random.Random(seed)
    net = Net(seed, {n: rng.random() < 0.5 for n in range(links)})
    keys = {k: rng.sample(range(40), rng.randint(1, 8)) for k in range(wants)}
    for key, chunks in keys.items():
        net.want(key, *chunks)
    fresh = 100
    for _ in range(400):
        if len(net.fetched) == wants:
            break
        net.plan()
        for blob in list(net.flights):
            dice = rng.random()
            if dice < 0.4:
                net.arrive(blob)
            elif dice < 0.6:
                net.fail(blob)
        if rng.random() < 0.1:
            fresh += 1
            net.links[fresh] = rng.random() < 0.5
            net.fetcher.link_up(fresh, net.links[fresh])
        if rng.random() < 0.1 and len(net.links) > 1:
            net.drop(rng.choice(sorted(net.links)))
        net.fetcher.hint(rng.choice(sorted(net.links)), key_of(rng.randrange(wants)))
        net.pass_time(rng.choice([0.01, 0.5, 5.0, 61.0]))
    assert sorted(net.fetched) == sorted(key_of(k) for k in keys)


@pytest.mark.parametrize("busy", [True, False])
def test_deadline_never_lies_in_the_past(busy):
    """All slots taken while others wait: nothing to do until one is free."""
    net = Net(links=dict.fromkeys(range(1, 8), True))
    net.want(0, *range(500, 510))
    net.plan()
    net.pass_time(0.5)
    net.want(1, *range(40))
    if busy:
        for link in net.links:
            net.fetcher.hint(link, key_of(1))
    for _ in range(20):
        net.plan()  # checks it
        net.pass_time(0.3)
