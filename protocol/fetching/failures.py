"""Which links did not bring which chunk, and when each may be asked again: later each time.

Other links are tried first. A link that fails a chunk for more than a moment is no longer believed to hold
it. Links are asked most seldom for chunks that nobody is known to hold.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff
from gossamer.protocol.fetching.flights import Flight
from gossamer.protocol.fetching.wants import Wants


class _Failure(NamedTuple):
    rest: Backoff
    is_excused: bool
    """Whether the link has said since that it holds the chunk, and has not been silent after that."""


class Failures:
    """Chunks that links were asked for in vain. Each failure is forgotten after a while."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        # Keyed by size too: a liar may have listed an honest chunk with a size that is too small for it.
        self._failed: dict[tuple[int, bytes, int], _Failure] = {}
        self._retries: list[float] = []
        """A heap of the times at which links that are still believed may be asked again."""
        self._swept_at = 0.0

    # -- what happens

    def note(self, flight: Flight, now: float, wait: float) -> float:
        """Note that a transfer brought nothing. Returns the time until which its link is not asked for the
        chunk: at least `wait` s from now."""
        before = self._lately(flight.link, flight.blob, flight.size, now)
        was_silent = wait >= limits.FETCH_RETRY_S
        # The failure counts until all other links have had their turns: long, where each is waited for.
        kept = limits.TARDY_REST_MAX_S if was_silent else limits.FETCH_RETRY_MAX_S
        rest = Backoff.after(before and before.rest, now, wait, self._longest(flight.blob, now), kept)
        is_excused = before is not None and before.is_excused and not was_silent
        self._failed[flight.link, flight.blob, flight.size] = _Failure(rest, is_excused)
        if not flight.is_guess and rest.wait < limits.FETCH_RETRY_S:
            heappush(self._retries, rest.until)
        return rest.until

    def claimed_again(self, link: int, blob: bytes, size: int, now: float) -> None:
        """A link says that it holds a chunk it failed: ask it at once. A further failure adds to the earlier.

        A link that then declines the chunk again is not excused a second time, or it could have us ask all
        the time. A link that is silent is: each such try takes long, and its line may be broken.
        """
        failure = self._lately(link, blob, size, now)
        if failure is not None and not failure.is_excused:
            self._failed[link, blob, size] = _Failure(failure.rest.ended(now), is_excused=True)

    def link_down(self, link: int) -> None:
        self._failed = {which: failure for which, failure in self._failed.items() if which[0] != link}

    def sweep(self, now: float) -> None:
        """Forget old failures, now and then: payloads that nobody has cause thousands."""
        if now < self._swept_at + limits.FETCH_RETRY_MAX_S:
            return
        self._swept_at = now
        self._failed = {which: f for which, f in self._failed.items() if f.rest.forgotten_at > now}
        self._retries = sorted(at for at in self._retries if at > now)

    def _longest(self, blob: bytes, now: float) -> float:
        is_orphan = all(want.is_orphan(now) for want in self._wants.of(blob))
        return limits.ORPHAN_RETRY_MAX_S if is_orphan else limits.FETCH_RETRY_MAX_S

    # -- what others ask

    def rests_until(self, link: int, blob: bytes, size: int) -> float:
        """The earliest time at which a link may be asked for a chunk."""
        failure = self._failed.get((link, blob, size))
        return failure.rest.until if failure is not None else -inf

    def resting(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """The `links` that may not be asked for a chunk now."""
        return {link for link in links if self.rests_until(link, blob, size) > now}

    def remembered(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """The `links` that have failed a chunk lately, whether or not they may be asked again."""
        return {link for link in links if self._lately(link, blob, size, now) is not None}

    def doubted(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """The `links` that have failed a chunk for more than a moment."""
        failures = ((link, self._lately(link, blob, size, now)) for link in links)
        return {link for link, failure in failures if failure and failure.rest.wait >= limits.FETCH_RETRY_S}

    def _lately(self, link: int, blob: bytes, size: int, now: float) -> _Failure | None:
        failure = self._failed.get((link, blob, size))
        return failure if failure is not None and failure.rest.forgotten_at > now else None

    def next_retry(self, now: float) -> float:
        """When the next link that is still believed may be asked again."""
        while self._retries and self._retries[0] <= now:
            heappop(self._retries)
        return self._retries[0] if self._retries else inf
