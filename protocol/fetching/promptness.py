"""How soon transfers bring what was asked for: when one lasts too long, and who is asked last after that.

Silence looks like slowness. What tells them apart is how long other transfers take here: each is measured as
a share of the patience with it, whatever its size and the queue before it. So on a slow line what only
takes its time is seldom taken for silence, and ever more seldom; on a fast one nobody is waited for whom
others outrun many times over.
"""

from math import inf

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff
from gossamer.protocol.fetching.flights import Flight

_WEIGHT = 1 / 8
"""Of the last transfer, in the average."""


class Promptness:
    """What is usual of all transfers, and which links have kept us waiting."""

    def __init__(self) -> None:
        self._share = limits.FETCH_SHARE_AT_FIRST
        """How much of the patience with it a chunk takes, on average of those that came lately."""
        self.brought_at = -inf
        """When something last came, from whomever."""
        self._rests: dict[int, Backoff] = {}

    def brought(self, first: Flight, now: float) -> float:
        """A chunk came. `first` is the first transfer of it that was waited for, whoever brought it.

        Were it the second that counts, a line that has become slow would never be found to be so. Returns how
        much of the patience with that transfer was needed.
        """
        share = min(1.0, max(0.0, now - first.began) / (first.deadline - first.began))
        self._share += _WEIGHT * (share - self._share)
        self.brought_at = now
        return share

    def overdue_at(self, flight: Flight) -> float:
        """From when on a transfer has lasted far longer than is usual."""
        usual = self._share * (flight.deadline - flight.began)
        return flight.began + max(limits.FETCH_OVERDUE_S, limits.FETCH_OVERDUE_TIMES * usual)

    def kept_waiting(self, link: int, now: float) -> None:
        """A link did not bring something in time, so it rests: longer each time."""
        rest = self._rests.get(link)
        if rest is None or rest.until <= now:
            self._rests[link] = Backoff.after(rest, now, limits.TARDY_REST_S, limits.TARDY_REST_MAX_S)

    def tardy(self, now: float, links: int) -> set[int]:
        """Links that rest: not to be asked for what others have.

        None where they are most of all `links`: then it is our own line that is slow.
        """
        tardy = {link for link, rest in self._rests.items() if rest.until > now}
        return tardy if 2 * len(tardy) <= links else set()

    def link_down(self, link: int) -> None:
        self._rests.pop(link, None)
