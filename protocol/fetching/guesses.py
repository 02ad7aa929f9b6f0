"""Whom to ask for chunks that nobody is known to hold: each link in turn, for one such chunk after another.

These chunks stand in a line. Every link has a place of its own in it and moves down the line by itself; a
chunk that a link failed comes up for that link again after its rest. So every link is asked for every chunk,
however many payloads nobody has, and the next chunk is found without a look at all the others. A link that
failed a chunk is spared guesses for a while.
"""

from bisect import bisect_left
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.failures import Failures
from gossamer.protocol.fetching.flights import Flights
from gossamer.protocol.fetching.wants import Wants

LINE_MIN = 1_024
"""A line up to this length is never tidied."""

Turn = tuple[float, bytes]
"""The time from which a chunk may be asked for, and the chunk."""


class Guesses:
    """What each link may be asked for on a guess, that is, without having said that it holds it."""

    def __init__(self, wants: Wants, flights: Flights, failures: Failures) -> None:
        """The end of every transfer must be reported here: to `failed` if it was in vain, else to `ended`."""
        self._wants = wants
        self._flights = flights
        self._failures = failures
        self._young: list[Turn] = []
        """A heap of chunks that are not in the line yet, since a peer may still say that it holds them."""
        self._enters: dict[bytes, float] = {}
        """When each of these chunks enters the line. An entry of the heap with another time is ignored."""
        self._line: list[Turn] = []
        """The line. A chunk may stand in it twice, or have come, or be known to be held by now."""
        self._longest = LINE_MIN
        self._places: dict[int, int] = {}
        """How far down the line each link is."""
        self._again: dict[int, list[Turn]] = {}
        """Per link, a heap of chunks that it was asked for before, or passed by."""
        self._passed_by: dict[bytes, set[int]] = {}
        """Links that passed a chunk by because it was under way."""
        self._spared: dict[int, float] = {}
        """Until when each link that failed a chunk is spared guesses."""

    # -- what happens

    def link_up(self, link: int) -> None:
        """A new link starts at the beginning of the line."""
        self._places[link] = 0
        self._again[link] = []

    def link_down(self, link: int) -> None:
        self._places.pop(link, None)
        self._again.pop(link, None)
        self._spared.pop(link, None)

    def failed(self, link: int, blob: bytes, until: float, now: float) -> None:
        """A link did not bring a chunk and is not asked for it again before `until`."""
        self._spared[link] = now + limits.FETCH_RETRY_S
        heappush(self._again[link], (until, blob))
        self.ended(blob)

    def ended(self, blob: bytes) -> None:
        """A chunk is no longer under way: links that passed it by meanwhile come back to it."""
        for link in sorted(self._passed_by.pop(blob, ())):
            if link in self._again:
                heappush(self._again[link], (-inf, blob))

    # -- what to do

    def spares(self, link: int, now: float) -> bool:
        """Whether a link is not to be asked for anything on a guess now."""
        return self._spared.get(link, -inf) > now

    def are_any(self, now: float) -> bool:
        """Whether there may be something to ask any link for. Usually there is not, and this is cheap."""
        self._enter(now)
        return bool(self._line) or any(self._again.values())

    def open_to(self, links: Iterable[int], now: float) -> list[int]:
        """The `links` for which there may be something to ask now."""
        return [link for link in links if self.next_turn(link, now) <= now]

    def take(self, link: int, now: float) -> tuple[bytes, bytes] | None:
        """The next key and chunk to ask a link for: of what it may be asked for, what has waited longest."""
        while (blob := self._next(link, now)) is not None:
            key, at = self._soonest(blob, now)
            if key is None:
                continue
            free_at = max(self._free_at(link, blob), at)
            if free_at <= now:
                return key, blob
            if free_at == inf:
                self._passed_by.setdefault(blob, set()).add(link)
            elif free_at == at:
                heappush(self._again[link], (free_at, blob))
        return None

    def next_turn(self, link: int, now: float) -> float:
        """When there may be something to ask a link for, if there is nothing now: not later than that."""
        at, again = max(now, self._spared.get(link, now)), self._again[link]
        if self._places[link] < len(self._line):
            return at
        return max(at, again[0][0]) if again else inf

    def next_entry(self) -> float:
        """When the next chunk enters the line."""
        while self._young:
            at, blob = self._young[0]
            is_current = self._enters.get(blob) == at
            if is_current and self._wants.without_holder(blob):
                return at
            heappop(self._young)
            if is_current:
                del self._enters[blob]
        return inf

    def _next(self, link: int, now: float) -> bytes | None:
        """The chunk that a link comes to now: its next in the line, or one to ask it for again."""
        again, place = self._again[link], self._places[link]
        is_again = bool(again) and again[0][0] <= now
        if place < len(self._line) and not (is_again and again[0] < self._line[place]):
            self._places[link] += 1
            return self._line[place][1]
        return heappop(again)[1] if is_again else None

    def _free_at(self, link: int, blob: bytes) -> float:
        """When a link may be asked for a chunk: `inf` while it is under way, after a rest if it failed it."""
        if blob in self._flights:
            return inf
        return self._failures.rests_until(link, blob, self._wants.size_of(blob))

    def _soonest(self, blob: bytes, now: float) -> tuple[bytes | None, float]:
        """A key under which a chunk may be asked for on a guess now, or else the next such key; and when."""
        found, soonest = None, inf
        for key, want in self._wants.without_holder(blob).items():
            if want.may_be_guessed_at < soonest:
                found, soonest = key, want.may_be_guessed_at
                if soonest <= now:
                    break
        return found, soonest

    def _enter(self, now: float) -> None:
        """Chunks that nobody has been known to hold for a moment go to the end of the line."""
        if not len(self._wants):
            self._forget()
        for blob in self._wants.take_without_holder():
            self._enter_at(self._soonest(blob, now)[1], blob)
        while self._young and self._young[0][0] <= now:
            entered, blob = heappop(self._young)
            if self._enters.get(blob) != entered:
                continue
            del self._enters[blob]
            at = self._soonest(blob, now)[1]
            if at <= now:
                self._line.append((at, blob))
            elif at < inf:
                self._enter_at(at, blob)
        if len(self._line) > self._longest:
            self._tidy()

    def _enter_at(self, at: float, blob: bytes) -> None:
        """A chunk goes to the end of the line at that time, or earlier if that was settled already."""
        if at < self._enters.get(blob, inf):
            self._enters[blob] = at
            heappush(self._young, (at, blob))

    def _forget(self) -> None:
        """Nothing is looked for any more, so nothing stands in line.

        Chunks that a link rests from are kept until their turn: they may be looked for again before then.
        """
        self._young, self._enters, self._line = [], {}, []
        self._places = dict.fromkeys(self._places, 0)

    def _tidy(self) -> None:
        """Keep the last place of each chunk that is still looked for: no link that has yet to come to the
        chunk is past that place."""
        last = {blob: place for place, (_, blob) in enumerate(self._line) if self._wants.without_holder(blob)}
        places = sorted(last.values())
        self._line = [self._line[place] for place in places]
        self._places = {link: bisect_left(places, place) for link, place in self._places.items()}
        self._longest = max(LINE_MIN, 2 * len(self._line))
