"""Fetching: each chunk once at a time within bounds, and all in the end, whoever lies, dies or is silent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from tests.protocol.cost import calls
from tests.protocol.fetching import Net, blob_of, key_of


def test_bounds_are_kept_and_used():
    net = Net(links=dict.fromkeys(range(1, 7), True))
    net.want(1, *range(100))
    for link in net.links:
        net.hint(link, 1)
    assert len(net.plan()) == limits.FETCHES_MAX
    net = Net(links={1: True, 2: False})
    net.want(1, *range(100))
    net.hint(1, 1)
    net.hint(2, 1)
    assert len(net.plan()) == 2 * limits.FETCHES_PER_LINK_MAX


def test_a_large_chunk_is_given_more_time_and_so_is_what_waits_behind_it():
    net = Net(links={1: True})
    net.want(1, 1, 2, size=limits.CHUNK_BYTES_MAX)
    net.hint(1, 1)
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
    net.hint(1, 1)
    net.hint(1, 2)
    net.plan()
    last = net.fetcher.requests.current[blob_of(3)]
    assert last.deadline > 3 * limits.FETCH_TIMEOUT_S, "behind three others"
    while net.now + 2 * limits.FETCH_RETRY_S < last.deadline:
        net.pass_time()
        net.plan()
        assert not net.fetcher.is_stalled(key_of(2), net.now)
    net.pass_time(3 * limits.FETCH_RETRY_S)
    net.plan()
    while blob_of(3) not in net.fetcher.requests.current:  # until it is asked for again
        net.pass_time(limits.FETCH_RETRY_S)
        net.plan()
    assert net.fetcher.is_stalled(key_of(2), net.now)


def test_only_what_is_on_its_way_may_be_put_to_us():
    net = Net(links={1: False})
    net.want(1, 1, size=77)
    assert net.fetcher.expected_size(blob_of(1)) is None
    net.hint(1, 1)
    net.plan()
    assert net.fetcher.expected_size(blob_of(1)) == 77
    assert net.fetcher.expected_size(blob_of(2)) is None
    net.arrive(blob_of(1))
    assert net.fetcher.expected_size(blob_of(1)) is None


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
        net.hint(rng.choice(sorted(net.links)), rng.randrange(wants))
        net.pass_time(rng.choice([0.01, 0.5, 5.0, 61.0]))
    assert sorted(net.fetched) == sorted(key_of(k) for k in keys)


def test_somebody_else_is_asked_for_what_a_silent_holder_has_and_the_first_to_bring_it_ends_both():
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, 1)
    for link in net.links:
        net.hint(link, 1)
    ((first, blob),) = net.plan()
    while not (started := net.plan()):
        net.now = net.fetcher.deadline()
    assert limits.FETCH_OVERDUE_S <= net.now < limits.FETCH_PATIENCE_S
    ((second, _),) = started
    assert second != first
    net.arrive(blob)
    assert net.fetched == [key_of(1)]
    assert net.plan() == [] and not net.fetcher.requests.late


TRUE_SIZE = 100


def _listed_by_liars(liars: int, each: int, honest: int, others: int = 0) -> Net:
    """Chunk 0 in payloads of a few that they say they hold, as it was never, and then in key 1 of the others.

    That one has more chunks, which are here soon.
    """
    net = Net(links=dict.fromkeys(range(honest + liars), True))
    net.true_sizes = dict.fromkeys(map(blob_of, range(1 + others)), TRUE_SIZE)
    for liar in range(liars):
        for number in range(each):
            key = 1001 + each * liar + number
            net.want(key, 0, size=TRUE_SIZE + 1000 - key)
            net.hint(honest + liar, key)
    net.plan()
    net.want(1, *range(1 + others), size=TRUE_SIZE)
    for link in range(honest):
        net.hint(link, 1)
    return net


def _fetch(net: Net, honest: int, seconds: float = 600.0) -> float:
    """Honest holders send the chunk as it is, the others nothing. Returns how long key 1 took."""
    end = net.now + seconds
    while net.now < end:
        for link, blob in net.plan():
            if link < honest and net.sizes[blob] < net.true_sizes[blob]:
                net.fetcher.failed(link, blob, net.now)  # longer than it may be
                net._ended(blob)
            elif link < honest:
                net.arrive(blob)
        if key_of(1) in net.fetched:
            break
        net.now = net.fetcher.deadline()
    return net.now


@pytest.mark.parametrize("others", [0, 40])
@pytest.mark.parametrize("each", [1, 2, 3, 16])
def test_who_lists_a_chunk_under_other_sizes_does_not_keep_it_from_us(each, others):
    """It is what its hash says, whoever states how long that is."""
    net = _listed_by_liars(1, each, honest=5, others=others)
    assert _fetch(net, 5) < limits.FETCH_PATIENCE_S
    assert net.fetched == [key_of(1)] and len(net.fetcher.wants) == 0, "the others are given up"


def test_of_many_who_list_a_chunk_under_other_sizes_each_is_waited_for_once():
    net = _listed_by_liars(3, 8, honest=5)
    assert _fetch(net, 5) < 3 * limits.FETCH_PATIENCE_S / 2 + 1.0
    assert len(net.fetcher.wants) == 0


@pytest.mark.parametrize("is_known_first", [True, False])
def test_a_chunk_is_asked_for_as_long_as_anybody_says_that_it_is(is_known_first):
    """Nobody is known to hold what the liar signed: it is looked for everywhere, and the true one with it."""
    net = Net(links={1: True})
    net.true_sizes[blob_of(0)] = TRUE_SIZE
    for key, size in ((1, TRUE_SIZE), (2, TRUE_SIZE - 1)) if is_known_first else ((2, TRUE_SIZE - 1),):
        net.want(key, 0, size=size)
    net.pass_time()
    assert net.plan() == [(1, blob_of(0))]
    assert net.sizes[blob_of(0)] == (TRUE_SIZE if is_known_first else TRUE_SIZE - 1)
    if not is_known_first:
        net.want(1, 0, size=TRUE_SIZE)
        assert net.fetcher.expected_size(blob_of(0)) == TRUE_SIZE, "it may be put to us as it is"
        net.fail(blob_of(0))
        net.hint(1, 1)
        assert net.plan() == [(1, blob_of(0))], "at once: as what it is asked for now it has not failed it"
        assert net.sizes[blob_of(0)] == TRUE_SIZE
    net.arrive(blob_of(0))
    assert net.fetched == [key_of(1)] and len(net.fetcher.wants) == 0


class Lines:
    """Holders behind lines of their own: seconds that it takes each to bring a chunk, one after another."""

    def __init__(self, *seconds: float) -> None:
        self.net = Net(links=dict.fromkeys(range(len(seconds)), True))
        self._seconds = seconds
        self._queues: list[list[bytes]] = [[] for _ in seconds]
        self._free_at = [0.0 for _ in seconds]
        self.asked = 0

    def fetch(self, key: int, chunks: int, size: int) -> float:
        """Returns how long it took. A line is not given back by who is asked in vain meanwhile."""
        net, begun = self.net, self.net.now
        net.want(key, *range(1000 * key, 1000 * key + chunks), size=size)
        for link in net.links:
            net.hint(link, key)
        coming: list[tuple[float, bytes, int]] = []
        while key_of(key) not in net.fetched:
            for link, blob in net.plan():
                self.asked += 1
                self._free_at[link] = max(self._free_at[link], net.now) + self._seconds[link]
                coming.append((self._free_at[link], blob, link))
            coming.sort()
            net.now = min(coming[0][0], net.fetcher.deadline())
            while coming and coming[0][0] <= net.now:
                _, blob, link = coming.pop(0)
                if blob not in net.have:
                    net.arrive(blob)
                net.fetcher.failed(link, blob, net.now)
        return net.now - begun


def test_slow_lines_are_waited_for_and_nothing_is_asked_for_twice():
    """A megabyte takes a line of 1 Mbit/s 8 s: alone, shared by four transfers, or with others like it."""
    for seconds in ((8.0,), (8.0, 8.0), (8.0, 8.0, 8.0, 8.0, 8.0)):
        lines = Lines(*seconds)
        for key in range(6):
            took = lines.fetch(key, 10, limits.CHUNK_BYTES_MAX)
            assert took <= 8.0 * -(-10 // len(seconds)) + 0.1
        assert lines.asked == 60


@pytest.mark.parametrize("says_again", [False, True])
@pytest.mark.parametrize(("silent", "share"), [(2, 0.17), (2, 0.3), (3, 0.05), (3, 0.3), (5, 0.17)])
def test_silent_holders_do_not_keep_from_us_what_others_hold_who_have_not_said_so(silent, share, says_again):
    """They took turns for ever: each was forgiven by the time that the last one was overdue."""
    net = Net(links=dict.fromkeys(range(1, silent + 4), True))
    net.fetcher._usual_share = share  # as it is on a line of 4 Mbit/s, of 1, or less
    net.want(1, 1, size=limits.PAYLOAD_CHUNK_BYTES_MIN)
    for link in range(1, silent + 1):
        net.hint(link, 1)
    while not net.fetched and net.now < 3600.0:
        for link, blob in net.plan():
            if link > silent:
                net.arrive(blob)
                break
        else:
            net.now = min(net.fetcher.deadline(), net.now + 1.0)
        for link in range(1, silent + 1) if says_again else ():
            net.hint(link, 1)
    assert net.now < silent * 45.0


@pytest.mark.parametrize("rng_seed", range(3))
def test_a_silent_holder_delays_a_payload_by_seconds_and_few_of_many(rng_seed):
    lines = Lines(1e9, 0.01, 0.01, 0.01)
    lines.net.fetcher._rng.seed(rng_seed)
    took = []
    for key in range(40):
        took.append(lines.fetch(key, 16, limits.PAYLOAD_CHUNK_BYTES_MIN))
        lines.net.pass_time(4.0)
    assert max(took) < 2 * limits.FETCH_OVERDUE_S + 1.0
    assert sum(seconds > 1.0 for seconds in took) <= 8


def test_many_silent_holders_do_not_keep_all_transfers():
    """Half of all wait for those who say that they hold it, and the others have brought all else."""
    lines = Lines(*[1e9] * 4, *[0.01] * 4)
    assert lines.fetch(1, 40, limits.PAYLOAD_CHUNK_BYTES_MIN) < 3 * limits.FETCH_OVERDUE_S


def test_what_many_payloads_list_costs_no_more_while_it_is_waited_for():
    """A liar says that it holds chunks that all its deltas list, and sends none: to look for others that have
    them took half a second each time, and each message that came meanwhile took milliseconds."""

    def cost(payloads: int) -> int:
        net = Net(links=dict.fromkeys(range(1, 7), True))
        for key in range(payloads):
            net.want(key, 0, 1)
            net.hint(1, key)
            net.hint(2, key)
        net.plan()
        net.want(-1, -1)  # what others publish is looked at beside it

        def wait() -> None:
            for _ in range(200):
                net.pass_time(0.1)
                net.plan()
                for blob in [blob for blob, link in net.flights.items() if link > 2]:
                    net.fail(blob)

        return calls(wait)

    few = cost(limits.WANTS_LOOKED_AT_MAX)
    assert cost(4 * limits.WANTS_LOOKED_AT_MAX) < 2 * few


def test_failure_is_retried_elsewhere_at_once_and_there_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.hint(1, 1)
    net.hint(2, 1)
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
    net.hint(1, 1)
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
    net.hint(1, 1)
    assert [link for link, _ in net.plan()] == [1]
    net.pass_time(limits.FETCH_PATIENCE_S + 0.1)
    tried = []
    while len(tried) < 2:
        for link, blob in net.plan():
            tried.append(link)
            net.fail(blob)
        net.now = net.now + limits.FETCH_SOON_S
    assert sorted(tried) == [2, 3]


def test_many_chunks_that_are_declined_are_asked_for_again_together():
    """Each has a time of its own, and a fetcher that woke for each would hardly sleep."""
    net = Net(links={1: True})
    net.want(1, *range(30))
    net.hint(1, 1)
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
    _asked_in_vain(net, 2 * limits.FETCH_REST_MAX_S)
    assert _asked_in_vain(net, 120.0) <= 8 * 120.0 / limits.FETCH_REST_MAX_S * 2


def test_whoever_insists_that_it_holds_what_it_does_not_send_is_asked_no_more_often():
    net = Net(links={1: True})
    net.want(1, 0)
    asked = 0
    for _ in range(600):
        net.hint(1, 1)
        asked += _asked_in_vain(net, 0.1)
    assert asked <= 10


def test_a_busy_holder_is_asked_again_soon_and_believed_a_few_times():
    net = Net(links={1: True})
    net.want(1, 1)
    net.hint(1, 1)
    asked = []
    while net.now < 2.0:
        for _, blob in net.plan():
            asked.append(net.now)
            net.fail(blob)
        net.now = round(net.now + 0.05, 2)
    assert asked[:4] == pytest.approx([0.0, 0.1, 0.3, 0.7], abs=0.06)


def test_parts_are_fetched_from_those_who_have_them_and_the_rarest_first():
    net = Net(links={1: True, 2: False})
    net.want(1, *range(4))
    net.hint_part(1, 1, 0)
    net.hint_part(2, 1, 0)
    net.hint_part(1, 1, 3)
    net.hint_part(1, 1, 9)
    net.hint_part(7, 1, 1)
    net.hint_part(1, 2, 1)
    assert net.plan() == [(1, blob_of(3)), (2, blob_of(0))]
    assert net.fetcher.wants.holders_of(key_of(1), blob_of(0)) == {1, 2}
    net.arrive(blob_of(3))
    net.drop(2)
    assert net.plan() == [(1, blob_of(0))]
    net.drop(1)
    net.pass_time(limits.PAYLOAD_PATIENCE_S)
    net.plan()
    assert not net.fetcher.wants.lacking(net.now, net.now), "nobody holds any of it any more"


def test_parts_that_equally_many_hold_are_fetched_in_another_order_by_everybody():
    """So that those who fetch the same payload soon have parts for one another."""

    def first(seed: int) -> tuple[int, bytes]:
        net = Net(seed, links={1: True})
        net.want(1, *range(30))
        for number in range(30):
            net.hint_part(1, 1, number)
        return net.plan()[0]

    assert len({first(seed) for seed in range(10)}) > 1


def test_who_claims_to_hold_thousands_and_sends_none_costs_little():
    """Nor does it keep anyone from those that others hold, however late they came."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(20_000):
        net.want(number, number)
        net.hint(1, number)
    net.now += 0.5
    net.plan()
    net.want(30_000, 30_000)
    net.hint(2, 30_000)
    looks = 0
    while blob_of(30_000) not in net.flights:
        looks += 1
        assert calls(net.plan) < 3_000
        net.hint(3, 30_000 + looks)
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
            self.net.hint(link, key)

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
    joiner.net.fetcher.requests.window = window
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
            net.hint(link, key)
    net.fetcher.fetch_between(key_of(0), lambda key: key == key_of(1))
    order = [blob for _, blob in net.plan()]
    assert order == [blob_of(5001), blob_of(0), blob_of(1), blob_of(5000)]


