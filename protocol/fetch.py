"""Pulling payloads: which chunk to fetch from which link, and when to try another.

Bodies always travel in the direction in which a link was dialled, since that one is known to work: from a
peer we dialled we `Get` a chunk; a peer that dialled us is `Ask`ed and puts it to us. Peers say what they
hold, a payload or chunks of it; a hint may be missing or wrong, so after a moment any link is tried. Guesses
give way to hints, all but a few, and a link that failed one is spared others for a while: a payload that
nobody has must not delay those that somebody has, nor may these, where there is never an end of them, keep us
from one that nobody speaks of. Of a payload, the chunk that the fewest are known to hold comes first, so that
neighbours have different ones to give to each other.

Whoever says that it holds a chunk and is silent when asked must not keep us from it. When all that is missing
of a payload is under way, and a chunk of it for far longer than is usual, somebody else is asked for that one
too: the first to bring it ends both. Who kept us waiting so is asked last for a while, see `promptness`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Fetched, Get, RandomSource, Send
from gossamer.protocol.guesses import Guesses
from gossamer.protocol.messages import Ask
from gossamer.protocol.promptness import Promptness
from gossamer.protocol.wants import Want, Wants


@dataclass(frozen=True, slots=True)
class _Flight:
    link: int
    size: int
    began: float
    deadline: float
    is_guess: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    """Somebody did not bring a chunk: not asked again until then, and twice as late should it fail again."""

    until: float
    wait: float

    @property
    def forgotten_at(self) -> float:
        return self.until + max(self.wait, limits.FETCH_RETRY_MAX_S)  # its turn comes again after all others'


class _Room(NamedTuple):
    """Which links may be asked for one more chunk, as far as it is not known which."""

    for_all: set[int]
    """If they hold all of a payload."""
    for_parts: set[int]
    """If they hold parts of it."""
    for_guesses: set[int]
    """Without having said that they hold the chunk."""


class Fetcher:
    """Schedules chunk transfers over the links. Chunks are verified and stored by the adapter."""

    def __init__(self, fits: Callable[[bytes, int], bool | None], rng: RandomSource) -> None:
        """`fits` tells whether a chunk that is here has a size; None if it is not here."""
        self.wants = Wants(fits)
        self._rng = rng
        self._links: dict[int, bool] = {}
        self._flights: dict[bytes, _Flight] = {}
        self._late: dict[bytes, _Flight] = {}
        """Those that last too long, of chunks that somebody else was then asked for: they may still end."""
        self._promptness = Promptness()
        self._brought_at = -inf
        """When a chunk that was on its way last came, from whomever."""
        self._tardy: set[int] = set()
        """Links that have kept us waiting, and are asked last for now."""
        # With the size, since a liar may list an honest chunk's hash with a size that it does not have.
        self._failed: dict[tuple[int, bytes, int], _Failure] = {}
        self._retries: list[float] = []
        """A heap of when those that we go on believing may be asked again for what they failed."""
        self._guesses = Guesses(self.wants, self._free_at)
        self._swept_at = 0.0
        self._spared: dict[int, float] = {}
        self._due = inf
        self._now = 0.0
        self._changed = False

    # -- links and hints

    def link_up(self, link: int, outbound: bool) -> None:
        self._links[link] = outbound
        self._guesses.link_up(link)
        self._changed = True

    def link_down(self, link: int) -> None:
        self._links.pop(link, None)
        self.wants.link_down(link)
        self._late = {blob: flight for blob, flight in self._late.items() if flight.link != link}
        for blob in [blob for blob, flight in self._flights.items() if flight.link == link]:
            self._end(blob)
            self._guesses.ended(blob)
        self._failed = {pair: failure for pair, failure in self._failed.items() if pair[0] != link}
        self._guesses.link_down(link)
        self._spared.pop(link, None)
        self._promptness.link_down(link)
        self._changed = True

    def hint(self, link: int, key: bytes) -> None:
        """Note that the peer of a link holds all chunks of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and link not in want.holders:
            self.wants.held_by(link, key)
            for blob, size in want.missing.items():
                self._ask_again(link, blob, size)
            self._changed = self._changed or any(map(self._is_sought, want.missing))

    def hint_part(self, link: int, key: bytes, blob: bytes) -> None:
        """Note that the peer of a link holds one chunk of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and blob in want.missing:
            if link not in want.parts.get(blob, ()):
                self.wants.held_by(link, key, blob)
                want.is_told_of_since = self._now
                self._ask_again(link, blob, want.missing[blob])
            self._changed = self._changed or self._is_sought(blob)

    def _is_sought(self, blob: bytes) -> bool:
        """Whether another holder of a missing chunk is of use now."""
        flight = self._flights.get(blob)
        return flight is None or flight.link in self._tardy

    def _ask_again(self, link: int, blob: bytes, size: int) -> None:
        """Whoever says that it holds what it failed is asked at once. Should it fail again that counts on."""
        failure = self._failed.get((link, blob, size))
        if failure is not None and failure.forgotten_at > self._now:
            self._failed[link, blob, size] = _Failure(self._now, failure.wait)

    # -- wants

    def want(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> list[Effect]:
        """Ask for chunks (hash, size) under a key; `Fetched(key)` comes at once if none is missing.

        Nothing comes of what nobody can have, see `Wants.add`.
        """
        is_lacking = self.wants.add(key, chunks, now)
        self._changed = self._changed or bool(is_lacking)
        return [Fetched(key)] if is_lacking is False else []

    def expected_size(self, blob: bytes) -> int | None:
        """Size of a chunk that is on its way, None for any other: nothing else may be put to us."""
        flight = self._flights.get(blob)
        return flight.size if flight is not None else None

    def arrived(self, blob: bytes, now: float) -> list[Effect]:
        """Note a stored chunk; tell which keys are complete with it."""
        flight, late = self._flights.pop(blob, None), self._late.pop(blob, None)
        self._guesses.ended(blob)
        self._changed = True
        guessed = None
        if flight is not None:
            first = late if late is not None else flight  # what was waited for, whoever brought it in the end
            self._promptness.brought(first.began, first.deadline, now)
            self._brought_at = now
            if flight.is_guess and late is None:  # of two nobody knows which one brought it
                guessed = flight.link
        return [Fetched(key) for key in self.wants.arrived(blob, guessed, now)]

    def failed(self, link: int, blob: bytes, now: float) -> None:
        """Note that a link did not bring a chunk: others are tried first."""
        flight, late = self._flights.get(blob), self._late.get(blob)
        if flight is not None and flight.link == link:
            self._fail(blob, now, limits.FETCH_SOON_S)
        elif late is not None and late.link == link:
            self._note_failure(blob, self._late.pop(blob), now, limits.FETCH_SOON_S)

    def _fail(self, blob: bytes, now: float, wait: float) -> None:
        self._note_failure(blob, self._end(blob), now, wait)

    def _end(self, blob: bytes) -> _Flight:
        """A transfer is over. If another one of the same chunk was late, it is waited for again."""
        flight = self._flights.pop(blob)
        if blob in self._late:
            self._flights[blob] = self._late.pop(blob)
        return flight

    def _note_failure(self, blob: bytes, flight: _Flight, now: float, wait: float) -> None:
        pair = (flight.link, blob, flight.size)
        before = self._failed.get(pair)
        if before is not None and before.forgotten_at > now:
            wait = min(max(wait, 2 * before.wait), self._wait_max(blob, now))
        self._failed[pair] = _Failure(now + wait, wait)
        self._guesses.failed(flight.link, blob, now + wait)
        if not flight.is_guess and wait < limits.FETCH_RETRY_S:
            heappush(self._retries, now + wait)
        self._spared[flight.link] = now + limits.FETCH_RETRY_S
        self._changed = True

    def _wait_max(self, blob: bytes, now: float) -> float:
        is_orphan = all(want.is_orphan(now) for want in self.wants.of(blob))
        return limits.ORPHAN_RETRY_MAX_S if is_orphan else limits.FETCH_RETRY_MAX_S

    # -- scheduling

    def deadline(self) -> float:
        """As of the last `plan`."""
        return self._due

    def plan(self, now: float) -> list[Effect]:
        """Start as many transfers as the bounds allow, oldest wants first."""
        self._now = now
        if not self._changed and now < self._due:
            return []
        effects, retry_at = self._start(now)
        under_way = chain(self._flights.values(), self._late.values())
        self._due = min((flight.deadline for flight in under_way), default=inf)
        self._due = min(self._due, retry_at, self._next_overdue(now))
        return effects

    def _start(self, now: float) -> tuple[list[Effect], float]:
        """Returns what was started, and when to try again what could not be."""
        self._changed = False
        self._give_up(now)
        self._sweep(now)
        self._spared = {link: until for link, until in self._spared.items() if until > now}
        self._tardy = self._promptness.tardy(now, len(self._links))
        load = dict.fromkeys(self._links, 0)
        for flight in chain(self._flights.values(), self._late.values()):
            load[flight.link] += 1
        effects = self._ask_others_too(load, now)
        most = min(limits.FETCHES_MAX, limits.FETCHES_PER_LINK_MAX * len(self._links))
        if len(self._flights) >= most:
            return effects, inf  # whatever ends a transfer brings us back here
        effects += self._fill(load, now, most)
        if len(self._flights) >= most or not self._is_any_waiting:
            return effects, inf
        return effects, min(self._next_turn(load, now), now + limits.FETCH_RETRY_S)

    def _give_up(self, now: float) -> None:
        """End what has lasted for too long. Who is busy says so: silence is no sign of that."""
        for blob, flight in list(self._late.items()):
            if now >= flight.deadline:
                self._note_failure(blob, self._late.pop(blob), now, limits.FETCH_RETRY_S)
        for blob, flight in list(self._flights.items()):
            if now >= flight.deadline:
                self._fail(blob, now, limits.FETCH_RETRY_S)
                self._promptness.kept_waiting(flight.link, now)

    def _ask_others_too(self, load: dict[int, int], now: float) -> list[Effect]:
        """Ask somebody else for each chunk that is overdue, where nothing else is left to ask for of its key.

        Also where it is under way from one that has kept us waiting before, and was the first to say that it
        holds it, as soon as a better one does. At most two transfers of a chunk are waited for: the oldest
        gives way. Few chunks are asked for twice at a time, and one while nothing has come from anybody: it
        may be our own line that is slow.
        """
        effects: list[Effect] = []
        for blob, flight in list(self._flights.items()):
            late, is_overdue = self._late.get(blob), self._overdue_at(flight) <= now
            if not is_overdue and (flight.link not in self._tardy or late is not None):
                continue
            if late is None and len(self._late) >= self._twice_max(flight):
                continue
            asked = {flight.link, late.link} if late is not None else {flight.link}
            for key in self.wants.keys_of(blob):
                want = self.wants.of_key(key)
                if want.missing[blob] != flight.size or not want.missing.keys() <= self._flights.keys():
                    continue
                link = self._choose(key, want, blob, load, now, besides=asked)
                if link is None or not (is_overdue or link in want.holders_of(blob) - self._tardy):
                    continue
                if late is not None:
                    load[late.link] -= 1
                    self._note_failure(blob, late, now, limits.FETCH_RETRY_S)
                self._promptness.kept_waiting(flight.link, now)
                self._tardy.add(flight.link)
                self._late[blob] = flight
                effects.append(self._ask(link, key, blob, load, now))
                break
        return effects

    def _twice_max(self, flight: _Flight) -> int:
        """How many chunks may be under way from two holders, for this one to be another: few where somebody
        has outrun it, else one to find out whether anybody does."""
        return limits.FETCHES_TWICE_MAX if flight.began < self._brought_at else 1

    def _overdue_at(self, flight: _Flight) -> float:
        return self._promptness.overdue_at(flight.began, flight.deadline)

    def _next_overdue(self, now: float) -> float:
        """When to look for somebody else to ask too: again and again, once something is overdue."""
        at = min(map(self._overdue_at, self._flights.values()), default=inf)
        return at if at > now else now + limits.FETCH_RETRY_S

    def _fill(self, load: dict[int, int], now: float, most: int) -> list[Effect]:
        """Start transfers until `most` are under way, or nobody is free for any other."""
        effects = self._guess(load, now, min(most, self._without_guesses + limits.GUESSES_KEPT))
        for key, want, blob in self._next(load, now, most):
            link = self._choose(key, want, blob, load, now)
            if link is not None:
                effects.append(self._ask(link, key, blob, load, now))
        return effects + self._guess(load, now, most)

    def _guess(self, load: dict[int, int], now: float, most: int) -> list[Effect]:
        """Ask the least busy links for what nobody is known to hold, until `most` transfers are under way."""
        effects: list[Effect] = []
        links = self._guesses.open_to(self._open_to_guesses(load), now)
        while links and len(self._flights) < most:
            link = self._least_busy(links, load)
            found = self._guesses.take(link, now)
            if found is not None:
                effects.append(self._ask(link, *found, load, now))
            if found is None or load[link] >= limits.FETCHES_PER_LINK_MAX:
                links.remove(link)
        return effects

    def _ask(self, link: int, key: bytes, blob: bytes, load: dict[int, int], now: float) -> Effect:
        want = self.wants.of_key(key)
        size = want.missing[blob]
        deadline = now + self._patience(link, size)
        self._flights[blob] = _Flight(link, size, now, deadline, is_guess=link not in want.holders_of(blob))
        load[link] += 1
        return Get(link, blob, size) if self._links[link] else Send(link, Ask(blob))

    @property
    def _is_any_waiting(self) -> bool:
        """Whether a chunk is missing that is not under way: found soon, since few are."""
        under_way = self._flights.keys()
        return any(not want.missing.keys() <= under_way for want in self.wants)

    @property
    def _without_guesses(self) -> int:
        return sum(not flight.is_guess for flight in self._flights.values())

    def _next(self, load: dict[int, int], now: float, most: int) -> Iterator[tuple[bytes, Want, bytes]]:
        """What to fetch of that which somebody holds, while fewer than `most` transfers are under way.

        There may be thousands of them, and this is looked at anew with every message: so what all links have
        room for is found out once, and again when that has changed; and of those whose holders are all busy
        so many are looked at, and the others the next time.
        """
        room = self._room(load)
        some = list(islice(self.wants.held.items(), limits.WANTS_LOOKED_AT_MAX))
        for key, want in some:
            if len(self._flights) >= most:
                return
            may_guess = want.may_be_guessed_at <= now and self._to_guess(room.for_guesses, want.holders)
            if may_guess or not self._promptest(want.holders).isdisjoint(room.for_all):
                blobs: Iterable[bytes] = want.missing
            elif want.parts and room.for_parts:
                blobs = [blob for blob, part in want.parts.items() if not part.isdisjoint(room.for_parts)]
            else:
                continue
            for blob in self._rarest_first(want, blobs):
                under_way = len(self._flights)
                if under_way >= most:
                    return
                yield key, want, blob
                if len(self._flights) > under_way:
                    room = self._room(load)
        if len(some) < len(self.wants.held):
            self.wants.put_last(key for key, _ in some)

    def _room(self, load: dict[int, int]) -> _Room:
        free = {link for link, under_way in load.items() if under_way < limits.FETCHES_PER_LINK_MAX}
        return _Room(
            for_all=free,
            for_parts={link for link in free if load[link] < limits.PARTS_PER_LINK_MAX},
            for_guesses=free - self._spared.keys(),
        )

    def _sweep(self, now: float) -> None:
        """Forget old failures, now and then: payloads that nobody has make thousands."""
        if now < self._swept_at + limits.FETCH_RETRY_MAX_S:
            return
        self._swept_at = now
        self._failed = {pair: f for pair, f in self._failed.items() if f.forgotten_at > now}
        self._retries = sorted(at for at in self._retries if at > now)

    def _next_turn(self, load: dict[int, int], now: float) -> float:
        """When the next link may be asked again for what it failed."""
        while self._retries and self._retries[0] <= now:
            heappop(self._retries)
        guesses = (
            max(self._guesses.next_turn(link), self._spared.get(link, now))
            for link, under_way in load.items()
            if under_way < limits.FETCHES_PER_LINK_MAX
        )
        return min(chain([self._guesses.next_entry()], self._retries[:1], guesses))

    def _rarest_first(self, want: Want, blobs: Iterable[bytes]) -> Iterable[bytes]:
        """Those that are not under way; those that equally many have in a random order.

        As they come where nobody has only parts: a snapshot has thousands, and no order is better.
        """
        waiting = (blob for blob in blobs if blob not in self._flights)
        if not want.parts:
            return waiting
        shuffled = list(waiting)
        for i in range(len(shuffled) - 1, 0, -1):
            j = self._rng.randrange(i + 1)
            shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
        return sorted(shuffled, key=lambda blob: len(want.parts.get(blob, ())))

    def _patience(self, link: int, size: int) -> float:
        """A peer sends one chunk after another, so those under way on its link come first."""
        under_way = chain(self._flights.values(), self._late.values())
        queued = size + sum(flight.size for flight in under_way if flight.link == link)
        per_chunk = limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S
        return limits.FETCH_PATIENCE_S + per_chunk * queued / limits.CHUNK_BYTES_MAX

    def _choose(
        self,
        key: bytes,
        want: Want,
        blob: bytes,
        load: dict[int, int],
        now: float,
        besides: Collection[int] = (),
    ) -> int | None:
        """The least busy holder; if none is free, after a moment, any link that has not just failed.

        `besides` are links that it is under way from.
        """
        size = want.missing[blob]
        holders = want.holders_of(blob).difference(besides)
        resting = {link for link in holders if self._rests_until(link, blob, size) > now}
        doubted = {link for link in resting if self._failed[link, blob, size].wait >= limits.FETCH_RETRY_S}
        if doubted:
            self.wants.not_held_by(doubted, key, blob)
        usable = self._promptest(holders - resting)
        free = self._free(usable & want.holders, load, limits.FETCHES_PER_LINK_MAX)
        free += self._free(usable - want.holders, load, limits.PARTS_PER_LINK_MAX)
        if not free and want.may_be_guessed_at <= now:
            others = set(self._open_to_guesses(load)).difference(besides)
            others = {link for link in others if self._rests_until(link, blob, size) <= now}
            free = sorted(self._promptest(self._to_guess(others, usable)))
        return self._least_busy(free, load) if free else None

    def _promptest(self, links: set[int]) -> set[int]:
        """Those that have not kept us waiting lately, unless all have."""
        return links - self._tardy or links

    def _to_guess(self, links: set[int], holders: set[int]) -> set[int]:
        """Whom to ask on a guess: those that kept us waiting only where no holder is any better."""
        return links if holders <= self._tardy else links - self._tardy

    def _least_busy(self, links: list[int], load: dict[int, int]) -> int:
        offset = self._rng.randrange(len(links))
        return min(links[offset:] + links[:offset], key=lambda link: load[link])

    def _open_to_guesses(self, load: dict[int, int]) -> list[int]:
        candidates = (link for link in self._links if link not in self._spared)
        return self._free(candidates, load, limits.FETCHES_PER_LINK_MAX)

    def _free_at(self, link: int, want: Want, blob: bytes) -> float:
        """From when on a link may be asked for a chunk, which may be under way, or failed not long ago."""
        return inf if blob in self._flights else self._rests_until(link, blob, want.missing[blob])

    def _rests_until(self, link: int, blob: bytes, size: int) -> float:
        failure = self._failed.get((link, blob, size))
        return failure.until if failure is not None else -inf

    @staticmethod
    def _free(candidates: Iterable[int], load: dict[int, int], most: int) -> list[int]:
        return sorted(link for link in candidates if load[link] < most)
