"""What nobody is known to hold: each is asked of everybody, and delays nothing else."""

from __future__ import annotations

from itertools import pairwise

from gossamer.protocol import limits
from tests.protocol.cost import calls
from tests.protocol.fetching import Net, blob_of, key_of


def test_payloads_that_nobody_has_do_not_delay_those_that_somebody_has():
    """An author died before anyone had its payload of a thousand chunks; later ones are wanted behind it."""
    net = Net(links={1: True, 2: True})
    net.want(0, *range(1000))
    net.pass_time(5.0)
    for number in range(2000, 2020):
        net.want(number, number)
        net.fetcher.hint(1, key_of(number))
    tries = 0
    for _ in range(200):
        net.plan()
        for blob in list(net.flights):
            if blob in {blob_of(n) for n in range(2000, 2020)} and net.flights[blob] == 1:
                net.arrive(blob)
            else:
                net.fail(blob)
                tries += 1
        net.pass_time(0.05)
    assert len(net.fetched) == 20
    assert tries <= 10 * 2 * (limits.FETCHES_PER_LINK_MAX + 1), "a few guesses a second and link, not a flood"


def test_payloads_that_somebody_has_do_not_keep_those_away_that_nobody_speaks_of():
    """There is always another payload that is known to be held: the line is never idle."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    net.want(0, 1000, 1001, 1002)
    net.pass_time()
    for key in range(1, 40):
        net.want(key, *range(20 * key, 20 * key + 20))
        for link in net.links:
            net.fetcher.hint(link, key_of(key))
        net.plan()
        for blob in list(net.flights):
            net.arrive(blob)
    assert key_of(0) in net.fetched


def test_who_was_guessed_rightly_is_asked_for_the_rest():
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, *range(100))
    net.pass_time()
    net.plan()
    blob, link = next(iter(net.flights.items()))
    net.arrive(blob)
    assert net.fetcher.wants.holders_of(key_of(1), blob_of(99)) == {link}


def test_what_its_holders_lose_is_looked_for_everywhere():
    """A holder goes, or does not bring it: others may have it without having said so."""
    net = Net(links={1: True, 2: True, 3: True})
    for key in (1, 2):
        net.want(key, 10 * key, 10 * key + 1)
    net.fetcher.hint(1, key_of(1))
    net.fetcher.hint(2, key_of(2))
    net.plan()
    net.drop(1)
    while net.now < 40.0 and len(net.fetched) < 2:
        net.plan()
        for blob, link in list(net.flights.items()):
            if link == 3:
                net.arrive(blob)
        net.pass_time(0.5)
    assert sorted(net.fetched) == sorted([key_of(1), key_of(2)])


def _ask_all_day(
    net: Net, until: float, holder: tuple[int, bytes] | None = None
) -> dict[tuple[int, bytes], list[float]]:
    """Nobody has anything, but for one link perhaps that has one chunk: when each was asked for what."""
    asked: dict[tuple[int, bytes], list[float]] = {}
    while net.now < until and not net.fetched:
        started = net.plan()
        for link, blob in started:
            asked.setdefault((link, blob), []).append(net.now)
            if (link, blob) == holder:
                net.arrive(blob)
            else:
                net.fail(blob)
        net.now = net.now + 0.01 if started else net.fetcher.deadline()
    return asked


def test_however_many_payloads_nobody_has_each_is_asked_of_everybody():
    """Those that have waited longest do not have all the turns for ever."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(600):
        net.want(number, number)
        net.now += 0.001
    asked = _ask_all_day(net, 900.0, holder=(4, blob_of(599)))
    assert net.fetched == [key_of(599)]
    assert len(asked) > 6 * 300


def test_of_what_nobody_has_each_link_is_asked_again_each_minute():
    """Whatever was under way from somebody else when its turn came."""
    net = Net(links=dict.fromkeys(range(1, 16), True))
    net.want(1, *range(5))
    asked = _ask_all_day(net, 400.0)
    assert len(asked) == 15 * 5
    for times in asked.values():
        assert 400.0 - times[-1] < limits.ORPHAN_RETRY_MAX_S + 2.0
        assert max(b - a for a, b in pairwise(times)) < limits.ORPHAN_RETRY_MAX_S + 2.0


def test_who_is_linked_later_is_asked_for_all_of_it():
    """Also for what all the others have been asked for, and what is under way when it comes."""
    net = Net(links={1: True})
    for number in range(1_200):
        net.want(number, number)
    asked = _ask_all_day(net, 150.0)
    assert {link for link, _ in asked} == {1}
    net.links[2] = True
    net.fetcher.link_up(2, True)
    asked = _ask_all_day(net, 150.0 + 2 * 1_200)
    assert sum(link == 2 for link, _ in asked) == 1_200


def test_a_link_that_rested_while_somebody_else_held_it_is_asked_again():
    """The other one went before it brought anything: whom it was not asked of for that is asked again."""
    net = Net(links={1: True, 2: True})
    net.want(1, 0)
    _ask_all_day(net, 100.0)
    net.fetcher.hint(2, key_of(1))
    net.plan()
    net.pass_time(2 * limits.FETCH_RETRY_MAX_S)
    net.plan()
    net.drop(2)
    asked = _ask_all_day(net, net.now + 2 * limits.ORPHAN_RETRY_MAX_S)
    assert (1, blob_of(0)) in asked


def test_what_was_forgotten_and_is_wanted_again_is_asked_for_again():
    """While a link that declined it rests from it: nothing else is looked for meanwhile."""
    net = Net(links={1: True})
    net.want(1, 0)
    net.pass_time()
    for _ in range(4):
        while not net.plan():
            net.now = net.fetcher.deadline()
        net.fail(blob_of(0))
    net.fetcher.wants.forget(key_of(1))
    net.fetcher._changed = True
    assert net.plan() == []
    net.want(2, 0)
    asked = _ask_all_day(net, net.now + 60.0)
    assert len(asked[1, blob_of(0)]) > 3


def test_payloads_that_nobody_has_cost_little_to_look_for():
    """All links fail hundreds of payloads, as often as they are asked: it goes on at little cost."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(500):
        net.want(number, number)
    asked = 0
    while net.now < 20.0:
        started = net.plan()
        asked += len(started)
        for _, blob in started:
            net.fail(blob)
        net.now = net.now + 0.001 if started else net.fetcher.deadline()
    assert asked > 100
    net.want(1000, 1000)
    net.fetcher.hint(1, key_of(1000))
    assert calls(net.plan) < 3 * 500
    assert blob_of(1000) in net.flights


def test_it_wakes_when_somebody_may_be_asked_and_not_before():
    """All of many neighbours fail all chunks: each is tried again now and then, with nothing in between."""
    net = Net(links=dict.fromkeys(range(1, 16), True))
    net.want(1, *range(5))
    net.pass_time()
    wakes = idle = 0
    while net.now < 60.0:
        started = net.plan()
        wakes += 1
        idle += not started
        while started:
            for _, blob in started:
                net.fail(blob)
            net.now += 0.001
            started = net.plan()
        net.now = net.fetcher.deadline()
    assert wakes > 40
    assert idle < wakes / 10


def test_what_was_under_way_from_a_link_that_ends_is_looked_for_at_those_who_came_by_it():
    net = Net(links={1: True, 2: True})
    net.want(1, 0)
    net.pass_time()
    ((gone, blob),) = net.plan()
    net.drop(gone)
    asked = _ask_all_day(net, net.now + limits.ORPHAN_RETRY_MAX_S)
    assert (3 - gone, blob) in asked
