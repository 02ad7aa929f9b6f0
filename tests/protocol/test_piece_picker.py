"""Which chunk is next, of whom it is asked, and what is done about those that nobody is known to hold."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gossamer.protocol import limits
from tests.protocol.cost import calls
from tests.protocol.fetching import Net, blob_of, key_of


def test_parts_are_fetched_from_those_who_have_them_and_the_rarest_first():
    net = Net(links={1: True, 2: False})
    net.want(1, *range(4))
    net.fetcher.hint_part(1, key_of(1), blob_of(0))
    net.fetcher.hint_part(2, key_of(1), blob_of(0))
    net.fetcher.hint_part(1, key_of(1), blob_of(3))
    net.fetcher.hint_part(1, key_of(1), blob_of(9))
    net.fetcher.hint_part(7, key_of(1), blob_of(1))
    net.fetcher.hint_part(1, key_of(2), blob_of(1))
    assert net.plan() == [(1, blob_of(3)), (2, blob_of(0))]
    assert net.fetcher.wants.holders_of(key_of(1), blob_of(0)) == {1, 2}
    net.arrive(blob_of(3))
    net.drop(2)
    assert net.plan() == [(1, blob_of(0))]
    net.drop(1)
    net.pass_time(limits.ORPHAN_PATIENCE_S)
    net.plan()
    assert not net.fetcher.wants.lacking(net.now, net.now), "nobody holds any of it any more"


def test_parts_that_equally_many_hold_are_fetched_in_another_order_by_everybody():
    """So that those who fetch the same payload soon have parts for one another."""

    def first(seed: int) -> tuple[int, bytes]:
        net = Net(seed, links={1: True})
        net.want(1, *range(30))
        for number in range(30):
            net.fetcher.hint_part(1, key_of(1), blob_of(number))
        return net.plan()[0]

    assert len({first(seed) for seed in range(10)}) > 1


def test_payloads_that_wait_for_busy_links_cost_little_to_look_at():
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(1000):
        net.want(number, number)
        for link in (1, 2):
            net.fetcher.hint(link, key_of(number))
    net.plan()
    assert len(net.flights) == 2 * limits.FETCHES_PER_LINK_MAX
    net.arrive(next(iter(net.flights)))
    assert calls(net.plan) < 3 * 1000


def test_who_claims_to_hold_thousands_and_sends_none_costs_little():
    """Nor does it keep anyone from those that others hold, however late they came."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(20_000):
        net.want(number, number)
        net.fetcher.hint(1, key_of(number))
    net.now += 0.5
    net.plan()
    net.want(30_000, 30_000)
    net.fetcher.hint(2, key_of(30_000))
    looks = 0
    while blob_of(30_000) not in net.flights:
        looks += 1
        assert calls(net.plan) < 3_000
        net.fetcher.hint(3, key_of(30_000 + looks))
        net.fetcher._changed = True
        net.now += 0.001
        assert looks <= 1 + 20_000 / limits.WANTS_LOOKED_AT_MAX


class Joiner:
    """A joiner behind a slow line: whatever it asked for first comes first, a second each."""

    def __init__(self, donors: int) -> None:
        self.net = Net(links=dict.fromkeys(range(donors), True))
        self.published = 0
        self.net.want(0, *range(1000), size=limits.CHUNK_BYTES_MAX)
        self._all_hold(0)
        self.net.fetcher.fetch_between(key_of(0), lambda key: False)
        self.net.plan()

    def _all_hold(self, key: int) -> None:
        for link in self.net.links:
            self.net.fetcher.hint(link, key_of(key))

    def publish(self, chunks: int) -> None:
        """Another delta, in chunks of a quarter of the largest size."""
        self.published += chunks
        key = 1000 + self.published
        self.net.want(key, *range(key, key + chunks), size=limits.CHUNK_BYTES_MAX // 4)
        self._all_hold(key)

    def bring(self, chunks: int) -> tuple[int, int]:
        """Returns how many chunks of deltas and of the snapshot came."""
        before = len(self.net.have)
        of_snapshot = set(map(blob_of, range(1000)))
        had = len(self.net.have & of_snapshot)
        for _ in range(chunks):
            self.net.plan()
            self.net.pass_time()
            self.net.arrive(next(iter(self.net.flights)))
        came = len(self.net.have & of_snapshot) - had
        return len(self.net.have) - before - came, came


@pytest.mark.parametrize("donors", [1, 2, 8])
def test_what_is_published_meanwhile_comes_before_the_rest_of_a_snapshot(donors: int) -> None:
    """Those who hold it drop it when its round closes, and keep the snapshot."""
    joiner = Joiner(donors)
    for _ in range(20):
        joiner.publish(1)
        joiner.bring(4)
    assert len(joiner.net.have - set(map(blob_of, range(1000)))) >= 15


@pytest.mark.parametrize("donors", [1, 2, 8])
@pytest.mark.parametrize("window", [limits.FETCH_WINDOW_BYTES_MIN, limits.FETCH_WINDOW_BYTES_MAX])
def test_a_snapshot_gets_on_though_deltas_fill_the_line(donors: int, window: int) -> None:
    joiner = Joiner(donors)
    joiner.publish(1000)
    joiner.bring(20)
    joiner.net.fetcher._window.bytes = window
    deltas, chunks = joiner.bring(200)
    assert 10 <= chunks <= 45, "in bytes up to half"
    assert deltas + chunks == 200


def test_what_a_snapshot_has_in_it_comes_after_it() -> None:
    net = Net(links={1: True, 2: True})
    net.want(1, 5000)
    net.want(0, 0, 1, size=limits.CHUNK_BYTES_MAX)
    net.want(2, 5001)
    for link in net.links:
        for key in range(3):
            net.fetcher.hint(link, key_of(key))
    net.fetcher.fetch_between(key_of(0), lambda key: key == key_of(1))
    order = [blob for _, blob in net.plan()]
    assert order == [blob_of(5001), blob_of(0), blob_of(1), blob_of(5000)]


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
