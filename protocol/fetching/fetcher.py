"""Pulling payloads: which chunk to fetch from which link, and when to try another.

Bodies always travel over connections opened in the direction in which a link was dialled, since that
direction is known to work: we `Get` a chunk from a peer that we dialled, and `Ask` a peer that dialled us to
put it to us. Peers say what they hold, a whole payload or chunks of it. Such a hint may be missing or wrong,
so after a moment any link is tried. All guesses but a few give way to hints: a payload that nobody has must
not delay those that somebody has. Nor may an endless stream of those keep us from one that nobody offers.

`wants` holds what is wanted, `flights` what is under way, `failures` what was asked for in vain. `picker`,
`guesses` and, for chunks that take too long, `endgame` decide which chunk is next; `sources` decides which
link is asked for it.
"""

from collections.abc import Callable
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Get, Send
from gossamer.protocol.fetching.piece_picker import EndGame, Guesses, Picker, Promptness, Sources
from gossamer.protocol.fetching.requests import Failures, Flight, Flights, Wants
from gossamer.protocol.fetching.window import FetchWindow
from gossamer.protocol.messages import Want
from gossamer.protocol.sampling import RandomSource


class Fetcher:
    """Schedules chunk transfers over the links. Chunks are verified and stored by the adapter."""

    def __init__(self, fits: Callable[[bytes, int], bool | None], rng: RandomSource) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self.wants = Wants(fits)
        self._links: dict[int, bool] = {}
        """Links that are up, and whether we dialled each."""
        self._flights = Flights()
        self._failures = Failures(self.wants)
        self._promptness = Promptness()
        self._window = FetchWindow(self._flights)
        self._guesses = Guesses(self.wants, self._flights, self._failures)
        self._sources = Sources(self.wants, self._flights, self._failures, self._guesses, rng)
        self._picker = Picker(self.wants, self._flights, self._sources, rng)
        self._end_game = EndGame(self.wants, self._flights, self._promptness, self._sources)
        self._due = inf
        self._now = 0.0
        self._changed = False

    # -- links and hints

    def link_up(self, link: int, outbound: bool) -> None:
        self._links[link] = outbound
        self._flights.link_up(link)
        self._guesses.link_up(link)
        self._changed = True

    def link_down(self, link: int) -> None:
        self._links.pop(link, None)
        self.wants.link_down(link)
        for blob in self._flights.link_down(link):
            self._guesses.ended(blob)
        self._failures.link_down(link)
        self._guesses.link_down(link)
        self._promptness.link_down(link)
        self._changed = True

    def hint(self, link: int, key: bytes) -> None:
        """Note that the peer of a link holds all chunks of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and link not in want.holders:
            self.wants.held_by(link, key)
            for blob in want.missing:
                self._failures.claimed_again(link, blob, self.wants.size_of(blob), self._now)
            self._changed = self._changed or any(map(self._is_sought, want.missing))

    def hint_part(self, link: int, key: bytes, blob: bytes) -> None:
        """Note that the peer of a link holds one chunk of `key`."""
        want = self.wants.get(key)
        if want is not None and link in self._links and blob in want.missing:
            if link not in want.parts.get(blob, ()):
                self.wants.held_by(link, key, blob)
                want.is_told_of_since = self._now
                self._failures.claimed_again(link, blob, self.wants.size_of(blob), self._now)
            self._changed = self._changed or self._is_sought(blob)

    def _is_sought(self, blob: bytes) -> bool:
        """Whether another holder of a missing chunk is of use now."""
        flight = self._flights.newest.get(blob)
        return flight is None or flight.link in self._sources.tardy

    # -- chunks

    def fetch_between(self, bulk: bytes, is_needless: Callable[[bytes], bool]) -> None:
        """Fetch something large between all else: see `Picker.fetch_between`."""
        self._picker.fetch_between(bulk, is_needless)
        self._changed = True

    def want(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> bool:
        """Ask for chunks (hash, size) under a key. Returns whether none is missing.

        A list of chunks that nobody can have is ignored, see `Wants.add`.
        """
        is_lacking = self.wants.add(key, chunks, now)
        self._changed = self._changed or bool(is_lacking)
        return is_lacking is False

    @property
    def came(self) -> int:
        """Bytes of all chunks that have come."""
        return self._flights.came

    def is_stalled(self, key: bytes, now: float) -> bool:
        """Whether chunks of a key are missing, none has come for as long as the slowest may take, and none
        that was asked for in that time is still waited for: on a slow line one may be behind many others."""
        want = self.wants.get(key)
        if want is None:
            return False
        over = max(want.since, want.got_at) + limits.FETCH_TIMEOUT_S
        return over <= now and not any(
            flight.blob in want.missing and flight.began < over and now < flight.deadline
            for flight in self._flights
        )

    def expected_size(self, blob: bytes) -> int | None:
        """The largest size of a chunk that is on its way. None for any other: no peer may put that to us."""
        return self.wants.size_of(blob) or None if blob in self._flights else None

    def arrived(self, blob: bytes, now: float) -> list[bytes]:
        """Note that a chunk is stored; returns the keys that it completes."""
        flights = self._flights.landed(blob)
        self._guesses.ended(blob)
        self._changed = True
        if flights:
            self._window.brought(flights[0], self._promptness.brought(flights[0], now))
        is_guessed = len(flights) == 1 and flights[0].is_guess  # of two, it is unknown which one brought it
        guessed = flights[0].link if is_guessed else None
        return list(self.wants.arrived(blob, guessed, now))

    def failed(self, link: int, blob: bytes, now: float) -> None:
        """Note that a link did not bring a chunk: other links are tried first."""
        for flight in self._flights.of(blob):
            if flight.link == link:
                self._fail(flight, now, limits.FETCH_SOON_S)

    def _fail(self, flight: Flight, now: float, wait: float) -> None:
        """End a transfer that was in vain: its link is not asked for the chunk again for `wait` s or more."""
        self._flights.end(flight)
        until = self._failures.note(flight, now, wait)
        self._guesses.failed(flight.link, flight.blob, until, now)
        self._changed = True

    # -- scheduling

    def deadline(self) -> float:
        """When `plan` is due next, as of the last call."""
        return self._due

    def plan(self, now: float) -> list[Effect]:
        """Start as many transfers as the bounds allow, oldest wants first."""
        self._now = now
        if not self._changed and now < self._due:
            return []
        self._changed = False
        self._give_up(now)
        self._failures.sweep(now)
        self._sources.tardy = self._promptness.tardy(now, len(self._links))
        most = min(limits.FETCHES_MAX, limits.FETCHES_PER_LINK_MAX * len(self._links))
        effects = self._ask_others_too(now)
        if len(self._flights) < most:
            effects += self._fill(now, most)
        next_turn = self._next_turn(now, most) if self._is_any_waiting else inf
        self._due = min(self._flights.next_deadline(), self._end_game.next_look(now), next_turn)
        return effects

    def _give_up(self, now: float) -> None:
        """End transfers that have taken too long. A busy peer says so soon, so silence does not mean busy."""
        for flight in [flight for flight in self._flights.late.values() if now >= flight.deadline]:
            self._fail(flight, now, limits.FETCH_RETRY_S)
        over = [flight for flight in self._flights.newest.values() if now >= flight.deadline]
        if over:
            self._window.given_up(over, now)
        for flight in over:
            self._fail(flight, now, limits.FETCH_RETRY_S)
            self._promptness.kept_waiting(flight.link, now)

    def _ask_others_too(self, now: float) -> list[Effect]:
        """Ask second links for chunks that take too long. Of a chunk's two transfers, the older one ends."""
        effects: list[Effect] = []
        for flight, link, key in self._end_game.second_sources(now):
            late = self._flights.late.get(flight.blob)
            if late is not None:
                self._fail(late, now, limits.FETCH_RETRY_S)
            self._promptness.kept_waiting(flight.link, now)
            self._sources.tardy.add(flight.link)
            effects.append(self._ask(link, key, flight.blob, now, is_search=flight.is_search))
        return effects

    def _fill(self, now: float, most: int) -> list[Effect]:
        """Start transfers until `most` are under way, or no link is free for another."""
        if not self._is_any_waiting and not self._guesses.are_any(now):
            return []
        effects = self._guess(now, min(most, self._flights.without_guesses + limits.GUESSES_RESERVED))
        for key, want, blob in self._picker.pick(now, lambda: self._is_full(most, of_searches=False)):
            link = self._sources.choose(key, want, blob, now)
            if link is not None:
                effects.append(self._ask(link, key, blob, now))
        return effects + self._guess(now, most)

    def _is_full(self, most: int, *, of_searches: bool) -> bool:
        return len(self._flights) >= most or self._window.is_full(of_searches=of_searches)

    def _guess(self, now: float, most: int) -> list[Effect]:
        """Ask the least busy links for chunks that nobody is known to hold, until `most` are under way."""
        effects: list[Effect] = []
        if not self._guesses.are_any(now):
            return effects
        links = self._guesses.open_to(self._sources.open_to_guesses(now), now)
        while links and not self._is_full(most, of_searches=True):
            link = self._sources.least_busy(links)
            found = self._guesses.take(link, now)
            if found is not None:
                effects.append(self._ask(link, *found, now, is_search=True))
            if found is None or self._flights.load[link] >= limits.FETCHES_PER_LINK_MAX:
                links.remove(link)
        return effects

    def _ask(self, link: int, key: bytes, blob: bytes, now: float, *, is_search: bool = False) -> Effect:
        want = self.wants.of_key(key)
        size = self.wants.size_of(blob)
        is_guess = link not in want.holders_of(blob)
        self._flights.begin(link, blob, size, now, is_guess=is_guess, is_search=is_search)
        if not self._links[link]:
            return Send(link, Want(blob))
        return Get(link, blob, size, self._flights.newest[blob].deadline - now)

    @property
    def _is_any_waiting(self) -> bool:
        """Whether a missing chunk is not under way. Quick to find out, since few are under way."""
        return any(blob not in self._flights for blob in self.wants.blobs)

    def _next_turn(self, now: float, most: int) -> float:
        """When to try again: soon after a link may be asked again for what it failed, or asked on a guess.

        `inf` if as much is under way as is allowed: the end of any transfer causes another `plan`.
        """
        searches_are_full = self._is_full(most, of_searches=True)
        if searches_are_full and self._is_full(most, of_searches=False):
            return inf
        turns = [now + limits.FETCH_RETRY_S, self._failures.next_retry(now)]
        if not searches_are_full:
            free = (link for link, load in self._flights.load.items() if load < limits.FETCHES_PER_LINK_MAX)
            turns += [self._guesses.next_entry(), *(self._guesses.next_turn(link, now) for link in free)]
        return max(min(turns), now + limits.FETCH_TURN_MIN_S)
