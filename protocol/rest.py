"""Whether a swarm rests: nobody trains in it any more, as far as its members tell.

While one trains, what lies beyond its round waits until it gets there (see `Replica.horizon`). Where nobody
trains it never will, and all that there is counts.
"""

from collections.abc import Mapping
from math import inf

from gossamer.protocol.limits import REST_S


class Rest:
    """Watches the members' inner steps and the clock, for as long as somebody wants to know."""

    def __init__(self) -> None:
        self._steps: Mapping[bytes, int] = {}
        self._clock = 0
        self._since = inf
        self.somebody_trains = False
        """Whether a member has gone on since the watching began."""

    def look(self, inner_steps: Mapping[bytes, int], clock: int, now: float) -> None:
        """Take in how far every live member is by now, and the swarm's clock."""
        begins = self._since == inf
        goes_on = not begins and (
            clock > self._clock
            or any(steps > self._steps.get(node_id, steps) for node_id, steps in inner_steps.items())
        )
        if begins or goes_on or inner_steps.keys() - self._steps.keys():
            self._since = now
        self.somebody_trains |= goes_on
        self._steps, self._clock = inner_steps, clock

    def lasts(self, now: float) -> bool:
        """Whether nobody has gone on, and nobody come, for long enough to say so."""
        return now - self._since >= REST_S
