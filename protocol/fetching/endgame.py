"""The end game: whom else to ask for a chunk that takes too long, when nothing else of its payload is left.

A peer that says it holds a chunk, and is silent when asked, must not keep us from that chunk. When everything
missing of a payload is under way, and one of its chunks for far longer than is usual, a second link is asked
for that chunk (a hedged request). The first to bring it ends both transfers. Only a few chunks are asked for
twice at a time, and only one while nothing has come from anybody: our own line may be what is slow.
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
        """Each transfer that should not be waited for alone, with the second link to ask, and the key."""
        for flight in list(self._flights.newest.values()):
            if self._may_be_asked_for_too(flight, now):
                found = self._choose(flight, now)
                if found is not None:
                    yield flight, *found

    def next_look(self, now: float) -> float:
        """When to look for second sources next: every `FETCH_RETRY_S` once something is overdue."""
        at = min(map(self._promptness.overdue_at, self._flights.newest.values()), default=inf)
        return at if at > now else now + limits.FETCH_RETRY_S

    def _is_overdue(self, flight: Flight, now: float) -> bool:
        return self._promptness.overdue_at(flight) <= now

    def _may_be_asked_for_too(self, flight: Flight, now: float) -> bool:
        """Whether a second link may be asked: the transfer is overdue, or its link has kept us waiting
        before, and few other chunks are under way twice."""
        if flight.blob in self._flights.late:
            return self._is_overdue(flight, now)
        is_late = flight.link in self._sources.tardy or self._is_overdue(flight, now)
        return is_late and len(self._flights.late) < self._most(flight)

    def _most(self, flight: Flight) -> int:
        """How many chunks may be under way from two links, this one included: a few if another transfer has
        outrun this one, else one, to find out whether any does."""
        return limits.FETCHES_TWICE_MAX if flight.began < self._promptness.brought_at else 1

    def _choose(self, flight: Flight, now: float) -> tuple[int, bytes] | None:
        """The second link to ask for the chunk, and a key of the chunk that has nothing else left to ask for.

        While the transfer is not overdue, only a better holder than its link will do: that link was merely
        the first to say that it holds the chunk. Keys with the most holders come first, since a liar may list
        somebody else's chunk in payloads of its own.
        """
        blob = flight.blob
        asked = {flight.link for flight in self._flights.of(blob)}
        worse = asked | self._sources.tardy
        wants = [(key, self._wants.of_key(key)) for key in self._wants.some_keys_of(blob)]
        last = [(key, want) for key, want in wants if want.missing.keys() <= self._flights.blobs]
        for key, want in nsmallest(
            limits.PAYLOADS_PER_CHUNK_MAX, last, key=lambda item: -len(item[1].holders_of(blob) - worse)
        ):
            link = self._sources.choose(key, want, blob, now, besides=asked)
            is_better = link in want.holders_of(blob) - worse
            if link is not None and (is_better or self._is_overdue(flight, now)):
                return link, key
        return None
