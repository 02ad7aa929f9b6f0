"""Whom to ask for a chunk: the least busy holder or, if none is free, after a moment any link.

A link that has kept us waiting lately (see `promptness`) comes last, whatever it says that it holds.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.fetching.failures import Failures
from gossamer.protocol.fetching.flights import Flights
from gossamer.protocol.fetching.guesses import Guesses
from gossamer.protocol.fetching.wants import Want, Wants
from gossamer.protocol.sampling import RandomSource


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
        self, key: bytes, want: Want, blob: bytes, now: float, besides: Collection[int] = ()
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

    def within(self, room: Room, want: Want, now: float) -> Collection[bytes]:
        """The missing chunks of a payload for which some link may have room."""
        may_guess = want.may_be_guessed_at <= now and self._to_guess(room.for_guesses, want.holders)
        if may_guess or not self._promptest(want.holders).isdisjoint(room.for_all):
            return want.missing
        if want.parts and room.for_parts:
            return [blob for blob, part in want.parts.items() if not part.isdisjoint(room.for_parts)]
        return ()

    def _free_holders(self, holders: set[int], want: Want) -> list[int]:
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
