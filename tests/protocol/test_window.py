"""`window`: what several send at a time over one slow line of ours comes in time, most of it."""

from __future__ import annotations

from math import inf

import pytest

from gossamer.protocol import limits
from tests.protocol.fetching import Net, blob_of, key_of

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
        self.net = Net(links=dict.fromkeys(range(donors), True))
        self.line = line
        self._donors_line, self._silent, self._step_s = donors_line, silent, step_s
        self._queues: dict[int, dict[bytes, float]] = {link: {} for link in range(donors)}
        self.net.want(0, *range(2000), size=MIB)
        for link in self.net.links:
            self.net.fetcher.hint(link, key_of(0))

    @property
    def most(self) -> int:
        """How many chunks are under way by now."""
        return len(self.net.flights)

    def bring(self, seconds: float) -> float:
        """The bytes that come in so long, of chunks that came whole."""
        before, end = len(self.net.have), self.net.now + seconds
        while self.net.now < end:
            for link, blob in self.net.plan():
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
    net.fetcher._window.bytes = limits.FETCH_WINDOW_BYTES_MIN
    for number in range(20):
        net.want(number, number, size=MIB)
    net.now += limits.FETCH_RETRY_S
    assert len(net.plan()) == 1, "on a guess"
    net.want(99, 990, 991, size=MIB)
    net.fetcher.hint(1, key_of(99))
    assert len(net.plan()) == 1 and not net.plan()
    held = {blob_of(990), blob_of(991)}
    net.arrive(*(held & net.flights.keys()))
    net.plan()
    assert len(held & net.flights.keys()) == 1


def test_a_search_that_two_are_asked_for_is_one_still() -> None:
    net = Net(links=dict.fromkeys(range(6), True))
    net.fetcher._window.bytes = limits.FETCH_WINDOW_BYTES_MIN
    net.want(1, 1, size=MIB)
    net.plan()
    while not net.late:
        net.now = net.fetcher.deadline()
        net.plan()
    net.want(2, 2, size=MIB)
    net.fetcher.hint(1, key_of(2))
    net.plan()
    assert blob_of(2) in net.flights


def test_a_silent_link_alone_is_not_our_line() -> None:
    net = Net(links={1: True, 2: True})
    net.want(1, 1, 2, 3, size=MIB)
    net.fetcher.hint(1, key_of(1))
    net.plan()
    net.now = max(flight.deadline for flight in net.fetcher.requests)
    net.plan()
    assert net.fetcher._window.bytes == limits.FETCH_WINDOW_BYTES_AT_FIRST
