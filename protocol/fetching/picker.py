"""Which chunk to fetch next, of what somebody is known to hold.

The oldest wants come first. Of a payload, the chunk that the fewest are known to hold does, so that
neighbours have different ones to give to each other.

A snapshot is kept by its holders for as long as somebody downloads it; payloads are dropped when their rounds
close, which on a slow line may be long before the last of the snapshot has come. So what is published
meanwhile comes first, and the snapshot between it: some of it always, or its holders would drop that, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.fetching.flights import Flights
from gossamer.protocol.fetching.sources import Room, Sources
from gossamer.protocol.fetching.wants import Want, Wants
from gossamer.protocol.sampling import RandomSource, shuffle


class Picker:
    """Goes through what is wanted."""

    def __init__(self, wants: Wants, flights: Flights, sources: Sources, rng: RandomSource) -> None:
        self._wants = wants
        self._flights = flights
        self._sources = sources
        self._rng = rng
        self._bulk: bytes | None = None
        self._is_needless: Callable[[bytes], bool] = lambda key: False
        self._asked_since = 0
        """Bytes of all else that was asked for since the last chunk of the bulk."""

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """While anything is missing under the key `bulk`, fetch it between all else, a chunk at a time, and
        more of it where nothing else is left to ask for. `is_needless` says of a key whether nobody needs it
        once the bulk is here: that comes last of all."""
        self._bulk, self._is_needless = bulk, is_needless

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
        for key, want, most in self._in_turn(some):
            if room is None:
                room = self._sources.room(now)
            blobs = self._sources.within(room, want, now)
            begun = 0
            for blob in self._rarest_first(want, blobs) if blobs else ():
                before = len(under_way)
                yield key, want, blob
                if len(under_way) > before:
                    room = None
                    begun += 1
                    self._asked_since = 0 if key == self._bulk else self._asked_since + want.missing[blob]
                    if is_full():
                        return
                    if begun == most:
                        break
        if len(some) < len(self._wants.held):
            self._wants.put_last(key for key, _ in some)

    def _in_turn(self, some: Sequence[tuple[bytes, Want]]) -> list[tuple[bytes, Want, float]]:
        """What is held, key by key in the order in which it is to be fetched, and how many chunks of each."""
        bulk = self._wants.held.get(self._bulk) if self._bulk is not None else None
        if self._bulk is None or bulk is None:
            return [(key, want, inf) for key, want in some]
        others = [(key, want, inf) for key, want in some if key != self._bulk]
        last = [item for item in others if self._is_needless(item[0])]
        first = [item for item in others if not self._is_needless(item[0])] if last else others
        is_under_way = not bulk.missing.keys().isdisjoint(self._flights.blobs)
        if not is_under_way and self._asked_since >= max(bulk.missing.values()):
            first.insert(0, (self._bulk, bulk, 1))
        return [*first, (self._bulk, bulk, inf), *last]

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
