"""Who did not bring a chunk is asked again later and later, and others meanwhile."""

from __future__ import annotations

import random

import pytest

from gossamer.protocol import limits
from tests.protocol.fetching import Net, blob_of, key_of


def test_failure_is_retried_elsewhere_at_once_and_there_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.fetcher.hint(2, key_of(1))
    ((first, blob),) = net.plan()
    net.fail(blob)
    ((second, _),) = net.plan()
    assert {first, second} == {1, 2}
    net.fail(blob)
    assert net.plan() == []
    net.pass_time()
    assert len(net.plan()) == 1


def test_silence_is_a_failure():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    assert len(net.plan()) == 1
    net.pass_time(limits.FETCH_PATIENCE_S - 0.1)
    assert net.plan() == []
    net.pass_time(0.2)
    assert net.plan() == []
    assert net.fetcher.expected_size(blob_of(1)) is None
    assert not net.fetcher.wants.any_has_holder, "it is not believed any more"


def test_who_was_silent_is_not_believed_again():
    """Who is busy says so. A liar that says nothing must not be asked before others are tried."""
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    assert [link for link, _ in net.plan()] == [1]
    net.pass_time(limits.FETCH_PATIENCE_S + 0.1)
    tried = []
    while len(tried) < 2:
        for link, blob in net.plan():
            tried.append(link)
            net.fail(blob)
        net.now = net.now + limits.FETCH_SOON_S
    assert sorted(tried) == [2, 3]


def test_a_claim_that_is_repeated_does_not_wash_a_failure_away():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint_part(1, key_of(1), blob_of(1))
    ((_, blob),) = net.plan()
    net.fail(blob)
    net.fetcher.hint_part(1, key_of(1), blob_of(1))
    assert net.plan() == []


def test_many_chunks_that_are_declined_are_asked_for_again_together():
    """Each has a time of its own, and a fetcher that woke for each would hardly sleep."""
    net = Net(links={1: True})
    net.want(1, *range(30))
    net.fetcher.hint(1, key_of(1))
    rng, declines, woken = random.Random(1), list[tuple[float, bytes]](), 0
    while net.now < 2.0:
        declines += [(net.now + rng.uniform(0.003, 0.005), blob) for _, blob in net.plan()]
        declines.sort()
        if declines and declines[0][0] <= net.fetcher.deadline():
            net.now, blob = declines.pop(0)
            net.fail(blob)
        else:
            net.now = net.fetcher.deadline()
            woken += 1
    assert woken <= 2.0 / limits.FETCH_TURN_MIN_S


def test_a_failure_of_somebody_else_changes_nothing():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.fetcher.failed(2, blob_of(1), net.now)
    net.fetcher.failed(1, blob_of(7), net.now)
    assert net.plan() == []


def test_what_a_link_failed_is_forgotten_with_it():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.fail(blob_of(1))
    assert {link for link, _ in net.fetcher.requests._rests} == {1}
    net.drop(1)
    assert not net.fetcher.requests._rests


def _asked_in_vain(net: Net, seconds: float) -> int:
    """How often links are asked meanwhile; they decline all of it."""
    asked, end = 0, net.now + seconds
    while net.now < end:
        for _, blob in net.plan():
            asked += 1
            net.fail(blob)
        net.pass_time(0.1)
    return asked


def test_what_nobody_was_found_to_have_is_asked_for_seldom():
    net = Net(links=dict.fromkeys(range(8), True))
    net.want(1, 0)
    _asked_in_vain(net, limits.ORPHAN_PATIENCE_S + 8 * limits.FETCH_RETRY_MAX_S)
    assert _asked_in_vain(net, 120.0) <= 8 * 120.0 / limits.ORPHAN_RETRY_MAX_S * 2


def test_whoever_did_not_bring_what_it_said_that_it_holds_gains_nothing_by_saying_so_again():
    net = Net(links={1: True})
    net.want(1, 0)
    net.fetcher.hint(1, key_of(1))
    assert _asked_in_vain(net, 10.0) > 3
    while net.plan():
        net.fail(blob_of(0))
    net.fetcher.hint(1, key_of(1))
    assert net.plan() == [] and not net.fetcher.wants.any_has_holder


def test_whoever_insists_that_it_holds_what_it_does_not_send_is_asked_no_more_often():
    net = Net(links={1: True})
    net.want(1, 0)
    asked = 0
    for _ in range(600):
        net.fetcher.hint(1, key_of(1))
        asked += _asked_in_vain(net, 0.1)
    assert asked <= 60.0 / limits.FETCH_RETRY_MAX_S + 10


def test_a_holder_that_is_believed_gains_nothing_by_saying_so_again():
    net = Net(links={1: True})
    net.want(1, 0)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.fail(blob_of(0))
    net.fetcher.hint(1, key_of(1))
    assert net.plan() == []


def test_a_busy_holder_is_asked_again_soon_and_believed_a_few_times():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    asked = []
    while net.now < 2.0:
        for _, blob in net.plan():
            asked.append(net.now)
            net.fail(blob)
        net.now = round(net.now + 0.05, 2)
    assert asked[:4] == pytest.approx([0.0, 0.1, 0.3, 0.7], abs=0.06)


def test_a_liar_about_a_size_does_not_keep_an_honest_chunk_away():
    """It lists the hash of somebody's chunk with a size of its own, and is heard of first."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1, size=50)
    net.want(2, 1, size=100)
    for key in (1, 2):
        net.fetcher.hint(1, key_of(key))
    for _ in range(10):
        net.plan()
        if net.flights and net.sizes[blob_of(1)] == 100:
            break
        for blob in list(net.flights):
            net.fail(blob)  # 100 bytes where 50 were promised
        net.pass_time(0.2)
    assert net.sizes[blob_of(1)] == 100
