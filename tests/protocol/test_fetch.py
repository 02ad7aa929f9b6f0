"""Fetching: within bounds, each chunk once at a time, and everything in the end, whoever lies or dies."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.effects import Fetched, Get, Send
from gossamer.protocol.fetch import Fetcher
from gossamer.protocol.messages import Ask
from gossamer.protocol.promptness import Promptness


def _blob(number: int) -> bytes:
    return sha256(f"chunk {number}".encode()).digest()


def _key(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


class Net:
    """A fetcher, and what it has under way according to its effects."""

    def __init__(self, seed: int = 0, links: dict[int, bool] | None = None) -> None:
        self.have: set[bytes] = set()
        self.true_sizes: dict[bytes, int] = {}
        """Of chunks that are not of the size that was asked for."""
        self.fetcher = Fetcher(self._fits, random.Random(seed))
        self.links = dict(links or {})
        self.flights: dict[bytes, int] = {}
        self.late: dict[bytes, int] = {}
        """Asked first for what another link was then asked for too."""
        self.began: dict[bytes, float] = {}
        self.fetched: list[bytes] = []
        self.sizes: dict[bytes, int] = {}
        self.now = 0.0
        for link, outbound in self.links.items():
            self.fetcher.link_up(link, outbound)

    def _fits(self, blob: bytes, size: int) -> bool | None:
        return self.true_sizes.get(blob, size) == size if blob in self.have else None

    def want(self, key: int, *chunks: int, size: int = 100) -> None:
        effects = self.fetcher.want(_key(key), tuple((_blob(c), size) for c in chunks), self.now)
        self.fetched += [e.key for e in effects]

    def plan(self) -> list[tuple[int, bytes]]:
        for blob in [
            blob for blob, flight in self.fetcher._flights.late.items() if self.now >= flight.deadline
        ]:
            del self.late[blob]
        for blob, began in list(self.began.items()):
            flight = self.fetcher._flights.newest.get(blob)
            if self.now >= (flight.deadline if flight else began + limits.FETCH_TIMEOUT_S):
                self._ended(blob)
        started = []
        for effect in self.fetcher.plan(self.now):
            if isinstance(effect, Get):
                link, blob = effect.link, effect.blob
                assert self.links[link], "a Get needs a link that we dialled"
                self.sizes[blob] = effect.size
            else:
                assert isinstance(effect, Send)
                assert isinstance(effect.message, Ask)
                link, blob = effect.link, effect.message.blob
                assert not self.links[link], "an Ask needs a link that dialled us"
            assert blob not in self.have
            if blob in self.flights:
                assert blob in self.fetcher._flights.late, "asked for twice at a time"
                assert link not in (self.flights[blob], self.late.get(blob))
                self.late[blob] = self.flights[blob]  # what was late before is given up
            self.flights[blob] = link
            self.began[blob] = self.now
            started.append((link, blob))
        assert len(self.flights) <= limits.FETCHES_MAX
        under_way = [*self.flights.values(), *self.late.values()]
        assert all(under_way.count(link) <= limits.FETCHES_PER_LINK_MAX for link in self.links)
        assert self.late.keys() <= self.flights.keys()
        assert len(self.late) <= limits.FETCHES_TWICE_MAX
        assert self.late == {blob: flight.link for blob, flight in self.fetcher._flights.late.items()}
        assert self.fetcher.deadline() > self.now, "a deadline that has passed already: a busy loop"
        return started

    def _ended(self, blob: bytes) -> None:
        self.flights.pop(blob, None)
        self.began.pop(blob, None)
        if blob in self.late:
            self.flights[blob] = self.late.pop(blob)
            self.began[blob] = self.fetcher._flights.late[blob].began

    def arrive(self, blob: bytes) -> None:
        self.late.pop(blob, None)
        self._ended(blob)
        self.have.add(blob)
        self.fetcher.wants.rule_out(blob)
        self.fetched += [e.key for e in self.fetcher.arrived(blob, self.now) if isinstance(e, Fetched)]

    def fail(self, blob: bytes) -> None:
        link = self.flights[blob]
        self._ended(blob)
        self.fetcher.failed(link, blob, self.now)

    def drop(self, link: int) -> None:
        del self.links[link]
        self.late = {blob: other for blob, other in self.late.items() if other != link}
        for blob in [b for b, flight in self.flights.items() if flight == link]:
            self._ended(blob)
        self.fetcher.link_down(link)

    def pass_time(self, seconds: float = limits.FETCH_RETRY_S) -> None:
        self.now += seconds


def test_what_nobody_holds_is_not_on_its_way():
    net = Net(links={1: True})
    net.want(1, 0)
    assert not net.fetcher.wants.are_held
    net.fetcher.hint(1, _key(1))
    assert net.fetcher.wants.are_held
    net.plan()
    net.arrive(_blob(0))
    assert not net.fetcher.wants.are_held


def test_what_comes_slowly_is_not_stalled():
    net = Net(links={1: True})
    wants = net.fetcher.wants
    assert not wants.is_stalled(_key(1), 1e9)
    net.want(1, *range(3))
    for chunk in range(3):
        net.plan()
        net.pass_time(limits.FETCH_TIMEOUT_S - 1)
        assert not wants.is_stalled(_key(1), net.now)
        assert wants.is_stalled(_key(1), net.now + 2)
        net.plan()
        net.arrive(_blob(chunk))
    assert not wants.is_stalled(_key(1), 1e9), "it is here"


def test_bounds_are_kept_and_used():
    net = Net(links=dict.fromkeys(range(1, 7), True))
    net.want(1, *range(100))
    for link in net.links:
        net.fetcher.hint(link, _key(1))
    assert len(net.plan()) == limits.FETCHES_MAX
    net = Net(links={1: True, 2: False})
    net.want(1, *range(100))
    net.fetcher.hint(1, _key(1))
    net.fetcher.hint(2, _key(1))
    assert len(net.plan()) == 2 * limits.FETCHES_PER_LINK_MAX


@pytest.mark.parametrize("is_here_first", [True, False])
def test_a_chunk_is_not_taken_for_one_of_another_size(is_here_first):
    """Nor looked for as that: its hash has one size, so nobody can have the other."""
    net = Net(links={1: True})
    net.true_sizes[_blob(1)] = 100
    if is_here_first:
        net.have.add(_blob(1))
    net.want(1, 1, size=100)
    net.want(2, 1, 2, size=99)
    net.fetcher.hint(1, _key(1))
    net.plan()
    if not is_here_first:
        net.arrive(_blob(1))
    assert net.fetched == [_key(1)]
    assert _key(2) not in net.fetcher.wants and not net.fetcher.wants.keys_of(_blob(2))


def test_the_first_chunk_of_a_wrong_size_is_enough():
    """To tell the size of one that is here, it may have to be read."""
    net, asked = Net(), []
    net.have = {_blob(number) for number in range(5)}
    net.true_sizes = dict.fromkeys(net.have, 99)
    net.fetcher.wants._fits = lambda blob, size: asked.append(blob) or net._fits(blob, size)
    net.want(1, *range(5))
    assert (asked, net.fetched, _key(1) in net.fetcher.wants) == ([_blob(0)], [], False)


def test_one_hash_with_two_sizes_is_not_looked_for():
    net = Net(links={1: True})
    assert net.fetcher.want(_key(1), ((_blob(1), 100), (_blob(2), 100), (_blob(1), 7)), 0.0) == []
    assert _key(1) not in net.fetcher.wants and net.plan() == []


def test_load_is_shared_between_holders():
    net = Net(links=dict.fromkeys(range(1, 5), True))
    net.want(1, *range(8))
    for link in net.links:
        net.fetcher.hint(link, _key(1))
    links = [link for link, _ in net.plan()]
    assert sorted(links) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_outbound_gets_and_inbound_asks():
    for outbound in (True, False):
        net = Net(links={1: outbound})
        net.want(1, 1)
        net.fetcher.hint(1, _key(1))
        assert net.plan() == [(1, _blob(1))]  # `plan` checks which


def test_holders_come_first_and_anybody_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    assert net.plan() == []
    net.fetcher.hint(2, _key(1))
    assert net.plan() == [(2, _blob(1))]
    net.want(2, 2)
    assert net.plan() == []
    net.pass_time()
    assert [blob for _, blob in net.plan()] == [_blob(2)]


def test_a_busy_holder_is_helped_out_by_others_after_a_moment():
    """A joiner is told of everything by the first peer it meets; the others have it too."""
    net = Net(links={1: True, 2: True, 3: False})
    net.want(1, *range(50))
    net.fetcher.hint(1, _key(1))
    assert [link for link, _ in net.plan()] == [1] * limits.FETCHES_PER_LINK_MAX
    net.pass_time()
    assert sorted(link for link, _ in net.plan()) == [2] * 4 + [3] * 4


def test_failure_is_retried_elsewhere_at_once_and_there_after_a_moment():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    net.fetcher.hint(2, _key(1))
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
    net.fetcher.hint(1, _key(1))
    assert len(net.plan()) == 1
    net.pass_time(limits.FETCH_PATIENCE_S - 0.1)
    assert net.plan() == []
    net.pass_time(0.2)
    assert net.plan() == []
    assert net.fetcher.expected_size(_blob(1)) is None
    assert not net.fetcher.wants.are_held, "it is not believed any more"


def test_somebody_else_is_asked_for_what_a_silent_holder_has_and_the_first_to_bring_it_ends_both():
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, 1)
    for link in net.links:
        net.fetcher.hint(link, _key(1))
    ((first, blob),) = net.plan()
    while not (started := net.plan()):
        net.now = net.fetcher.deadline()
    assert limits.FETCH_OVERDUE_S <= net.now < limits.FETCH_PATIENCE_S
    ((second, _),) = started
    assert second != first
    net.arrive(blob)
    assert net.fetched == [_key(1)]
    assert net.plan() == [] and not net.fetcher._flights.late


def test_who_was_silent_is_asked_last_whatever_it_says():
    """A liar that says that it holds what all hold, and says it again: it stalls no second payload."""
    net = Net(links={1: True, 2: True})
    asked = []
    for key in range(8):
        net.want(key, key)
        for link in (1, 2):
            net.fetcher.hint(link, _key(key))
        while _key(key) not in net.fetched:
            for link, blob in net.plan():
                asked.append(link)
                if link == 2:
                    net.arrive(blob)
                    break
            else:
                net.now = net.fetcher.deadline()
            net.fetcher.hint(1, _key(key))
    assert net.now < 8.0 + limits.FETCH_PATIENCE_S
    assert asked.count(1) == 1
    net.drop(2)
    net.want(9, 9)
    net.fetcher.hint(1, _key(9))
    assert net.plan() == [(1, _blob(9))], "of others, nobody has it"


def test_who_was_silent_and_says_first_that_it_holds_something_is_not_waited_for_once_others_do():
    """As who says it of everything as soon as it is published."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    for link in (1, 2):
        net.fetcher.hint(link, _key(1))
    ((silent, _),) = net.plan()
    while not net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.arrive(_blob(1))
    for key in (2, 3):
        net.want(key, key)
        net.fetcher.hint(silent, _key(key))
        assert net.plan() == [(silent, _blob(key))]
        if key == 2:
            net.fetcher.hint(3 - silent, _key(key))
        else:
            net.fetcher.hint_part(3 - silent, _key(key), _blob(key))
        assert net.plan() == [(3 - silent, _blob(key))], "at once"
        net.arrive(_blob(key))


