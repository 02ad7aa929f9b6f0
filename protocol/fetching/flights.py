"""What is under way: from which link, since when, and how long it is waited for.

Each chunk is under way once, except one that takes too long: a second link may be asked for it, see
`endgame`. Its first transfer is then *late*, and may still bring the chunk.
"""

from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from itertools import chain
from math import inf

from gossamer.protocol import limits


@dataclass(frozen=True, slots=True)
class Flight:
    """One transfer of a chunk."""

    link: int
    blob: bytes
    size: int
    """The most bytes that the chunk can have, as far as was known."""
    began: float
    deadline: float
    """When the transfer is given up."""
    is_guess: bool
    """Whether the link's peer has not said that it holds the chunk."""
    is_search: bool
    """Whether nobody is known to hold any of the payload."""
    came_before: int
    lost_before: int
    """Bytes that had come, and that had been lost, when this transfer began: see `Flights`."""


class Flights:
    """All transfers, and the number of them from each link."""

    def __init__(self) -> None:
        self.newest: dict[bytes, Flight] = {}
        """The transfer that began last, by chunk."""
        self.late: dict[bytes, Flight] = {}
        """The transfer before that one, for chunks that have two."""
        self.load: dict[int, int] = {}
        """Number of transfers under way from each link."""
        self.came = 0
        """Bytes of all chunks that came, each counted at the largest size that it might have had."""
        self.lost = 0
        """Bytes of transfers given up for which our own line may be to blame: see `window`."""

    # -- what happens

    def link_up(self, link: int) -> None:
        self.load[link] = 0

    def link_down(self, link: int) -> list[bytes]:
        """End all transfers from a link; returns the chunks whose newest transfer was among them."""
        ended = [blob for blob, flight in self.newest.items() if flight.link == link]
        for flight in [flight for flight in self if flight.link == link]:
            self.end(flight)
        self.load.pop(link, None)
        return ended

    def begin(
        self, link: int, blob: bytes, size: int, now: float, *, is_guess: bool, is_search: bool = False
    ) -> None:
        """Ask a link for a chunk. A transfer of it under way becomes late; there must be no late one yet."""
        deadline = now + self._patience(link, size)
        if blob in self.newest:
            self.late[blob] = self.newest[blob]
        self.newest[blob] = Flight(link, blob, size, now, deadline, is_guess, is_search, self.came, self.lost)
        self.load[link] += 1

    def end(self, flight: Flight) -> None:
        """A transfer is over. If another one of the same chunk was late, that one is the newest again."""
        blob = flight.blob
        if self.newest[blob] is not flight:
            del self.late[blob]
        else:
            del self.newest[blob]
            if blob in self.late:
                self.newest[blob] = self.late.pop(blob)
        self.load[flight.link] -= 1

    def landed(self, blob: bytes) -> list[Flight]:
        """A chunk is here: all its transfers are over. Returns them, oldest first."""
        flights = self.of(blob)
        for flight in flights:
            self.end(flight)
        self.came += flights[0].size if flights else 0
        return flights

    # -- what others ask

    def __len__(self) -> int:
        """Number of chunks under way."""
        return len(self.newest)

    def __contains__(self, blob: bytes) -> bool:
        return blob in self.newest

    def __iter__(self) -> Iterator[Flight]:
        return chain(self.newest.values(), self.late.values())

    @property
    def blobs(self) -> KeysView[bytes]:
        """The chunks that are under way."""
        return self.newest.keys()

    def of(self, blob: bytes) -> list[Flight]:
        """The transfers of a chunk, oldest first."""
        return [flights[blob] for flights in (self.late, self.newest) if blob in flights]

    @property
    def without_guesses(self) -> int:
        """Number of chunks under way from links that are known to hold them."""
        return sum(not flight.is_guess for flight in self.newest.values())

    def bytes_under_way(self, *, of_searches: bool) -> int:
        """Bytes under way: of searches for what nobody is known to hold, or of all other transfers."""
        return sum(flight.size for flight in self.newest.values() if flight.is_search == of_searches)

    def next_deadline(self) -> float:
        return min((flight.deadline for flight in self), default=inf)

    def _patience(self, link: int, size: int) -> float:
        """Seconds to wait. A peer sends one chunk after another: those under way on its link come first."""
        queued = size + sum(flight.size for flight in self if flight.link == link)
        per_chunk = limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S
        return limits.FETCH_PATIENCE_S + per_chunk * queued / limits.CHUNK_BYTES_MAX