def test_load_is_shared_between_holders():
    net = Net(links=dict.fromkeys(range(1, 5), True))
    net.want(1, *range(8))
    for link in net.links:
        net.hint(link, 1)
    links = [link for link, _ in net.plan()]
    assert sorted(links) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_holders_come_first_and_anybody_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    assert net.plan() == []
    net.hint(2, 1)
    assert net.plan() == [(2, blob_of(1))]
    net.want(2, 2)
    assert net.plan() == []
    net.pass_time()
    assert [blob for _, blob in net.plan()] == [blob_of(2)]


def test_a_busy_holder_is_helped_out_by_others_after_a_moment():
    """A joiner is told of everything by the first peer it meets; the others have it too."""
    net = Net(links={1: True, 2: True, 3: False})
    net.want(1, *range(50))
    net.hint(1, 1)
    assert [link for link, _ in net.plan()] == [1] * limits.FETCHES_PER_LINK_MAX
    net.pass_time()
    assert sorted(link for link, _ in net.plan()) == [2, 3]


def test_a_holder_of_parts_is_asked_for_few_at_a_time():
    net = Net(links={1: True})
    net.want(1, *range(6))
    for number in range(6):
        net.hint_part(1, 1, number)
    assert len(net.plan()) == limits.PARTS_PER_LINK_MAX
    net.hint(1, 1)
    assert len(net.plan()) == limits.FETCHES_PER_LINK_MAX - limits.PARTS_PER_LINK_MAX


