"""Misbehaviour as points that fade: a peer with too many is turned away until enough have faded.

The points of an offence are chosen by who can commit it. What only a liar or a broken build does weighs much;
what a wrong clock or another release does weighs next to nothing, so that neither is ever turned away for it.
"""

from dataclasses import dataclass
from enum import Enum
from math import exp2, log2

from gossamer.protocol import limits
from gossamer.protocol.admission.budget import Key
from gossamer.protocol.errors import ImplausibleError, PeerError, SignatureError, UnsupportedError


class Offence(Enum):
    """What kind of wrong a peer did, and how many points it costs."""

    SIGNATURE = ("bad signature", 20.0)
    """TLS lets no flipped bit through: somebody made it."""
    MALFORMED = ("malformed message", 35.0)
    """Its link is closed each time."""
    RECORD = ("invalid record", 10.0)
    """Signed by the sender itself, and not what a record may be."""
    RELAYED = ("invalid record of another node", 0.25)
    """Whoever relays has checked it, by the rules of its own release."""
    CHUNK = ("chunk that does not match its hash", 20.0)
    NONSENSE = ("request that makes no sense", 5.0)
    HANDSHAKE = ("failed handshake", 5.0)
    """Of an address, since no key was proven."""
    STALLED = ("handshake that came to a standstill", 0.25)
    """Of an address, too. A path that loses its longest packets does that to honest nodes."""
    UNSUPPORTED = ("unknown kind of message or record", 0.25)
    """Of a later release, perhaps."""
    IMPLAUSIBLE = ("round too early", 0.0)
    """Its clock is wrong, or ours."""

    def __init__(self, title: str, points: float) -> None:
        self.title = title
        self.points = points


def offence_in_record(error: PeerError, *, relayed: bool) -> Offence:
    """Which offence a record is that was refused with `error`. `relayed`: another than its author sent it."""
    match error:
        case SignatureError():
            return Offence.SIGNATURE
        case ImplausibleError():
            return Offence.IMPLAUSIBLE
        case UnsupportedError():
            return Offence.UNSUPPORTED
    return Offence.RELAYED if relayed else Offence.RECORD


@dataclass(slots=True)
class _Score:
    points: float
    time: float
    listed: bool = False

    def at(self, now: float) -> float:
        return self.points * exp2(-max(0.0, now - self.time) / limits.GREYLIST_HALF_LIFE_S)


class Greylist:
    """Who is turned away, for now. Keys are node ids, or network addresses for what no key vouches for."""

    def __init__(self) -> None:
        self._scores: dict[Key, _Score] = {}

    def __len__(self) -> int:
        return len(self._scores)

    def add(self, key: Key, offence: Offence, now: float) -> bool:
        """Note an offence. Returns whether it is the one that puts the peer on the list."""
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
        """Seconds for which a peer is still turned away, 0 for one that is not."""
        score = self._scores.get(key)
        if score is None or not score.listed:
            return 0.0
        points = score.at(now)
        if points < limits.GREYLIST_POINTS_RELEASED:
            return 0.0
        return limits.GREYLIST_HALF_LIFE_S * log2(points / limits.GREYLIST_POINTS_RELEASED)

    def listed(self, now: float) -> list[Key]:
        """Who is on the list."""
        return [key for key in self._scores if self.remaining(key, now) > 0.0]

    def released(self, now: float) -> list[Key]:
        """Take those off the list whose time is over, and return them; forget scores that have faded."""
        over = [key for key, s in self._scores.items() if s.listed and self.remaining(key, now) == 0.0]
        for key in over:
            self._scores[key].listed = False
        self._scores = {key: s for key, s in self._scores.items() if s.listed or s.at(now) >= 1.0}
        return over

    def _make_room(self, now: float) -> None:
        """The one with the fewest points gives way."""
        while len(self._scores) >= limits.PEERS_WATCHED_MAX:
            del self._scores[min(self._scores, key=lambda key: self._scores[key].at(now))]
