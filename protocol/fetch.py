"""Pulling payloads: which chunk to fetch from which link, and when to try another.

Bodies always travel in the direction in which a link was dialled, since that one is known to work: from a
peer we dialled we `Get` a chunk; a peer that dialled us is `Ask`ed and puts it to us. Peers say what they
hold, a payload or chunks of it; a hint may be missing or wrong, so after a moment any link is tried. Guesses
give way to hints, all but a few, and a link that failed one is spared others for a while: a payload that
nobody has must not delay those that somebody has, nor may these, where there is never an end of them, keep us
from one that nobody speaks of. Of a payload, the chunk that the fewest are known to hold comes first, so that
neighbours have different ones to give to each other.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Fetched, Get, RandomSource, Send
from gossamer.protocol.messages import Ask
from gossamer.protocol.wants import Want, Wants


@dataclass(frozen=True, slots=True)
class _Flight:
    link: int
    size: int
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
    for_guesses: bool
    """Whether any may be asked without having said that it holds the chunk."""


class Fetcher:
    """Schedules chunk transfers over the links. Chunks are verified and stored by the adapter."""

    def __init__(self, fits: Callable[[bytes, int], bool | None], rng: RandomSource) -> None:
        """`fits` tells whether a chunk that is here has a size; None if it is not here."""
        self.wants = Wants(fits)
        self._rng = rng
        self._links: dict[int, bool] = {}
        self._flights: dict[bytes, _Flight] = {}
        # With the size, since a liar may list an honest chunk's hash with a size that it does not have.
        self._failed: dict[tuple[int, bytes, int], _Failure] = {}
        self._retries: list[float] = []
        """A heap of when those that we go on believing may be asked again for what they failed."""
        self._guesses: dict[int, list[tuple[float, bytes, int]]] = {}
        """Of each link a heap of when it may be asked again for what it is not believed to hold."""
        self._swept_at = 0.0
        self._spared: dict[int, float] = {}
        self._due = inf
        self._now = 0.0
        self._changed = False

    # -- links and hints

    def link_up(self, link: int, outbound: bool) -> None:
        self._links[link] = outbound
        self._changed = True

    def link_down(self, link: int) -> None:
        self._links.pop(link, None)
        self.wants.link_down(link)
        self._flights = {blob: flight for blob, flight in self._flights.items() if flight.link != link}
        self._failed = {pair: failure for pair, failure in self._failed.items() if pair[0] != link}
        self._guesses.pop(link, None)
        self._spared.pop(link, None)
        self._changed = True

    def hint(self, link: int, key: bytes) -> None:
        """Note that the peer of a link holds all chunks of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and link not in want.holders:
            want.holders.add(link)
            for blob, size in want.missing.items():
                self._ask_again(link, blob, size)
            self._changed = self._changed or not self._flights.keys() >= want.missing.keys()

    def hint_part(self, link: int, key: bytes, blob: bytes) -> None:
        """Note that the peer of a link holds one chunk of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and blob in want.missing:
            part = want.parts.setdefault(blob, set())
            if link not in part:
                part.add(link)
                want.is_told_of_since = self._now
                self._ask_again(link, blob, want.missing[blob])
            self._changed = self._changed or blob not in self._flights

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

    def arrived(self, blob: bytes) -> list[Effect]:
        """Note a stored chunk; tell which keys are complete with it."""
        flight = self._flights.pop(blob, None)
        self._changed = True
        guessed = flight.link if flight is not None and flight.is_guess else None
        return [Fetched(key) for key in self.wants.arrived(blob, guessed, self._now)]

    def failed(self, link: int, blob: bytes, now: float) -> None:
        """Note that a link did not bring a chunk: others are tried first."""
        flight = self._flights.get(blob)
        if flight is not None and flight.link == link:
            self._fail(blob, now, limits.FETCH_SOON_S)

    def _fail(self, blob: bytes, now: float, wait: float) -> None:
        flight = self._flights.pop(blob)
        pair = (flight.link, blob, flight.size)
        before = self._failed.get(pair)
        if before is not None and before.forgotten_at > now:
            wait = min(max(wait, 2 * before.wait), self._wait_max(blob, now))
        self._failed[pair] = _Failure(now + wait, wait)
        if flight.is_guess or wait >= limits.FETCH_RETRY_S:
            heappush(self._guesses.setdefault(flight.link, []), (now + wait, blob, flight.size))
        else:
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
        self._due = min((flight.deadline for flight in self._flights.values()), default=inf)
        self._due = min(self._due, retry_at)
        return effects

    def _start(self, now: float) -> tuple[list[Effect], float]:
        """Returns what was started, and when to try again what could not be."""
        self._changed = False
        for blob, flight in list(self._flights.items()):
            if now >= flight.deadline:
                self._fail(blob, now, limits.FETCH_RETRY_S)  # who is busy says so: silence is no sign of that
        self._sweep(now)
        most = min(limits.FETCHES_MAX, limits.FETCHES_PER_LINK_MAX * len(self._links))
        if len(self._flights) >= most:
            return [], inf  # whatever ends a transfer brings us back here
        effects = self._fill(now, most)
        if len(self._flights) >= most or not self._is_any_waiting:
            return effects, inf
        return effects, min(self._next_turn(now), now + limits.FETCH_RETRY_S)

    def _fill(self, now: float, most: int) -> list[Effect]:
        """Start transfers until `most` are under way, or nobody is free for any other."""
        self._spared = {link: until for link, until in self._spared.items() if until > now}
        load = dict.fromkeys(self._links, 0)
        for flight in self._flights.values():
            load[flight.link] += 1
        held: list[Want] = []
        others: list[Want] = []
        for want in self.wants:
            (held if want.is_held else others).append(want)
        effects: list[Effect] = []
        for want, blob in chain(
            self._next(others, load, now, min(most, self._without_guesses + limits.GUESSES_KEPT)),
            self._next(held, load, now, most),
            self._next(others, load, now, most),
        ):
            size = want.missing[blob]
            link = self._choose(want, blob, load, now)
            if link is None:
                continue
            load[link] += 1
            deadline = now + self._patience(link, size)
            self._flights[blob] = _Flight(link, size, deadline, is_guess=link not in want.holders_of(blob))
            effects.append(Get(link, blob, size) if self._links[link] else Send(link, Ask(blob)))
        return effects

    @property
    def _is_any_waiting(self) -> bool:
        """Whether a chunk is missing that is not under way: found soon, since few are."""
        under_way = self._flights.keys()
        return any(not want.missing.keys() <= under_way for want in self.wants)

    @property
    def _without_guesses(self) -> int:
        return sum(not flight.is_guess for flight in self._flights.values())

    def _next(
        self, wants: list[Want], load: dict[int, int], now: float, most: int
    ) -> Iterator[tuple[Want, bytes]]:
        """What to fetch of these, in order, while fewer than `most` transfers are under way.

        There may be thousands of them, and this is looked at anew with every message: so what all links have
        room for is found out once, and again when that may have changed.
        """
        room = self._room(load)
        for want in wants:
            if len(self._flights) >= most:
                return
            if not want.holders.isdisjoint(room.for_all) or (room.for_guesses and self._may_guess(want, now)):
                blobs: Iterable[bytes] = want.missing
            elif want.parts and room.for_parts:
                blobs = [blob for blob, part in want.parts.items() if not part.isdisjoint(room.for_parts)]
            else:
                continue
            for blob in self._rarest_first(want, blobs):
                if len(self._flights) >= most:
                    return
                yield want, blob
                room = self._room(load)

    def _room(self, load: dict[int, int]) -> _Room:
        free = {link for link, under_way in load.items() if under_way < limits.FETCHES_PER_LINK_MAX}
        return _Room(
            for_all=free,
            for_parts={link for link in free if load[link] < limits.PARTS_PER_LINK_MAX},
            for_guesses=not free <= self._spared.keys(),
        )

    def _sweep(self, now: float) -> None:
        """Forget old failures, now and then: payloads that nobody has make thousands."""
        if now < self._swept_at + limits.FETCH_RETRY_MAX_S:
            return
        self._swept_at = now
        self._failed = {pair: f for pair, f in self._failed.items() if f.forgotten_at > now}
        self._retries = sorted(at for at in self._retries if at > now)
        for link, waits in self._guesses.items():
            self._guesses[link] = sorted(wait for wait in waits if not self._is_void(link, *wait))

    def _next_turn(self, now: float) -> float:
        """When the next link may be asked again for what it failed."""
        while self._retries and self._retries[0] <= now:
            heappop(self._retries)
        guesses = (self._next_guess(link, now) for link in self._guesses)
        return min(chain(self._retries[:1], guesses), default=inf)

    def _next_guess(self, link: int, now: float) -> float:
        """A link that is spared may be asked only then for what it may be asked for by now."""
        heap, spared_until = self._guesses[link], self._spared.get(link, now)
        while heap and (max(heap[0][0], spared_until) <= now or self._is_void(link, *heap[0])):
            heappop(heap)
        return max(heap[0][0], spared_until) if heap else inf

    def _is_void(self, link: int, until: float, blob: bytes, size: int) -> bool:
        """Whether a wait does not count any more: the chunk has come, or was failed again since."""
        failure = self._failed.get((link, blob, size))
        return failure is None or failure.until != until or not self.wants.of(blob)

    @staticmethod
    def _may_guess(want: Want, now: float) -> bool:
        return now >= max(want.since, want.is_told_of_since) + limits.FETCH_RETRY_S

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
        queued = size + sum(flight.size for flight in self._flights.values() if flight.link == link)
        per_chunk = limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S
        return limits.FETCH_PATIENCE_S + per_chunk * queued / limits.CHUNK_BYTES_MAX

    def _choose(self, want: Want, blob: bytes, load: dict[int, int], now: float) -> int | None:
        """The least busy holder; if none is free, after a moment, any link that has not just failed."""
        size = want.missing[blob]
        resting = (
            {link for link in self._links if self._rests(link, blob, size, now)} if self._failed else set()
        )
        doubted = {link for link in resting if self._failed[link, blob, size].wait >= limits.FETCH_RETRY_S}
        want.no_longer_hold(blob, doubted)
        most = limits.FETCHES_PER_LINK_MAX
        free = self._free(want.holders - resting, load, most)
        if blob in want.parts:
            free += self._free(want.parts[blob] - want.holders - resting, load, limits.PARTS_PER_LINK_MAX)
        if not free and self._may_guess(want, now):
            guesses = [link for link in self._links if link not in self._spared]
            free = [link for link in self._free(guesses, load, most) if link not in resting]
        if not free:
            return None
        offset = self._rng.randrange(len(free))
        return min(free[offset:] + free[:offset], key=lambda link: load[link])

    def _rests(self, link: int, blob: bytes, size: int, now: float) -> bool:
        failure = self._failed.get((link, blob, size))
        return failure is not None and failure.until > now

    @staticmethod
    def _free(candidates: Iterable[int], load: dict[int, int], most: int) -> list[int]:
        return sorted(link for link in candidates if load[link] < most)
