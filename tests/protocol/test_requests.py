"""What is wanted, and of which sizes; what is lacking, and when it is complete; how much is under way."""

from __future__ import annotations

from math import inf

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
    net.hint(1, 1)
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
    net.hint(1, 1)
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
    net.hint(1, 1)
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
    net.hint(1, 2)
    net.plan()
    net.pass_time(1.0)
    net.want(3, 3, size=limits.CHUNK_BYTES_MAX)
    net.hint(1, 3)
    net.plan()
    wants = net.fetcher.wants
    assert (len(wants), len(wants.lacking(0.5, net.now)), len(wants.lacking(1.0, net.now))) == (3, 2, 3)
    assert (wants.chunks_lacking(0.5), wants.chunks_lacking(1.0)) == (2, 3)
    net.pass_time(limits.PAYLOAD_PATIENCE_S)
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
                net.hint(1, key)
            net.fetcher.plan(net.now)
            net.pass_time()
            net.fetcher.plan(net.now)

        return calls(learn)

    assert cost(400) < 5 * cost(100)


# --- the window: what several send at a time over one slow line of ours comes in time, most of it

KBIT_S = 125.0
MIB = limits.CHUNK_BYTES_MAX


class OurLine:
    """A joiner behind a line of its own, and donors of a large snapshot that may have slow lines, too.

    Each donor sends what it was asked for one chunk after another, until that has been given up; those that
    send share the joiner's line.
    """

    def __init__(
        self, donors: int, line: float, donors_line: float = inf, *, silent: int = 0, step_s: float = 0.5
    ) -> None:
        """Lines in bytes a second. The first `silent` of the donors send nothing."""
        self.asked = 0
        self.net = Net(links=dict.fromkeys(range(donors), True))
        self.line = line
        self._donors_line, self._silent, self._step_s = donors_line, silent, step_s
        self._queues: dict[int, dict[bytes, float]] = {link: {} for link in range(donors)}
        self.net.want(0, *range(2000), size=MIB)
        for link in self.net.links:
            self.net.hint(link, 0)

    @property
    def most(self) -> int:
        """How many chunks are under way by now."""
        return len(self.net.flights)

    def bring(self, seconds: float) -> float:
        """The bytes that come in so long, of chunks that came whole."""
        before, end = len(self.net.have), self.net.now + seconds
        while self.net.now < end:
            for link, blob in self.net.plan():
                self.asked += 1
                self._queues[link][blob] = MIB
            self.net.now += self._step_s
            self._send()
        return MIB * (len(self.net.have) - before)

    def _send(self) -> None:
        for link, queue in self._queues.items():
            for blob in [blob for blob in queue if link not in self._asked_for(blob)]:
                del queue[blob]
        sending = [link for link, queue in self._queues.items() if queue and link >= self._silent]
        rate = min(self._donors_line, self.line / max(1, len(sending)))
        for link in sending:
            queue = self._queues[link]
            blob = next(iter(queue))
            queue[blob] -= rate * self._step_s
            if queue[blob] <= 0.0:
                del queue[blob]
                self.net.arrive(blob)

    def _asked_for(self, blob: bytes) -> tuple[int | None, int | None]:
        return self.net.flights.get(blob), self.net.late.get(blob)


@pytest.mark.parametrize("donors", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("kbit_s", [200, 300, 400, 800, 2000])
def test_many_donors_are_no_worse_than_one(donors: int, kbit_s: int) -> None:
    """Without a window six of them bring nothing at 400 kbit/s: each is given up before it is done."""
    line = OurLine(donors, kbit_s * KBIT_S)
    line.bring(180.0)  # until it has found out
    carried = line.bring(900.0) / (kbit_s * KBIT_S * 900.0)
    assert carried > 0.7


def test_where_our_own_line_is_slow_hardly_anything_is_asked_for_twice() -> None:
    line = OurLine(4, MIB / 8.0)
    line.bring(900.0)
    assert line.asked - len(line.net.have) - line.most <= 3


@pytest.mark.parametrize("donors", [4, 8])
def test_on_a_fast_line_as_much_is_under_way_as_may_be(donors: int) -> None:
    line = OurLine(donors, 100_000 * KBIT_S, 10_000 * KBIT_S, step_s=0.02)
    line.bring(4.0)
    line.net.plan()
    assert line.most == limits.FETCHES_MAX
    assert line.bring(10.0) > 0.9 * 10.0 * donors * 10_000 * KBIT_S


def test_donors_with_slow_lines_send_side_by_side() -> None:
    line = OurLine(6, 100_000 * KBIT_S, 250 * KBIT_S)
    line.bring(60.0)
    assert line.bring(600.0) > 0.9 * 600.0 * 6 * 250 * KBIT_S


def test_a_line_that_becomes_slow_and_fast_again_is_used() -> None:
    line = OurLine(8, 20_000 * KBIT_S, step_s=0.1)
    line.bring(30.0)
    line.line = 400 * KBIT_S
    line.bring(300.0)
    assert line.bring(600.0) > 0.7 * 600.0 * 400 * KBIT_S
    line.line = 20_000 * KBIT_S
    line.bring(60.0)
    assert line.bring(60.0) > 0.9 * 60.0 * 20_000 * KBIT_S


@pytest.mark.parametrize("kbit_s", [250, 500, 2_000])
@pytest.mark.parametrize("silent", [1, 2, 3])
def test_who_is_silent_does_not_slow_us_down(silent: int, kbit_s: int) -> None:
    """Nor does it where others need half of the patience with them, so that nothing makes the window grow."""
    line = OurLine(6, 100_000 * KBIT_S, kbit_s * KBIT_S, silent=silent)
    line.bring(300.0)
    assert line.bring(900.0) > 0.8 * 900.0 * (6 - silent) * kbit_s * KBIT_S


@pytest.mark.parametrize("silent", [1, 3])
def test_a_slow_line_is_found_out_though_some_are_silent(silent: int) -> None:
    line = OurLine(8, 400 * KBIT_S, silent=silent)
    line.bring(300.0)
    assert line.bring(900.0) > 0.7 * 900.0 * 400 * KBIT_S


def test_a_search_in_vain_keeps_us_from_nothing_that_is_held() -> None:
    net = Net(links=dict.fromkeys(range(6), True))
    net.fetcher.requests.window = limits.FETCH_WINDOW_BYTES_MIN
    for number in range(20):
        net.want(number, number, size=MIB)
    net.now += limits.FETCH_RETRY_S
    assert len(net.plan()) == 1, "on a guess"
    net.want(99, 990, 991, size=MIB)
    net.hint(1, 99)
    assert len(net.plan()) == 1 and not net.plan()
    held = {blob_of(990), blob_of(991)}
    net.arrive(*(held & net.flights.keys()))
    net.plan()
    assert len(held & net.flights.keys()) == 1


def test_a_search_that_two_are_asked_for_is_one_still() -> None:
    net = Net(links=dict.fromkeys(range(6), True))
    net.fetcher.requests.window = limits.FETCH_WINDOW_BYTES_MIN
    net.want(1, 1, size=MIB)
    net.plan()
    while not net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.want(2, 2, size=MIB)
    net.hint(1, 2)
    net.plan()
    assert blob_of(2) in net.flights