def test_the_rest_of_those_who_keep_us_waiting_grows_and_is_forgotten():
    prompt = Promptness()
    rests = []
    for now in (0.0, 1.0, 8.0, 24.0, 80.0, 88.0, 208.0):
        prompt.kept_waiting(1, now)
        rests.append(next(at for at in range(int(now), 1000) if not prompt.tardy(float(at), 2)))
        assert prompt.tardy(now, 2) == {1}
    assert rests == [8, 8, 24, 56, 144, 144, 216], "8, 16, 32 and 64 s, and 8 s anew"
    for now in range(300, 3000):
        prompt.kept_waiting(1, float(now))
    assert prompt._rests[1].wait == limits.TARDY_REST_MAX_S
    prompt.link_down(1)
    assert prompt.tardy(now, 2) == set()


def test_where_most_links_keep_us_waiting_none_is_asked_last():
    """It is our own line that is slow then."""
    prompt = Promptness()
    for link in (1, 2):
        prompt.kept_waiting(link, 0.0)
    assert prompt.tardy(1.0, links=4) == {1, 2}
    assert prompt.tardy(1.0, links=3) == set()


def test_who_was_asked_too_may_fail_and_the_first_is_waited_for_again():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    assert net.plan() == [(1, _blob(1))]
    net.pass_time(limits.FETCH_PATIENCE_S / 2 + 0.1)
    assert net.plan() == [(2, _blob(1))]
    net.fail(_blob(1))
    assert net.flights == {_blob(1): 1}
    net.plan()
    assert net.fetcher._flights.newest[_blob(1)].link == 1
    net.arrive(_blob(1))
    assert net.fetched == [_key(1)]


