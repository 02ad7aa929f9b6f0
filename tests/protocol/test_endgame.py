"""Silent holders: somebody else is asked too, and nothing twice where lines are only slow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gossamer.protocol import limits
from tests.protocol.cost import calls
from tests.protocol.fetching import Net, blob_of, key_of


def test_somebody_else_is_asked_for_what_a_silent_holder_has_and_the_first_to_bring_it_ends_both():
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, 1)
    for link in net.links:
        net.fetcher.hint(link, key_of(1))
    ((first, blob),) = net.plan()
    while not (started := net.plan()):
        net.now = net.fetcher.deadline()
    assert limits.FETCH_OVERDUE_S <= net.now < limits.FETCH_PATIENCE_S
    ((second, _),) = started
    assert second != first
    net.arrive(blob)
    assert net.fetched == [key_of(1)]
    assert net.plan() == [] and not net.fetcher.requests.late


def test_who_was_silent_is_asked_last_whatever_it_says():
    """A liar that says that it holds what all hold, and says it again: it stalls no second payload."""
    net = Net(links={1: True, 2: True})
    asked = []
    for key in range(8):
        net.want(key, key)
        for link in (1, 2):
            net.fetcher.hint(link, key_of(key))
        while key_of(key) not in net.fetched:
            for link, blob in net.plan():
                asked.append(link)
                if link == 2:
                    net.arrive(blob)
                    break
            else:
                net.now = net.fetcher.deadline()
            net.fetcher.hint(1, key_of(key))
    assert net.now < 8.0 + limits.FETCH_PATIENCE_S
    assert asked.count(1) == 1
    net.drop(2)
    net.want(9, 9)
    net.fetcher.hint(1, key_of(9))
    assert net.plan() == [(1, blob_of(9))], "of others, nobody has it"


def test_who_was_silent_and_says_first_that_it_holds_something_is_not_waited_for_once_others_do():
    """As who says it of everything as soon as it is published."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    for link in (1, 2):
        net.fetcher.hint(link, key_of(1))
    ((silent, _),) = net.plan()
    while not net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.arrive(blob_of(1))
    for key in (2, 3):
        net.want(key, key)
        net.fetcher.hint(silent, key_of(key))
        assert net.plan() == [(silent, blob_of(key))]
        if key == 2:
            net.fetcher.hint(3 - silent, key_of(key))
        else:
            net.fetcher.hint_part(3 - silent, key_of(key), blob_of(key))
        assert net.plan() == [(3 - silent, blob_of(key))], "at once"
        net.arrive(blob_of(key))


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
            net.fetcher.hint(honest + liar, key_of(key))
    net.plan()
    net.want(1, *range(1 + others), size=TRUE_SIZE)
    for link in range(honest):
        net.fetcher.hint(link, key_of(1))
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
        net.fetcher.hint(1, key_of(1))
        assert net.plan() == [(1, blob_of(0))], "at once: as what it is asked for now it has not failed it"
        assert net.sizes[blob_of(0)] == TRUE_SIZE
    net.arrive(blob_of(0))
    assert net.fetched == [key_of(1)] and len(net.fetcher.wants) == 0


def test_who_was_asked_too_may_fail_and_the_first_is_waited_for_again():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    assert net.plan() == [(1, blob_of(1))]
    net.pass_time(limits.FETCH_PATIENCE_S / 2 + 0.1)
    assert net.plan() == [(2, blob_of(1))]
    net.fail(blob_of(1))
    assert net.flights == {blob_of(1): 1}
    net.plan()
    assert net.late == {blob_of(1): 1}
    net.arrive(blob_of(1))
    assert net.fetched == [key_of(1)]


@pytest.mark.parametrize("gone", [1, 2])
def test_of_two_that_were_asked_either_may_go(gone):
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.pass_time(limits.FETCH_PATIENCE_S / 2 + 0.1)
    net.plan()
    net.drop(gone)
    net.plan()
    assert net.flights == {blob_of(1): 3 - gone}
    net.arrive(blob_of(1))
    assert net.fetched == [key_of(1)]


def test_while_other_chunks_can_be_asked_for_nothing_is_asked_for_twice():
    """Who is slow and honest does its part of a large snapshot."""
    net = Net(links={1: True, 2: True})
    net.want(1, *range(300))
    for link in (1, 2):
        net.fetcher.hint(link, key_of(1))
    net.plan()
    slow = {blob for blob, link in net.flights.items() if link == 1}
    assert len(slow) == limits.FETCHES_PER_LINK_MAX
    for _ in range(70):
        for blob in [blob for blob in net.flights if blob not in slow]:
            net.arrive(blob)
        net.pass_time(0.1)
        net.plan()
        assert not net.late
    assert {net.flights[blob] for blob in slow} == {1}
    for _ in range(10):
        for blob in [blob for blob in net.flights if blob not in slow]:
            net.arrive(blob)
        net.plan()
    assert net.late == dict.fromkeys(slow, 1), "the end game"


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
            net.fetcher.hint(link, key_of(key))
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


