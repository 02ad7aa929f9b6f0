"""Which links did not bring which chunk, and from when on each may be asked again: later each time.

Others are tried first. Whoever fails a chunk for more than a moment is not believed any more that it holds
it; and of what nobody is known to hold each is asked most seldom.
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
    """The link has said since that it holds the chunk, and was not silent about it after that."""


class Failures:
    """What links were asked for in vain, until that is forgotten."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        # By size too, since a liar may have listed an honest chunk with a size that is too small for it.
        self._failed: dict[tuple[int, bytes, int], _Failure] = {}
        self._retries: list[float] = []
        """A heap of when those that we go on believing may be asked again for what they failed."""
        self._swept_at = 0.0

    # -- what happens

    def note(self, flight: Flight, now: float, wait: float) -> float:
        """A transfer brought nothing. Returns until when that link rests from the chunk: `wait` s or more."""
        before = self._lately(flight.link, flight.blob, flight.size, now)
        was_silent = wait >= limits.FETCH_RETRY_S
        # It counts until all others have had their turns: long, where each of them is waited for.
        kept = limits.TARDY_REST_MAX_S if was_silent else limits.FETCH_RETRY_MAX_S
        rest = Backoff.after(before and before.rest, now, wait, self._longest(flight.blob, now), kept)
        is_excused = before is not None and before.is_excused and not was_silent
        self._failed[flight.link, flight.blob, flight.size] = _Failure(rest, is_excused)
        if not flight.is_guess and rest.wait < limits.FETCH_RETRY_S:
            heappush(self._retries, rest.until)
        return rest.until

    def held_after_all(self, link: int, blob: bytes, size: int, now: float) -> None:
        """Whoever says that it holds what it failed is asked at once. Should it fail again that counts on.

        One that declines it again is not asked for saying so once more: it could have us ask all the time.
        One that is silent can: each time takes long, and its line may be broken.
        """
        failure = self._lately(link, blob, size, now)
        if failure is not None and not failure.is_excused:
            self._failed[link, blob, size] = _Failure(failure.rest.ended(now), is_excused=True)

    def link_down(self, link: int) -> None:
        self._failed = {which: failure for which, failure in self._failed.items() if which[0] != link}

    def sweep(self, now: float) -> None:
        """Forget old failures, now and then: payloads that nobody has make thousands."""
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
        """From when on a link may be asked for a chunk."""
        failure = self._failed.get((link, blob, size))
        return failure.rest.until if failure is not None else -inf

    def resting(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """Those of the `links` that may not be asked for a chunk now."""
        return {link for link in links if self.rests_until(link, blob, size) > now}

    def remembered(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """Those of the `links` that have failed a chunk lately, resting from it or not."""
        return {link for link in links if self._lately(link, blob, size, now) is not None}

    def doubted(self, links: Iterable[int], blob: bytes, size: int, now: float) -> set[int]:
        """Those of them that failed it for more than a moment."""
        failures = ((link, self._lately(link, blob, size, now)) for link in links)
        return {link for link, failure in failures if failure and failure.rest.wait >= limits.FETCH_RETRY_S}

    def _lately(self, link: int, blob: bytes, size: int, now: float) -> _Failure | None:
        failure = self._failed.get((link, blob, size))
        return failure if failure is not None and failure.rest.forgotten_at > now else None

    def next_retry(self, now: float) -> float:
        """When the next of those that are believed may be asked again."""
        while self._retries and self._retries[0] <= now:
            heappop(self._retries)
        return self._retries[0] if self._retries else inf
