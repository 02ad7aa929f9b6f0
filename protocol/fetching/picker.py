"""Which chunk to fetch next, among those that somebody is known to hold.

The oldest wants come first. Within a payload, the chunk with the fewest known holders comes first (rarest
first), so that neighbours have different chunks to give to each other.

Holders keep a snapshot for as long as somebody downloads it, but drop payloads when their rounds close: on a
slow line that may be long before the last of the snapshot has come. So what is published meanwhile comes
first, and the snapshot between it. Some of the snapshot is always fetched, or its holders would drop it too.
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
        """Bytes of everything else that was asked for since the last chunk of the bulk."""

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """While anything is missing under the key `bulk`, fetch it between all else, one chunk at a time, and
        more of it where nothing else is left to ask for. `is_needless` tells whether a key is not needed once
        the bulk is here: such keys come last of all."""
        self._bulk, self._is_needless = bulk, is_needless

    def pick(self, now: float, is_full: Callable[[], bool]) -> Iterator[tuple[bytes, Want, bytes]]:
        """Keys and chunks to fetch, until as much is under way as is allowed.

        There may be thousands of wants, and every message leads here. So the room of all links is worked out
        once, and again only when it has changed; and at most `WANTS_LOOKED_AT_MAX` wants are looked at, the
        others the next time.
        """
        under_way = self._flights.blobs
        room: Room | None = None
        if is_full():
            return
        some = list(islice(self._wants.with_holder.items(), limits.WANTS_LOOKED_AT_MAX))
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
        if len(some) < len(self._wants.with_holder):
            self._wants.put_last(key for key, _ in some)

    def _in_turn(self, some: Sequence[tuple[bytes, Want]]) -> list[tuple[bytes, Want, float]]:
        """The wants in the order in which to fetch them, each with the most chunks to begin."""
        bulk = self._wants.with_holder.get(self._bulk) if self._bulk is not None else None
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
        """The chunks that are not under way, rarest first; equally rare ones in random order.

        If nobody holds only parts, the chunks keep their order: a snapshot has thousands, and none is better.
        """
        under_way = self._flights.blobs
        waiting = (blob for blob in blobs if blob not in under_way)
        if not want.parts:
            return waiting
        shuffled = list(waiting)
        shuffle(shuffled, self._rng)
        return sorted(shuffled, key=lambda blob: len(want.parts.get(blob, ())))
