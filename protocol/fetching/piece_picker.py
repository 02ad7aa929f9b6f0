"""Whom to ask for chunks that nobody is known to hold: each link in turn, for one such chunk after another.

These chunks stand in a line. Every link has a place of its own in it and moves down the line by itself; a
chunk that a link failed comes up for that link again after its rest. So every link is asked for every chunk,
however many payloads nobody has, and the next chunk is found without a look at all the others. A link that
failed a chunk is spared guesses for a while.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import islice
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff
from gossamer.protocol.fetching.requests import Failures, Flight, Flights, WantedChunk, Wants
from gossamer.protocol.sampling import RandomSource, shuffle

# --- How soon transfers bring what was asked for: when one takes too long, and which links are asked last
# then.
#
# Silence looks like slowness. What tells them apart is how long other transfers take here. Each transfer is
# measured as a share of the patience with it, so that neither its size nor the queue before it matters. On a
# slow line, a transfer that only takes its time is seldom mistaken for silence, and more and more seldom. On
# a
# fast line, no link is waited for that others outrun many times over.

_WEIGHT = 1 / 8
"""Weight of the last transfer in the moving average."""


class Promptness:
    """How long transfers usually take, and which links have kept us waiting."""

    def __init__(self) -> None:
        self._share = limits.FETCH_SHARE_AT_FIRST
        """The share of the patience with it that a chunk takes, averaged over those that came lately."""
        self.brought_at = -inf
        """When a chunk last came, from any link."""
        self._rests: dict[int, Backoff] = {}

    def brought(self, first: Flight, now: float) -> float:
        """A chunk came. `first` is the oldest of its transfers that had not ended, whichever brought it.

        If the second counted, a line that has become slow would never be found to be slow. Returns the share
        of the patience with `first` that was needed.
        """
        share = min(1.0, max(0.0, now - first.began) / (first.deadline - first.began))
        self._share += _WEIGHT * (share - self._share)
        self.brought_at = now
        return share

    def overdue_at(self, flight: Flight) -> float:
        """When a transfer will have taken far longer than is usual."""
        usual = self._share * (flight.deadline - flight.began)
        return flight.began + max(limits.FETCH_OVERDUE_S, limits.FETCH_OVERDUE_TIMES * usual)

    def kept_waiting(self, link: int, now: float) -> None:
        """A link did not bring a chunk in time, so it rests: longer each time."""
        rest = self._rests.get(link)
        if rest is None or rest.until <= now:
            self._rests[link] = Backoff.after(rest, now, limits.TARDY_REST_S, limits.TARDY_REST_MAX_S)

    def tardy(self, now: float, links: int) -> set[int]:
        """Links that rest: they are not asked for what others have.

        Empty if they are more than half of `links`: then our own line is what is slow.
        """
        tardy = {link for link, rest in self._rests.items() if rest.until > now}
        return tardy if 2 * len(tardy) <= links else set()

    def link_down(self, link: int) -> None:
        self._rests.pop(link, None)


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


# --- Whom to ask for a chunk: the least busy holder or, if none is free, after a moment any link.
#
# A link that has kept us waiting lately (see `promptness`) comes last, whatever it says that it holds.


class Room(NamedTuple):
    """Links that may be asked for one more chunk, before it is known which chunk."""

    for_all: set[int]
    """Links that may be asked if they hold all of a payload."""
    for_parts: set[int]
    """Links that may be asked if they hold parts of it."""
    for_guesses: set[int]
    """Links that may be asked on a guess."""


class Sources:
    """Chooses links by what may be asked of them."""

    def __init__(
        self, wants: Wants, flights: Flights, failures: Failures, guesses: Guesses, rng: RandomSource
    ) -> None:
        self._wants = wants
        self._flights = flights
        self._failures = failures
        self._guesses = guesses
        self._rng = rng
        self.tardy: set[int] = set()
        """Links that have kept us waiting, and are asked last for now."""

    def choose(
        self, key: bytes, want: WantedChunk, blob: bytes, now: float, besides: Collection[int] = ()
    ) -> int | None:
        """A link to ask for a chunk; None if there is none now.

        `besides` are the links that it is under way from. Holders that have failed the chunk for too long are
        forgotten while they rest from it. After that, or if they say again that they hold it, they come last
        for a while.
        """
        size = self._wants.size_of(blob)
        holders = want.holders_of(blob).difference(besides)
        resting = self._failures.resting(holders, blob, size, now)
        doubted = self._failures.doubted(holders, blob, size, now)
        if not doubted.isdisjoint(resting):
            self._wants.not_held_by(doubted & resting, key, blob)
        usable, failed = holders - resting, doubted - resting
        free = self._free_holders(usable - failed, want)
        if not free and want.may_be_guessed_at <= now:
            others = set(self.open_to_guesses(now)).difference(besides)
            others -= self._failures.resting(others, blob, size, now)
            if failed:  # links that have not failed the chunk have their turn before these have another
                others -= self._failures.remembered(others, blob, size, now)
            free = sorted(self._promptest(self._to_guess(others, usable)))
        free = free or self._free_holders(failed, want)
        return self.least_busy(free) if free else None

    def least_busy(self, links: list[int]) -> int:
        """A random one of the links from which the fewest chunks are under way."""
        offset = self._rng.randrange(len(links))
        return min(links[offset:] + links[:offset], key=lambda link: self._flights.load[link])

    def open_to_guesses(self, now: float) -> list[int]:
        """Links that may be asked for what they have not said that they hold."""
        candidates = (link for link in self._flights.load if not self._guesses.spares(link, now))
        return self._free(candidates, limits.FETCHES_PER_LINK_MAX)

    def room(self, now: float) -> Room:
        """The room as of now. It shrinks with every further request."""
        load, spares = self._flights.load, self._guesses.spares
        free = {link for link in load if load[link] < limits.FETCHES_PER_LINK_MAX}
        return Room(
            for_all=free,
            for_parts={link for link in free if load[link] < limits.PARTS_PER_LINK_MAX},
            for_guesses={link for link in free if not spares(link, now)},
        )

    def within(self, room: Room, want: WantedChunk, now: float) -> Collection[bytes]:
        """The missing chunks of a payload for which some link may have room."""
        may_guess = want.may_be_guessed_at <= now and self._to_guess(room.for_guesses, want.holders)
        if may_guess or not self._promptest(want.holders).isdisjoint(room.for_all):
            return want.missing
        if want.parts and room.for_parts:
            return [blob for blob, part in want.parts.items() if not part.isdisjoint(room.for_parts)]
        return ()

    def _free_holders(self, holders: set[int], want: WantedChunk) -> list[int]:
        """The holders, of the whole payload or of parts, that may be asked for one more chunk."""
        usable = self._promptest(holders)
        free = self._free(usable & want.holders, limits.FETCHES_PER_LINK_MAX)
        return free + self._free(usable - want.holders, limits.PARTS_PER_LINK_MAX)

    def _promptest(self, links: set[int]) -> set[int]:
        """The links that have not kept us waiting lately; all of them if all have."""
        return links - self.tardy or links

    def _to_guess(self, links: set[int], holders: set[int]) -> set[int]:
        """Links to ask on a guess: those that kept us waiting only if no holder is any better."""
        return links if holders <= self.tardy else links - self.tardy

    def _free(self, candidates: Iterable[int], most: int) -> list[int]:
        load = self._flights.load
        return sorted([link for link in candidates if load[link] < most])


# --- Which chunk to fetch next, among those that somebody is known to hold.
#
# The oldest wants come first. Within a payload, the chunk with the fewest known holders comes first (rarest
# first), so that neighbours have different chunks to give to each other.
#
# Holders keep a snapshot for as long as somebody downloads it, but drop payloads when their rounds close: on
# a
# slow line that may be long before the last of the snapshot has come. So what is published meanwhile comes
# first, and the snapshot between it. Some of the snapshot is always fetched, or its holders would drop it
# too.


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

    def pick(self, now: float, is_full: Callable[[], bool]) -> Iterator[tuple[bytes, WantedChunk, bytes]]:
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

    def _in_turn(self, some: Sequence[tuple[bytes, WantedChunk]]) -> list[tuple[bytes, WantedChunk, float]]:
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

    def _rarest_first(self, want: WantedChunk, blobs: Iterable[bytes]) -> Iterable[bytes]:
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


# --- The end game: whom else to ask for a chunk that takes too long, when nothing else of its payload is
# left.
#
# A peer that says it holds a chunk, and is silent when asked, must not keep us from that chunk. When
# everything
# missing of a payload is under way, and one of its chunks for far longer than is usual, a second link is
# asked
# for that chunk (a hedged request). The first to bring it ends both transfers. Only a few chunks are asked
# for
# twice at a time, and only one while nothing has come from anybody: our own line may be what is slow.


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