@pytest.mark.parametrize("gone", [1, 2])
def test_of_two_that_were_asked_either_may_go(gone):
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    net.plan()
    net.pass_time(limits.FETCH_PATIENCE_S / 2 + 0.1)
    net.plan()
    net.drop(gone)
    net.plan()
    assert net.flights == {_blob(1): 3 - gone}
    net.arrive(_blob(1))
    assert net.fetched == [_key(1)]


def test_while_other_chunks_can_be_asked_for_nothing_is_asked_for_twice():
    """Who is slow and honest does its part of a large snapshot."""
    net = Net(links={1: True, 2: True})
    net.want(1, *range(300))
    for link in (1, 2):
        net.fetcher.hint(link, _key(1))
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
            net.fetcher.hint(link, _key(key))
        coming: list[tuple[float, bytes, int]] = []
        while _key(key) not in net.fetched:
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
        net.fetcher.hint(link, _key(key))
    coming: list[tuple[int, bytes]] = []
    left: list[float] = []
    while _key(key) not in net.fetched:
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


def test_what_somebody_else_brings_in_the_end_counts_as_long_as_it_was_waited_for():
    """Else nothing would be learned of a line that has become slow, and all would be asked for twice."""
    net = Net(links={1: True, 2: True})
    for second in (False, True):
        before = net.fetcher._promptness._share
        net.want(second, second)
        for link in (1, 2):
            net.fetcher.hint(link, _key(second))
        net.plan()
        while second and not net.late:
            net.now = net.fetcher.deadline()
            net.plan()
        net.arrive(_blob(second))
        net.plan()
        assert (net.fetcher._promptness._share > before) == second


