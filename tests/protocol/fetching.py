"""A fetcher on its own, and what is under way according to its effects."""

from __future__ import annotations

import random
from hashlib import sha256

from gossamer.protocol import limits
from gossamer.protocol.effects import Get, Outbox, Send
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.messages import Want


def blob_of(number: int) -> bytes:
    return sha256(f"chunk {number}".encode()).digest()


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


class Net:
    """A fetcher whose effects are checked, and whose clock the test moves."""

    def __init__(self, seed: int = 0, links: dict[int, bool] | None = None) -> None:
        self.have: set[bytes] = set()
        self.true_sizes: dict[bytes, int] = {}
        """The true sizes of chunks whose size is not the one asked for."""
        self.outbox = Outbox()
        self.fetcher = Fetcher(self._fits, random.Random(seed), self.outbox)
        self.links = dict(links or {})
        self.fetched: list[bytes] = []
        self.sizes: dict[bytes, int] = {}
        self.now = 0.0
        for link, outbound in self.links.items():
            self.fetcher.link_up(link, outbound)

    @property
    def flights(self) -> dict[bytes, int]:
        """By chunk under way: the link that was asked last."""
        return self.late | {request.blob: request.link for request in self.fetcher.requests.current.values()}

    @property
    def late(self) -> dict[bytes, int]:
        """By chunk that takes too long: the link that was asked first."""
        return {request.blob: request.link for request in self.fetcher.requests.late.values()}

    def _fits(self, blob: bytes, size: int) -> bool | None:
        return self.true_sizes.get(blob, size) == size if blob in self.have else None

    def want(self, key: int, *chunks: int, size: int = 100) -> None:
        if self.fetcher.want(key_of(key), tuple((blob_of(c), size) for c in chunks), self.now):
            self.fetched.append(key_of(key))

    def plan(self) -> list[tuple[int, bytes]]:
        before = self.fetcher.requests.current.copy()
        started = []
        self.fetcher.plan(self.now)
        for effect in self.outbox.drain():
            if isinstance(effect, Get):
                link, blob = effect.link, effect.blob
                assert self.links[link], "a Get needs a link that we dialled"
                self.sizes[blob] = effect.size
            else:
                assert isinstance(effect, Send)
                assert isinstance(effect.message, Want)
                link, blob = effect.link, effect.message.blob
                assert not self.links[link], "a Want needs a link that dialled us"
            assert blob not in self.have
            assert self.late.get(blob) != link, "asked for what it is late with"
            if blob in before and self.now < before[blob].deadline:
                assert blob in self.late, "asked for twice at a time"
            started.append((link, blob))
        requests = self.fetcher.requests
        guesses = sum(request.is_guess for request in requests.current.values())
        assert len(requests.current) - guesses <= limits.FETCHES_MAX
        assert len(requests.current) <= limits.FETCHES_MAX + limits.GUESSES_MAX
        under_way = [request.link for request in requests]
        assert all(under_way.count(link) <= limits.FETCHES_PER_LINK_MAX for link in self.links)
        assert requests.load == {link: under_way.count(link) for link in self.links}
        assert self.fetcher.deadline() > self.now, "a deadline that has passed already: a busy loop"
        return started

    def arrive(self, blob: bytes) -> None:
        self.have.add(blob)
        self.fetcher.wants.rule_out(blob)
        self.fetched += self.fetcher.arrived(blob, self.now)

    def fail(self, blob: bytes) -> None:
        self.fetcher.failed(self.flights[blob], blob, self.now)

    def hint(self, link: int, key: int) -> None:
        self.fetcher.hint(link, key_of(key))

    def hint_part(self, link: int, key: int, chunk: int) -> None:
        self.fetcher.hint_part(link, key_of(key), blob_of(chunk))

    def drop(self, link: int) -> None:
        del self.links[link]
        self.fetcher.link_down(link)

    def pass_time(self, seconds: float = limits.FETCH_RETRY_S) -> None:
        self.now += seconds
