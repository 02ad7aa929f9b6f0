"""The end game: whom else to ask for a chunk that lasts too long, when nothing else is left of its payload.

Whoever says that it holds a chunk and is silent when asked must not keep us from it. When all that is missing
of a payload is under way, and a chunk of it for far longer than is usual, somebody else is asked for that one
too: the first to bring it ends both. Few chunks are asked for twice at a time, and one while nothing has come
from anybody: it may be our own line that is slow.
"""

from collections.abc import Iterator
from heapq import nsmallest
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.flights import Flight, Flights
from gossamer.protocol.fetching.promptness import Promptness
from gossamer.protocol.fetching.sources import Sources
from gossamer.protocol.fetching.wants import Wants


class EndGame:
    """Looks for second sources of chunks that are under way."""

    def __init__(self, wants: Wants, flights: Flights, promptness: Promptness, sources: Sources) -> None:
        self._wants = wants
        self._flights = flights
        self._promptness = promptness
        self._sources = sources

    def second_sources(self, now: float) -> Iterator[tuple[Flight, int, bytes]]:
        """Of each transfer that is not to be waited for alone: the link to ask too, and the key."""
        for flight in list(self._flights.newest.values()):
            if self._may_be_asked_for_too(flight, now):
                found = self._choose(flight, now)
                if found is not None:
                    yield flight, *found

    def next_look(self, now: float) -> float:
        """When to look for somebody else to ask too: again and again, once something is overdue."""
        at = min(map(self._promptness.overdue_at, self._flights.newest.values()), default=inf)
        return at if at > now else now + limits.FETCH_RETRY_S

    def _is_overdue(self, flight: Flight, now: float) -> bool:
        return self._promptness.overdue_at(flight) <= now

    def _may_be_asked_for_too(self, flight: Flight, now: float) -> bool:
        """Whether it is overdue, or under way from one that has kept us waiting before, and few are."""
        if flight.blob in self._flights.late:
            return self._is_overdue(flight, now)
        is_late = flight.link in self._sources.tardy or self._is_overdue(flight, now)
        return is_late and len(self._flights.late) < self._most(flight)

    def _most(self, flight: Flight) -> int:
        """How many chunks may be under way from two holders, this one included: a few where somebody has
        outrun it, else one, to find out whether anybody does."""
        return limits.FETCHES_TWICE_MAX if flight.began < self._promptness.brought_at else 1

    def _choose(self, flight: Flight, now: float) -> tuple[int, bytes] | None:
        """The link to ask for the same chunk, and the key, where nothing else is left to ask for of that.

        If it is not overdue, only a better holder than the one that it is under way from: that one was the
        first to say that it holds it. What most are known to hold comes first: a liar may list somebody
        else's chunk in payloads of its own.
        """
        blob = flight.blob
        asked = {flight.link for flight in self._flights.of(blob)}
        worse = asked | self._sources.tardy
        wants = [(key, self._wants.of_key(key)) for key in self._wants.some_keys_of(blob)]
        last = [(key, want) for key, want in wants if want.missing.keys() <= self._flights.blobs]
        for key, want in nsmallest(
            limits.SHARED_BY_MAX, last, key=lambda item: -len(item[1].holders_of(blob) - worse)
        ):
            link = self._sources.choose(key, want, blob, now, besides=asked)
            is_better = link in want.holders_of(blob) - worse
            if link is not None and (is_better or self._is_overdue(flight, now)):
                return link, key
        return None
