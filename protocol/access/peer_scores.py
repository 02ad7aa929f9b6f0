"""Misbehaviour as points that fade: a peer with too many points is turned away until enough have faded."""

from dataclasses import dataclass
from math import exp2, log2

from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import Key
from gossamer.protocol.errors import Offence


@dataclass(slots=True)
class _Score:
    points: float
    time: float
    listed: bool = False

    def at(self, now: float) -> float:
        return self.points * exp2(-max(0.0, now - self.time) / limits.GREYLIST_HALF_LIFE_S)


class Greylist:
    """Peers that are turned away for now. Keys are node ids, or network addresses for offences that no key
    vouches for."""

    def __init__(self) -> None:
        self._scores: dict[Key, _Score] = {}

    def __len__(self) -> int:
        return len(self._scores)

    def add(self, key: Key, offence: Offence, now: float) -> bool:
        """Note an offence. Returns whether this one puts the peer on the list."""
        if not offence.points:
            return False
        score = self._scores.get(key)
        if score is None:
            self._make_room(now)
            score = self._scores[key] = _Score(0.0, now)
        score.points = min(limits.GREYLIST_POINTS_MAX, score.at(now) + offence.points)
        score.time = now
        begins = not score.listed and score.points >= limits.GREYLIST_POINTS
        score.listed = score.listed or begins
        return begins

    def remaining(self, key: Key, now: float) -> float:
        """Seconds for which a peer will still be turned away; 0 if it is not on the list."""
        score = self._scores.get(key)
        if score is None or not score.listed:
            return 0.0
        points = score.at(now)
        if points < limits.GREYLIST_POINTS_RELEASED:
            return 0.0
        return limits.GREYLIST_HALF_LIFE_S * log2(points / limits.GREYLIST_POINTS_RELEASED)

    def listed(self, now: float) -> list[Key]:
        """The peers that are on the list."""
        return [key for key in self._scores if self.remaining(key, now) > 0.0]

    def released(self, now: float) -> list[Key]:
        """Take peers whose time is over off the list, and return them; forget scores that have faded."""
        over = [key for key, s in self._scores.items() if s.listed and self.remaining(key, now) == 0.0]
        for key in over:
            self._scores[key].listed = False
        self._scores = {key: s for key, s in self._scores.items() if s.listed or s.at(now) >= 1.0}
        return over

    def _make_room(self, now: float) -> None:
        """Forget the peer with the fewest points."""
        while len(self._scores) >= limits.PEERS_WATCHED_MAX:
            del self._scores[min(self._scores, key=lambda key: self._scores[key].at(now))]
