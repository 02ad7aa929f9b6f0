"""Which chunk is next: the rarest, and at little cost however many are wanted."""

from __future__ import annotations

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


def test_payloads_that_only_a_silent_holder_is_free_for_cost_little_to_look_at():
    net = Net(links=dict.fromkeys(range(1, 4), True))
    net.want(0, 0)
    for link in net.links:
        net.fetcher.hint(link, key_of(0))
    ((silent, blob),) = net.plan()
    while blob not in net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.arrive(blob)
    for number in range(1, 1001):
        net.want(number, *range(10 * number, 10 * number + 10))
        for link in net.links:
            net.fetcher.hint(link, key_of(number))
    net.plan()
    net.pass_time()
    net.fetcher._changed = True
    assert calls(net.plan) < 3 * 1000
    assert silent not in net.flights.values()
    assert len(net.flights) == 2 * limits.FETCHES_PER_LINK_MAX


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
