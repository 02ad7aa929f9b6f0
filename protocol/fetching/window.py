"""How many bytes of chunks may be under way at a time: fewer where our own line brings them too late.

Whoever is asked sends at once, and all of them share our line: where it is slow each gets so little of it
that none is in time, and what has come of all is thrown away. Nobody tells how fast our line is; that shows
by what it brings. So the window grows by each chunk that comes in good time. When transfers are given up
while several links were sending, and more was lost meanwhile than came, it falls to what came, or, if nothing
did, to a third of what they were sending. Those who are silent, or slow themselves, leave it as it is where
others bring more than they withhold.
"""

from collections.abc import Collection
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.flights import Flight, Flights


class FetchWindow:
    """Of one node."""

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self.bytes = limits.FETCH_WINDOW_BYTES_AT_FIRST
        self._cut_at = -inf

    def is_full(self, *, of_searches: bool) -> bool:
        """Whether no other transfer may begin. Searches, of which little comes, have a window of their own:
        silence there must not keep us from what somebody is known to hold."""
        return self._flights.bytes_under_way(of_searches=of_searches) >= self.bytes

    def brought(self, flight: Flight, share: float) -> None:
        """A chunk came, after such a share of the patience with it."""
        if share < limits.FETCH_SHARE_GOOD:
            self.bytes = min(limits.FETCH_WINDOW_BYTES_MAX, self.bytes + flight.size)

    def given_up(self, flights: Collection[Flight], now: float) -> None:
        """Transfers, one at least, are given up; they are still under way.

        Where only one link is asked it is that link that is slow or silent. On a shared line a small chunk is
        in time sooner than a large one, so if it is not, that is its link's doing, too. What was asked for
        before the window was last cut says nothing of what it is now.
        """
        under_way = self._flights.newest.values()
        largest = max(flight.size for flight in under_way)
        lost = [flight for flight in flights if 2 * flight.size >= largest]
        self._flights.lost += sum(flight.size for flight in lost)
        since = [flight for flight in lost if flight.began >= self._cut_at]
        sending = {flight.link: flight.size for flight in under_way}
        if not since or len(sending) == 1:
            return
        first = min(since, key=lambda flight: flight.began)
        came = self._flights.came - first.came_before
        if self._flights.lost - first.lost_before <= came:
            return
        if sum(flight.size for flight in under_way) <= limits.FETCH_WINDOW_BYTES_MIN:
            return
        # A link sends one chunk after another: so one a link shares our line.
        wanted = came or sum(sending.values()) // 3
        self.bytes = max(limits.FETCH_WINDOW_BYTES_MIN, min(self.bytes, wanted))
        self._cut_at = now