def _over_one_line(net: Net, key: int, chunks: int, second_a_chunk: float) -> int:
    """Fetch a payload where all transfers share our own line, so that none ends long before the others.

    Who is asked in vain takes its part of it as well. Returns how often somebody was asked.
    """
    net.want(key, *range(1000 * key, 1000 * key + chunks), size=limits.CHUNK_BYTES_MAX)
    for link in net.links:
        net.fetcher.hint(link, key_of(key))
    coming: list[tuple[int, bytes]] = []
    left: list[float] = []
    while key_of(key) not in net.fetched:
        for asked in net.plan():
            coming.append(asked)
            left.append(second_a_chunk)
        step = 0.25
        net.now += step
        share = step / max(1, sum(seconds > 0.0 for seconds in left))
        for number, (link, blob) in enumerate(coming):
            if 0.0 < left[number] <= share:
                if blob not in net.have:
                    net.arrive(blob)
                net.fetcher.failed(link, blob, net.now)
            left[number] -= share
    return len(coming)


def test_where_our_own_line_is_slow_one_chunk_is_asked_for_twice_and_no_more():
    """Four chunks of a payload share it, and come together when each is overdue, by what was usual so far."""
    net = Net(links=dict.fromkeys(range(4), True))
    asked = 0
    for key in range(8):
        begun = net.now
        asked += _over_one_line(net, key, 4, 8.0)
        assert net.now - begun < 4 * 8.0 + 2.0
        net.now = begun + 45.0
    assert asked <= 8 * 4 + 1


def test_nothing_else_is_asked_for_twice_until_something_has_come():
    """Nobody has outrun anybody yet. As soon as one has, the others are as good as silent."""
    net = Net(links=dict.fromkeys(range(6), True))
    net.want(1, *range(4))
    for link in net.links:
        net.fetcher.hint(link, key_of(1))
    net.plan()
    first = dict(net.flights)
    while net.now < limits.FETCH_OVERDUE_TIMES * 3.0:
        net.plan()
        assert len(net.late) <= 1
        net.now = net.fetcher.deadline()
    (blob,) = net.late
    net.arrive(blob)
    net.plan()
    assert net.late == {other: link for other, link in first.items() if other != blob}


@pytest.mark.parametrize("says_again", [False, True])
@pytest.mark.parametrize(("silent", "share"), [(2, 0.17), (2, 0.3), (3, 0.05), (3, 0.3), (5, 0.17)])
def test_silent_holders_do_not_keep_from_us_what_others_hold_who_have_not_said_so(silent, share, says_again):
    """They took turns for ever: each was forgiven by the time that the last one was overdue."""
    net = Net(links=dict.fromkeys(range(1, silent + 4), True))
    net.fetcher._usual_share = share  # as it is on a line of 4 Mbit/s, of 1, or less
    net.want(1, 1, size=limits.PAYLOAD_CHUNK_BYTES_MIN)
    for link in range(1, silent + 1):
        net.fetcher.hint(link, key_of(1))
    while not net.fetched and net.now < 3600.0:
        for link, blob in net.plan():
            if link > silent:
                net.arrive(blob)
                break
        else:
            net.now = min(net.fetcher.deadline(), net.now + 1.0)
        for link in range(1, silent + 1) if says_again else ():
            net.fetcher.hint(link, key_of(1))
    assert net.now < silent * 45.0


def test_the_only_holder_is_asked_again_soon_however_often_it_was_silent():
    """Its line is broken time and again, and nobody else has it or says so."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    asked = []
    while net.now < 300.0:
        net.fetcher.hint(1, key_of(1))
        started = net.plan()
        for link, blob in started:
            if link == 1:
                asked.append(net.now)
            else:
                net.fail(blob)
        net.now = net.now + 0.01 if started else net.fetcher.deadline()
    assert max(b - a for a, b in pairwise(asked)) < limits.FETCH_PATIENCE_S + limits.FETCH_RETRY_MAX_S + 1.0


def test_of_a_slow_line_among_fast_ones_little_comes_twice():
    lines = Lines(8.0, 0.4, 0.4, 0.4)
    assert lines.fetch(1, 200, limits.CHUNK_BYTES_MAX) < 40.0
    assert lines.asked <= 210


@pytest.mark.parametrize("rng_seed", range(3))
def test_a_silent_holder_delays_a_payload_by_seconds_and_few_of_many(rng_seed):
    lines = Lines(1e9, 0.01, 0.01, 0.01)
    lines.net.fetcher._picker._rng.seed(rng_seed)
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
            net.fetcher.hint(1, key_of(key))
            net.fetcher.hint(2, key_of(key))
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
