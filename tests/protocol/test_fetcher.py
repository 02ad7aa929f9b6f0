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
        net.fetcher.hint(link, key_of(1))
    assert len(net.plan()) == limits.FETCHES_MAX
    net = Net(links={1: True, 2: False})
    net.want(1, *range(100))
    net.fetcher.hint(1, key_of(1))
    net.fetcher.hint(2, key_of(1))
    assert len(net.plan()) == 2 * limits.FETCHES_PER_LINK_MAX


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


def test_whoever_insists_that_it_holds_what_it_does_not_send_is_asked_no_more_often():
    net = Net(links={1: True})
    net.want(1, 0)
    asked = 0
    for _ in range(600):
        net.fetcher.hint(1, key_of(1))
        asked += _asked_in_vain(net, 0.1)
    assert asked <= 60.0 / limits.FETCH_RETRY_MAX_S + 10


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