def test_nothing_else_is_asked_for_twice_until_something_has_come():
    """Nobody has outrun anybody yet. As soon as one has, the others are as good as silent."""
    net = Net(links=dict.fromkeys(range(6), True))
    net.want(1, *range(4))
    for link in net.links:
        net.fetcher.hint(link, _key(1))
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


def test_the_only_holder_is_asked_again_soon_however_often_it_was_silent():
    """Its line is broken time and again, and nobody else has it or says so."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    asked = []
    while net.now < 300.0:
        net.fetcher.hint(1, _key(1))
        for link, blob in net.plan():
            if link == 1:
                asked.append(net.now)
            else:
                net.fail(blob)
        net.now = net.fetcher.deadline()
    assert max(b - a for a, b in pairwise(asked)) < limits.FETCH_PATIENCE_S + limits.FETCH_RETRY_MAX_S + 1.0


def test_of_a_slow_line_among_fast_ones_little_comes_twice():
    lines = Lines(8.0, 0.4, 0.4, 0.4)
    assert lines.fetch(1, 200, limits.CHUNK_BYTES_MAX) < 40.0
    assert lines.asked <= 210


@pytest.mark.parametrize("rng_seed", range(3))
def test_a_silent_holder_delays_a_payload_by_seconds_and_few_of_many(rng_seed):
    lines = Lines(1e9, 0.01, 0.01, 0.01)
    lines.net.fetcher._sources._rng.seed(rng_seed)
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


def test_who_was_silent_is_not_believed_again():
    """Who is busy says so. A liar that says nothing must not be asked before others are tried."""
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    assert [link for link, _ in net.plan()] == [1]
    net.pass_time(limits.FETCH_PATIENCE_S + 0.1)
    tried = []
    while len(tried) < 2:
        for link, blob in net.plan():
            tried.append(link)
            net.fail(blob)
        net.now = net.now + limits.FETCH_SOON_S
    assert sorted(tried) == [2, 3]


def test_more_can_be_found_missing_of_what_is_on_its_way():
    """Another chunk of it turned out damaged on disk."""
    net = Net(links={1: True})
    net.want(1, 1)
    net.plan()
    net.want(1, 1, 2)
    net.fetcher.hint(1, _key(1))
    net.plan()
    net.arrive(_blob(1))
    assert net.fetched == []
    net.plan()
    net.arrive(_blob(2))
    assert net.fetched == [_key(1)]


def test_a_claim_that_is_repeated_does_not_wash_a_failure_away():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint_part(1, _key(1), _blob(1))
    ((_, blob),) = net.plan()
    net.fail(blob)
    net.fetcher.hint_part(1, _key(1), _blob(1))
    assert net.plan() == []


def test_a_large_chunk_is_given_more_time_and_so_is_what_waits_behind_it():
    net = Net(links={1: True})
    net.want(1, 1, 2, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, _key(1))
    assert len(net.plan()) == 2
    first, second = (flight.deadline for flight in net.fetcher._flights)
    assert first == limits.FETCH_TIMEOUT_S
    assert second == 2 * limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S


def test_a_failure_of_somebody_else_changes_nothing():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    net.plan()
    net.fetcher.failed(2, _blob(1), net.now)
    net.fetcher.failed(1, _blob(7), net.now)
    assert net.plan() == []


def test_what_a_link_took_with_it_is_fetched_elsewhere():
    net = Net(links={1: True, 2: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    net.plan()
    net.drop(1)
    assert net.plan() == [] or net.flights == {_blob(1): 2}
    net.pass_time()
    net.plan()
    assert net.flights == {_blob(1): 2}


def test_completion_is_told_once_for_each_key():
    net = Net(links={1: True})
    net.want(1, 1, 2)
    net.want(2, 2, 3)
    net.want(2, 2, 3)
    net.want(3, 1, 1)
    net.arrive(_blob(2))
    assert net.fetched == []
    net.arrive(_blob(3))
    assert net.fetched == [_key(2)]
    net.arrive(_blob(1))
    assert net.fetched == [_key(2), _key(1), _key(3)]
    net.arrive(_blob(1))
    assert len(net.fetched) == 3
    net.want(4, 1, 2)
    assert net.fetched[3:] == [_key(4)]
    assert len(net.fetcher.wants) == 0


def test_forgotten_keys_are_not_fetched():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    net.fetcher.wants.forget(_key(1))
    net.fetcher.wants.forget(_key(9))
    assert net.plan() == []
    net.arrive(_blob(1))
    assert net.fetched == []


def test_only_what_is_on_its_way_may_be_put_to_us():
    net = Net(links={1: False})
    net.want(1, 1, size=77)
    assert net.fetcher.expected_size(_blob(1)) is None
    net.fetcher.hint(1, _key(1))
    net.plan()
    assert net.fetcher.expected_size(_blob(1)) == 77
    assert net.fetcher.expected_size(_blob(2)) is None
    net.arrive(_blob(1))
    assert net.fetcher.expected_size(_blob(1)) is None


def test_hints_are_for_wants_and_links_that_there_are():
    net = Net(links={1: True})
    net.fetcher.hint(1, _key(1))
    net.want(1, 1)
    net.fetcher.hint(99, _key(1))
    assert net.plan() == []
    net.pass_time()
    assert net.plan() == [(1, _blob(1))]


def test_parts_are_fetched_from_those_who_have_them_and_the_rarest_first():
    net = Net(links={1: True, 2: False})
    net.want(1, *range(4))
    net.fetcher.hint_part(1, _key(1), _blob(0))
    net.fetcher.hint_part(2, _key(1), _blob(0))
    net.fetcher.hint_part(1, _key(1), _blob(3))
    net.fetcher.hint_part(1, _key(1), _blob(9))
    net.fetcher.hint_part(7, _key(1), _blob(1))
    net.fetcher.hint_part(1, _key(2), _blob(1))
    assert net.plan() == [(1, _blob(3)), (2, _blob(0))]
    assert net.fetcher.wants.holders_of(_key(1), _blob(0)) == {1, 2}
    net.arrive(_blob(3))
    net.drop(2)
    assert net.plan() == [(1, _blob(0))]
    net.drop(1)
    net.pass_time(limits.ORPHAN_PATIENCE_S)
    net.plan()
    assert not net.fetcher.wants.lacking(net.now, net.now), "nobody holds any of it any more"


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


def test_whoever_says_again_that_it_holds_what_it_failed_is_asked_once_more_and_not_five_times():
    net = Net(links={1: True})
    net.want(1, 0)
    net.fetcher.hint(1, _key(1))
    first = _asked_in_vain(net, 10.0)
    net.fetcher.hint(1, _key(1))
    assert net.plan() == [(1, _blob(0))], "at once"
    net.fail(_blob(0))
    net.pass_time(limits.FETCH_RETRY_S)
    assert net.plan() == []
    assert first > 3


def test_a_holder_of_parts_is_asked_for_few_at_a_time():
    net = Net(links={1: True})
    net.want(1, *range(6))
    for number in range(6):
        net.fetcher.hint_part(1, _key(1), _blob(number))
    assert len(net.plan()) == limits.PARTS_PER_LINK_MAX
    net.fetcher.hint(1, _key(1))
    assert len(net.plan()) == limits.FETCHES_PER_LINK_MAX - limits.PARTS_PER_LINK_MAX


def test_nobody_is_guessed_at_while_parts_come_along():
    net = Net(links={1: True, 2: True})
    net.want(1, *range(12))
    for number in range(10):
        net.fetcher.hint_part(1, _key(1), _blob(number))
        net.plan()
        net.pass_time(limits.FETCH_RETRY_S / 2)
    assert set(net.flights.values()) == {1}
    net.pass_time()
    net.fetcher.hint_part(1, _key(1), _blob(9))  # no news
    net.plan()
    assert 2 in net.flights.values()


def test_a_busy_holder_is_asked_again_soon_and_believed_a_few_times():
    net = Net(links={1: True})
    net.want(1, 1)
    net.fetcher.hint(1, _key(1))
    asked = []
    while net.now < 2.0:
        for _, blob in net.plan():
            asked.append(net.now)
            net.fail(blob)
        net.now = round(net.now + 0.05, 2)
    assert asked[:4] == pytest.approx([0.0, 0.1, 0.3, 0.7], abs=0.06)


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
    assert wakes > 60
    assert idle < wakes / 10


def test_payloads_that_nobody_has_do_not_delay_those_that_somebody_has():
    """An author died before anyone had its payload of a thousand chunks; later ones are wanted behind it."""
    net = Net(links={1: True, 2: True})
    net.want(0, *range(1000))
    net.pass_time(5.0)
    for number in range(2000, 2020):
        net.want(number, number)
        net.fetcher.hint(1, _key(number))
    tries = 0
    for _ in range(200):
        net.plan()
        for blob in list(net.flights):
            if blob in {_blob(n) for n in range(2000, 2020)} and net.flights[blob] == 1:
                net.arrive(blob)
            else:
                net.fail(blob)
                tries += 1
        net.pass_time(0.05)
    assert len(net.fetched) == 20
    assert tries <= 10 * 2 * (limits.FETCHES_PER_LINK_MAX + 1), "a few guesses a second and link, not a flood"


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
    asked = _ask_all_day(net, 900.0, holder=(4, _blob(599)))
    assert net.fetched == [_key(599)]
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
    net.fetcher.hint(2, _key(1))
    net.plan()
    net.pass_time(2 * limits.FETCH_RETRY_MAX_S)
    net.plan()
    net.drop(2)
    asked = _ask_all_day(net, net.now + 2 * limits.ORPHAN_RETRY_MAX_S)
    assert (1, _blob(0)) in asked


def test_what_its_holders_lose_is_looked_for_everywhere():
    """A holder goes, or does not bring it: others may have it without having said so."""
    net = Net(links={1: True, 2: True, 3: True})
    for key in (1, 2):
        net.want(key, 10 * key, 10 * key + 1)
    net.fetcher.hint(1, _key(1))
    net.fetcher.hint(2, _key(2))
    net.plan()
    net.drop(1)
    while net.now < 40.0 and len(net.fetched) < 2:
        net.plan()
        for blob, link in list(net.flights.items()):
            if link == 3:
                net.arrive(blob)
        net.pass_time(0.5)
    assert sorted(net.fetched) == sorted([_key(1), _key(2)])


def test_payloads_that_somebody_has_do_not_keep_those_away_that_nobody_speaks_of():
    """There is always another payload that is known to be held: the line is never idle."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    net.want(0, 1000, 1001, 1002)
    net.pass_time()
    for key in range(1, 40):
        net.want(key, *range(20 * key, 20 * key + 20))
        for link in net.links:
            net.fetcher.hint(link, _key(key))
        net.plan()
        for blob in list(net.flights):
            net.arrive(blob)
    assert _key(0) in net.fetched


