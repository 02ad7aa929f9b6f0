"""How many bytes of chunks may be under way at a time: fewer where our own line brings them too late.

Whoever is asked sends at once, and all of them share our line: where it is slow each gets so little of it
that none is in time, and what has come of all is thrown away. Nobody tells how fast our line is; that shows
by what it brings. So the window grows by each chunk that comes in good time. When chunks are given up that
several links were asked for, it falls to what came meanwhile, or, if nothing did, to a third of what they
were sending.
"""

from collections.abc import Collection
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.flights import Flight, Flights


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
        """Transfers are given up; they are still under way. One link that is silent is not our line.

        What was asked for before the window was last cut says nothing of what it is now. A link sends one
        chunk after another: so one a link shares our line.
        """
        sharing = {flight.link: flight.size for flight in self._flights.newest.values()}
        before = [flight.came_before for flight in flights if flight.began >= self._cut_at]
        if len(sharing) == 1 or not before:
            return
        came = self._flights.came - min(before)
        wanted = came or sum(sharing.values()) // 3
        self.bytes = max(limits.FETCH_WINDOW_BYTES_MIN, min(self.bytes, wanted))
        self._cut_at = now
