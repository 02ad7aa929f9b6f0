"""Which chunk to fetch next, of what somebody is known to hold.

The oldest wants come first. Of a payload, the chunk that the fewest are known to hold does, so that
neighbours have different ones to give to each other.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from gossamer.protocol import limits
from gossamer.protocol.effects import RandomSource
from gossamer.protocol.fetching.flights import Flights
from gossamer.protocol.fetching.sources import Room, Sources
from gossamer.protocol.fetching.wants import Want, Wants
from gossamer.protocol.sampling import shuffle


class Picker:
    """Goes through what is wanted."""

    def __init__(self, wants: Wants, flights: Flights, sources: Sources, rng: RandomSource) -> None:
        self._wants = wants
        self._flights = flights
        self._sources = sources
        self._rng = rng

    def pick(self, now: float, is_full: Callable[[], bool]) -> Iterator[tuple[bytes, Want, bytes]]:
        """What to fetch, key and chunk, until as much is under way as may be.

        There may be thousands of them, and this is looked at anew with every message: so what all links have
        room for is found out once, and again when that has changed; and of those whose holders are all busy
        so many are looked at, and the others the next time.
        """
        under_way = self._flights.blobs
        room: Room | None = None
        if is_full():
            return
        some = list(islice(self._wants.held.items(), limits.WANTS_LOOKED_AT_MAX))
        for key, want in some:
            if room is None:
                room = self._sources.room(now)
            blobs = self._sources.within(room, want, now)
            for blob in self._rarest_first(want, blobs) if blobs else ():
                before = len(under_way)
                yield key, want, blob
                if len(under_way) > before:
                    room = None
                    if is_full():
                        return
        if len(some) < len(self._wants.held):
            self._wants.put_last(key for key, _ in some)

    def _rarest_first(self, want: Want, blobs: Iterable[bytes]) -> Iterable[bytes]:
        """The chunks that are not under way; those that equally many hold in a random order.

        Where nobody has only parts they stay as they come: a snapshot has thousands, and no order is better.
        """
        under_way = self._flights.blobs
        waiting = (blob for blob in blobs if blob not in under_way)
        if not want.parts:
            return waiting
        shuffled = list(waiting)
        shuffle(shuffled, self._rng)
        return sorted(shuffled, key=lambda blob: len(want.parts.get(blob, ())))