def test_who_was_guessed_rightly_is_asked_for_the_rest():
    net = Net(links={1: True, 2: True, 3: True})
    net.want(1, *range(100))
    net.pass_time()
    net.plan()
    blob, link = next(iter(net.flights.items()))
    net.arrive(blob)
    assert net.fetcher.wants.holders_of(_key(1), _blob(99)) == {link}


def test_what_is_lacking_of_what_was_wanted_by_a_time():
    """Later wants do not count, nor those that nobody has been known to hold for long."""
    net = Net(links={1: True, 2: True})
    for key in (1, 2):
        net.want(key, key, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, _key(2))
    net.plan()
    net.pass_time(1.0)
    net.want(3, 3, size=limits.CHUNK_BYTES_MAX)
    net.fetcher.hint(1, _key(3))
    net.plan()
    wants = net.fetcher.wants
    assert (len(wants), len(wants.lacking(0.5, net.now)), len(wants.lacking(1.0, net.now))) == (3, 2, 3)
    net.pass_time(limits.ORPHAN_PATIENCE_S)
    net.plan()
    assert (len(wants), len(wants.lacking(0.5, net.now)), len(wants.lacking(1.0, net.now))) == (3, 1, 2)
    net.arrive(_blob(2))
    assert (len(wants), wants.lacking(0.5, net.now)) == (2, [])


