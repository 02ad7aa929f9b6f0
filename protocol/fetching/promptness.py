"""How soon transfers bring what was asked for: when one takes too long, and which links are asked last then.

Silence looks like slowness. What tells them apart is how long other transfers take here. Each transfer is
measured as a share of the patience with it, so that neither its size nor the queue before it matters. On a
slow line, a transfer that only takes its time is seldom mistaken for silence, and more and more seldom. On a
fast line, no link is waited for that others outrun many times over.
"""

from math import inf

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff
from gossamer.protocol.fetching.flights import Flight

_WEIGHT = 1 / 8
"""Weight of the last transfer in the moving average."""


class Promptness:
    """How long transfers usually take, and which links have kept us waiting."""

    def __init__(self) -> None:
        self._share = limits.FETCH_SHARE_AT_FIRST
        """The share of the patience with it that a chunk takes, averaged over those that came lately."""
        self.brought_at = -inf
        """When a chunk last came, from any link."""
        self._rests: dict[int, Backoff] = {}

    def brought(self, first: Flight, now: float) -> float:
        """A chunk came. `first` is the oldest of its transfers that had not ended, whichever brought it.

        If the second counted, a line that has become slow would never be found to be slow. Returns the share
        of the patience with `first` that was needed.
        """
        share = min(1.0, max(0.0, now - first.began) / (first.deadline - first.began))
        self._share += _WEIGHT * (share - self._share)
        self.brought_at = now
        return share

    def overdue_at(self, flight: Flight) -> float:
        """When a transfer will have taken far longer than is usual."""
        usual = self._share * (flight.deadline - flight.began)
        return flight.began + max(limits.FETCH_OVERDUE_S, limits.FETCH_OVERDUE_TIMES * usual)

    def kept_waiting(self, link: int, now: float) -> None:
        """A link did not bring a chunk in time, so it rests: longer each time."""
        rest = self._rests.get(link)
        if rest is None or rest.until <= now:
            self._rests[link] = Backoff.after(rest, now, limits.TARDY_REST_S, limits.TARDY_REST_MAX_S)

    def tardy(self, now: float, links: int) -> set[int]:
        """Links that rest: they are not asked for what others have.

        Empty if they are more than half of `links`: then our own line is what is slow.
        """
        tardy = {link for link, rest in self._rests.items() if rest.until > now}
        return tardy if 2 * len(tardy) <= links else set()

    def link_down(self, link: int) -> None:
        self._rests.pop(link, None)
