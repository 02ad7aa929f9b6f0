"""A fetcher on its own, and what is under way according to its effects."""

from __future__ import annotations

import random
from hashlib import sha256

from gossamer.protocol import limits
from gossamer.protocol.effects import Get, Send
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.messages import Want


def blob_of(number: int) -> bytes:
    return sha256(f"chunk {number}".encode()).digest()


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


class Net:
    """A fetcher, and what it has under way according to its effects."""

    def __init__(self, seed: int = 0, links: dict[int, bool] | None = None) -> None:
        self.have: set[bytes] = set()
        self.true_sizes: dict[bytes, int] = {}
        """The true sizes of chunks whose size is not the one asked for."""
        self.fetcher = Fetcher(self._fits, random.Random(seed))
        self.links = dict(links or {})
        self.flights: dict[bytes, int] = {}
        self.late: dict[bytes, int] = {}
        """By chunk that was asked for twice: the link that was asked first."""
        self.began: dict[bytes, float] = {}
        self.fetched: list[bytes] = []
        self.sizes: dict[bytes, int] = {}
        self.now = 0.0
        for link, outbound in self.links.items():
            self.fetcher.link_up(link, outbound)

    def _fits(self, blob: bytes, size: int) -> bool | None:
        return self.true_sizes.get(blob, size) == size if blob in self.have else None

    def want(self, key: int, *chunks: int, size: int = 100) -> None:
        if self.fetcher.want(key_of(key), tuple((blob_of(c), size) for c in chunks), self.now):
            self.fetched.append(key_of(key))

    def plan(self) -> list[tuple[int, bytes]]:
        flights = self.fetcher._flights
        for flight in [flight for flight in flights.late.values() if self.now >= flight.deadline]:
            del self.late[flight.blob]
        for blob, began in list(self.began.items()):
            flight = flights.newest.get(blob)
            if self.now >= (flight.deadline if flight else began + limits.FETCH_TIMEOUT_S):
                self._ended(blob)
        started = []
        for effect in self.fetcher.plan(self.now):
            if isinstance(effect, Get):
                link, blob = effect.link, effect.blob
                assert self.links[link], "a Get needs a link that we dialled"
                self.sizes[blob] = effect.size
            else:
                assert isinstance(effect, Send)
                assert isinstance(effect.message, Want)
                link, blob = effect.link, effect.message.blob
                assert not self.links[link], "an Ask needs a link that dialled us"
            assert blob not in self.have
            if blob in self.flights:
                assert blob in flights.late, "asked for twice at a time"
                assert link not in (self.flights[blob], self.late.get(blob))
                self.late[blob] = self.flights[blob]  # an earlier late request is given up
            self.flights[blob] = link
            self.began[blob] = self.now
            started.append((link, blob))
        assert len(self.flights) <= limits.FETCHES_MAX
        under_way = [*self.flights.values(), *self.late.values()]
        assert all(under_way.count(link) <= limits.FETCHES_PER_LINK_MAX for link in self.links)
        assert flights.load == {link: under_way.count(link) for link in self.links}
        assert self.late.keys() <= self.flights.keys()
        assert len(self.late) <= limits.FETCHES_TWICE_MAX
        assert self.late == {blob: flight.link for blob, flight in flights.late.items()}
        assert self.fetcher.deadline() > self.now, "a deadline that has passed already: a busy loop"
        return started

    def _ended(self, blob: bytes) -> None:
        self.flights.pop(blob, None)
        self.began.pop(blob, None)
        if blob in self.late:
            self.flights[blob] = self.late.pop(blob)
            self.began[blob] = self.fetcher._flights.late[blob].began

    def arrive(self, blob: bytes) -> None:
        self.late.pop(blob, None)
        self._ended(blob)
        self.have.add(blob)
        self.fetcher.wants.rule_out(blob)
        self.fetched += self.fetcher.arrived(blob, self.now)

    def fail(self, blob: bytes) -> None:
        link = self.flights[blob]
        self._ended(blob)
        self.fetcher.failed(link, blob, self.now)

    def drop(self, link: int) -> None:
        del self.links[link]
        self.late = {blob: other for blob, other in self.late.items() if other != link}
        for blob in [b for b, flight in self.flights.items() if flight == link]:
            self._ended(blob)
        self.fetcher.link_down(link)

    def pass_time(self, seconds: float = limits.FETCH_RETRY_S) -> None:
        self.now += seconds
