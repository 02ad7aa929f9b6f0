"""How many bytes of chunks may be under way at a time: fewer where our own line brings them too late.

Peers send as soon as they are asked, and all of them share our line. On a slow line each gets so small a
share that no chunk is in time, and the parts that have come are thrown away. Nobody tells us how fast our
line is; only what it brings shows that. So the window grows with each chunk that comes in good time. When
transfers are given up while several links were sending, and more was lost meanwhile than came, the window
falls to what came or, if nothing did, to a third of what the links were sending. Peers that are silent or
slow themselves do not shrink the window as long as others bring more than those withhold.
"""

from collections.abc import Collection
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.requests import Request, Requests


class FetchWindow:
    """The fetch window of one node."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.bytes = limits.FETCH_WINDOW_BYTES_AT_FIRST
        self._cut_at = -inf

    def is_full(self, *, of_searches: bool) -> bool:
        """Whether no other transfer may begin. Searches, which bring little, are counted apart: silence there
        must not keep us from chunks that somebody is known to hold."""
        return sum(self._requests.sizes(of_searches=of_searches)) >= self.bytes

    def brought(self, request: Request, share: float) -> None:
        """A chunk came after `share` of the patience with it, from 0 to 1."""
        if share < limits.FETCH_SHARE_GOOD:
            self.bytes = min(limits.FETCH_WINDOW_BYTES_MAX, self.bytes + request.size)

    def given_up(self, over: Collection[Request], now: float) -> None:
        """Transfers are given up: one at least, and all still counted as under way.

        If only one link was sending, that link is slow or silent, not our line. On a shared line a small
        chunk comes sooner than a large one, so a small one that is late is its link's fault too. Transfers
        that began before the window was last cut say nothing about its present size.
        """
        under_way = self._requests.current.values()
        largest = max(request.size for request in under_way)
        lost = [request for request in over if 2 * request.size >= largest]
        self._requests.lost += sum(request.size for request in lost)
        since = [request for request in lost if request.began >= self._cut_at]
        sending = {request.link: request.size for request in under_way}
        if not since or len(sending) == 1:
            return
        first = min(since, key=lambda request: request.began)
        came = self._requests.came - first.came_before
        if self._requests.lost - first.lost_before <= came:
            return
        if sum(request.size for request in under_way) <= limits.FETCH_WINDOW_BYTES_MIN:
            return
        # A link sends one chunk after another, so only one chunk per link shares our line at a time.
        wanted = came or sum(sending.values()) // 3
        self.bytes = max(limits.FETCH_WINDOW_BYTES_MIN, min(self.bytes, wanted))
        self._cut_at = now