def test_a_liar_about_a_size_does_not_keep_an_honest_chunk_away():
    """It lists the hash of somebody's chunk with a size of its own, and is heard of first."""
    net = Net(links={1: True, 2: True})
    net.want(1, 1, size=50)
    net.want(2, 1, size=100)
    for key in (1, 2):
        net.fetcher.hint(1, _key(key))
    for _ in range(10):
        net.plan()
        if net.flights and net.sizes[_blob(1)] == 100:
            break
        for blob in list(net.flights):
            net.fail(blob)  # 100 bytes where 50 were promised
        net.pass_time(0.2)
    assert net.sizes[_blob(1)] == 100


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
        net.fetcher.hint(rng.choice(sorted(net.links)), _key(rng.randrange(wants)))
        net.pass_time(rng.choice([0.01, 0.5, 5.0, 61.0]))
    assert sorted(net.fetched) == sorted(_key(k) for k in keys)


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
            net.fetcher.hint(link, _key(1))
    for _ in range(20):
        net.plan()  # checks it
        net.pass_time(0.3)


def _calls(function) -> int:
    """How many calls of Python functions one call makes: its cost, whatever the machine does besides."""
    count = 0

    def note(frame, event, arg) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_payloads_that_wait_for_busy_links_cost_little_to_look_at():
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(1000):
        net.want(number, number)
        for link in (1, 2):
            net.fetcher.hint(link, _key(number))
    net.plan()
    assert len(net.flights) == 2 * limits.FETCHES_PER_LINK_MAX
    net.arrive(next(iter(net.flights)))
    assert _calls(net.plan) < 3 * 1000