def test_payloads_that_nobody_has_do_not_delay_those_that_somebody_has():
    """An author died before anyone had its payload of a thousand chunks; later ones are wanted behind it."""
    net = Net(links={1: True, 2: True})
    net.want(0, *range(1000))
    net.pass_time(5.0)
    for number in range(2000, 2020):
        net.want(number, number)
        net.hint(1, number)
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
            net.hint(link, key)
        net.plan()
        for blob in list(net.flights):
            net.arrive(blob)
    assert key_of(0) in net.fetched


def test_a_payload_that_nobody_brings_leaves_guesses_to_others():
    """Its chunks are enough for all the guesses that there may be, again and again."""
    net = Net(links=dict.fromkeys(range(1, 15), True))
    net.want(1, *range(40))
    net.pass_time()
    net.want(2, 100)
    while net.now < 10.0 and not net.fetched:
        net.pass_time()
        for _, blob in net.plan():
            if blob == blob_of(100):
                net.arrive(blob)
            else:
                net.fail(blob)
    assert net.fetched == [key_of(2)]


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
    net.hint(1, 1)
    net.hint(2, 2)
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
        assert 400.0 - times[-1] < limits.FETCH_REST_MAX_S + 2.0
        assert max(b - a for a, b in pairwise(times)) < limits.FETCH_REST_MAX_S + 2.0


def test_who_is_linked_later_is_asked_for_all_of_it():
    """Also for what all the others have been asked for, and what is under way when it comes."""
    net = Net(links={1: True})
    for number in range(1_200):
        net.want(number, number)
    asked = _ask_all_day(net, 150.0)
    assert {link for link, _ in asked} == {1}
    net.links[2] = True
    net.fetcher.link_up(2, True)
    asked = _ask_all_day(net, 150.0 + 12 * 1_200)
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
    net.hint(1, 1000)
    assert calls(net.plan) < 3 * 500
    assert blob_of(1000) in net.flights