def test_what_was_forgotten_and_is_wanted_again_is_asked_for_again():
    """While a link that declined it rests from it: nothing else is looked for meanwhile."""
    net = Net(links={1: True})
    net.want(1, 0)
    net.pass_time()
    for _ in range(8):
        while not net.plan():
            net.now = net.fetcher.deadline()
        net.fail(_blob(0))
    net.fetcher.wants.forget(_key(1))
    net.fetcher._changed = True
    assert net.plan() == []
    net.want(2, 0)
    asked = _ask_all_day(net, net.now + 60.0)
    assert len(asked[1, _blob(0)]) > 3


def test_payloads_that_only_a_silent_holder_is_free_for_cost_little_to_look_at():
    net = Net(links=dict.fromkeys(range(1, 4), True))
    net.want(0, 0)
    for link in net.links:
        net.fetcher.hint(link, _key(0))
    ((silent, blob),) = net.plan()
    while blob not in net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.arrive(blob)
    for number in range(1, 1001):
        net.want(number, *range(10 * number, 10 * number + 10))
        for link in net.links:
            net.fetcher.hint(link, _key(number))
    net.plan()
    net.pass_time()
    net.fetcher._changed = True
    assert _calls(net.plan) < 3 * 1000
    assert silent not in net.flights.values()
    assert len(net.flights) == 2 * limits.FETCHES_PER_LINK_MAX


def test_who_claims_to_hold_thousands_and_sends_none_costs_little():
    """Nor does it keep anyone from those that others hold, however late they came."""
    net = Net(links=dict.fromkeys(range(1, 7), True))
    for number in range(20_000):
        net.want(number, number)
        net.fetcher.hint(1, _key(number))
    net.now += 0.5
    net.plan()
    net.want(30_000, 30_000)
    net.fetcher.hint(2, _key(30_000))
    looks = 0
    while _blob(30_000) not in net.flights:
        looks += 1
        assert _calls(net.plan) < 3_000
        net.fetcher.hint(3, _key(30_000 + looks))
        net.fetcher._changed = True
        net.now += 0.001
        assert looks <= 1 + 20_000 / limits.WANTS_LOOKED_AT_MAX


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
    assert asked > 200
    net.want(1000, 1000)
    net.fetcher.hint(1, _key(1000))
    assert _calls(net.plan) < 3 * 500
    assert _blob(1000) in net.flights
