"""What is wanted of others: the chunks still missing, under which keys, and which links should have them.

A key is a delta's record id or a snapshot's root. Peers say what they hold: all chunks of a key, or single
ones. Such a hint may be missing or wrong.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff

# --- What is under way: from which link, since when, and how long it is waited for.
#
# Each chunk is under way once, except one that takes too long: a second link may be asked for it, see
# `endgame`. Its first transfer is then *late*, and may still bring the chunk.


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


@dataclass(slots=True)
class WantedChunk:
    """The chunks (hash and size) still missing under one key, and the links that are said to have them."""

    missing: dict[bytes, int]
    since: float
    holders: set[int] = field(default_factory=set)
    """Links said to have all the chunks."""
    parts: dict[bytes, set[int]] = field(default_factory=dict)
    """Links said to have single chunks, by chunk."""
    is_told_of_since: float = -inf
    """When a link last said that it holds another part: more is on its way to our neighbours."""
    got_at: float = -inf
    """When the last chunk came."""

    @property
    def has_holder(self) -> bool:
        """Whether any link is known to hold any of the missing chunks."""
        return bool(self.holders or (self.parts and any(self.parts.values())))

    @property
    def may_be_guessed_at(self) -> float:
        """When links that have not said that they hold the chunks may be asked for them too."""
        return max(self.since, self.is_told_of_since) + limits.FETCH_RETRY_S

    def is_orphan(self, now: float) -> bool:
        """Whether no link is known to hold any of it, and none of it has come for `ORPHAN_PATIENCE_S`."""
        return not self.has_holder and max(self.since, self.got_at) <= now - limits.ORPHAN_PATIENCE_S

    def holders_of(self, blob: bytes) -> set[int]:
        part = self.parts.get(blob)
        return self.holders | part if part else self.holders


@dataclass(slots=True)
class _Chunk:
    """A missing chunk, and the wants that it is part of.

    Anybody may list one chunk in thousands of payloads, so no work done for one of those payloads looks at
    all the others.
    """

    with_holder: dict[bytes, WantedChunk] = field(default_factory=dict)
    """Wants of which a link is known to hold some chunk, by key."""
    without_holder: dict[bytes, WantedChunk] = field(default_factory=dict)
    """All other wants, by key."""
    size: int = 0
    """The largest size that anybody has stated for the chunk."""


class Wants:
    """Everything that is wanted, oldest first."""

    def __init__(self, fits: Callable[[bytes, int], bool | None]) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self._fits = fits
        self._wants: dict[bytes, WantedChunk] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self._with_holder: dict[bytes, WantedChunk] = {}
        """The wants of which a link is known to hold some chunk."""
        self._newly_without_holder: list[bytes] = []
        """Chunks newly without known holders, or that may be longer than was thought, until taken."""

    # -- what is wanted

    def add(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> bool | None:
        """Want chunks (hash, size) under a key. Returns whether any is missing; None if nobody can have them.

        A hash has one size. A peer that states two sizes for one hash, or a wrong size for a chunk that is
        here, describes something that nobody can have. It is not looked for, and the chunk that is here does
        not count for it. Otherwise only nodes that happen to have that chunk from elsewhere would hold it.
        """
        sizes = dict(chunks)
        if any(sizes[blob] != size for blob, size in chunks):
            return None
        missing = {}
        for blob, size in sizes.items():
            fits = self._fits(blob, size)
            if fits is False:
                return None
            if fits is None:
                missing[blob] = size
        for blob, size in missing.items():
            self._add(key, self._wants.setdefault(key, WantedChunk({}, now)), blob, size)
        return bool(missing)

    def _add(self, key: bytes, want: WantedChunk, blob: bytes, size: int) -> None:
        want.missing[blob] = size
        chunk = self._chunks.setdefault(blob, _Chunk())
        if key in self._with_holder:
            chunk.with_holder[key] = want
        else:
            self._file_without_holder(blob, key, want)
        if 0 < chunk.size < size:
            self._newly_without_holder.append(blob)  # a link that failed it may have been cut short
        chunk.size = max(chunk.size, size)

    def _file_without_holder(self, blob: bytes, key: bytes, want: WantedChunk) -> None:
        without_holder = self._chunks[blob].without_holder
        if not without_holder:
            self._newly_without_holder.append(blob)
        without_holder[key] = want

    def forget(self, key: bytes) -> None:
        """Stop wanting a key (its record became void, or describes something that cannot exist)."""
        want = self._wants.pop(key, None)
        has_holder = self._with_holder.pop(key, None) is not None
        for blob in want.missing if want else ():
            chunk = self._chunks[blob]
            del (chunk.with_holder if has_holder else chunk.without_holder)[key]
            if not chunk.with_holder and not chunk.without_holder:
                del self._chunks[blob]

    @property
    def blobs(self) -> KeysView[bytes]:
        """The chunks that are missing."""
        return self._chunks.keys()

    def size_of(self, blob: bytes) -> int:
        """The largest size that was stated for a missing chunk; 0 if it is not wanted.

        If different sizes are stated for one hash, at most one is true, and the chunk's bytes will show
        which. So no false statement keeps us from asking for it.
        """
        chunk = self._chunks.get(blob)
        return chunk.size if chunk is not None else 0

    def rule_out(self, blob: bytes) -> None:
        """A chunk is here: stop wanting keys that state another size for it, see `add`."""
        for key in self.keys_of(blob):
            if self._fits(blob, self._wants[key].missing[blob]) is False:
                self.forget(key)

    def arrived(self, blob: bytes, guessed: int | None, now: float) -> list[bytes]:
        """A chunk is stored. Returns the keys that are complete with it.

        `guessed` is the link that brought it without having said that it holds it, if any. It may well have
        the rest too, so it counts as a holder from now on.
        """
        done: list[bytes] = []
        keys = self.keys_of(blob)
        self._chunks.pop(blob, None)
        for key in keys:
            want = self._wants[key]
            want.got_at = now
            if guessed is not None:
                want.holders.add(guessed)
            del want.missing[blob]
            want.parts.pop(blob, None)
            if not want.missing:
                self.forget(key)
                done.append(key)
            else:
                self._file(key, want)
        return done

    # -- who has it

    def held_by(self, link: int, key: bytes, blob: bytes | None = None) -> None:
        """A link's peer holds one chunk of a key or, without `blob`, all of them."""
        want = self._wants[key]
        (want.holders if blob is None else want.parts.setdefault(blob, set())).add(link)
        self._file(key, want)

    def not_held_by(self, links: Collection[int], key: bytes, blob: bytes) -> None:
        """Links that did not bring a chunk are no longer believed to hold it, nor to hold the whole key."""
        want = self._wants[key]
        want.holders.difference_update(links)
        if blob in want.parts:
            want.parts[blob].difference_update(links)
        self._file(key, want)

    def link_down(self, link: int) -> None:
        for key, want in list(self._with_holder.items()):
            want.holders.discard(link)
            for part in want.parts.values():
                part.discard(link)
            self._file(key, want)

    def take_without_holder(self) -> list[bytes]:
        """Chunks that, since the last call, came to be wanted under a key without any known holder."""
        taken, self._newly_without_holder = self._newly_without_holder, []
        return [blob for blob in taken if self.without_holder(blob)]

    def without_holder(self, blob: bytes) -> Mapping[bytes, WantedChunk]:
        """The wants that a chunk is part of, by key, of which no link is known to hold any chunk."""
        chunk = self._chunks.get(blob)
        return chunk.without_holder if chunk is not None else {}

    def put_last(self, keys: Iterable[bytes]) -> None:
        """From now on these keys come last among those that somebody is known to hold."""
        for key in keys:
            if key in self._with_holder:
                self._with_holder[key] = self._with_holder.pop(key)

    def _file(self, key: bytes, want: WantedChunk) -> None:
        had_holder = key in self._with_holder
        if want.has_holder and not had_holder:
            self._with_holder[key] = want
            for chunk in map(self._chunks.__getitem__, want.missing):
                chunk.with_holder[key] = chunk.without_holder.pop(key)
                chunk.without_holder = chunk.without_holder or {}  # an emptied one keeps its size
        elif had_holder and not want.has_holder:
            del self._with_holder[key]
            for blob in want.missing:
                chunk = self._chunks[blob]
                del chunk.with_holder[key]
                chunk.with_holder = chunk.with_holder or {}
                self._file_without_holder(blob, key, want)

    # -- what others ask

    def __len__(self) -> int:
        return len(self._wants)

    def __contains__(self, key: bytes) -> bool:
        """Whether chunks are missing under a key."""
        return key in self._wants

    def get(self, key: bytes) -> WantedChunk | None:
        return self._wants.get(key)

    def of_key(self, key: bytes) -> WantedChunk:
        """The want of a key. The key must be wanted."""
        return self._wants[key]

    def missing(self, key: bytes) -> Collection[bytes]:
        """The chunks of a key that are still to come."""
        return self._wants[key].missing.keys() if key in self._wants else ()

    def keys_of(self, blob: bytes) -> tuple[bytes, ...]:
        """The keys under which a missing chunk is wanted."""
        chunk = self._chunks.get(blob)
        return tuple(sorted(chain(chunk.with_holder, chunk.without_holder))) if chunk is not None else ()

    def some_keys_of(self, blob: bytes) -> list[bytes]:
        """`keys_of`, but at most `WANTS_LOOKED_AT_MAX`, and others the next time. Keys that somebody is known
        to hold are taken first."""
        chunk = self._chunks.get(blob)
        if chunk is None:
            return []
        some = list(islice(chain(chunk.with_holder, chunk.without_holder), limits.WANTS_LOOKED_AT_MAX))
        if len(some) < len(chunk.with_holder) + len(chunk.without_holder):
            for key in some:
                wants = chunk.with_holder if key in chunk.with_holder else chunk.without_holder
                wants[key] = wants.pop(key)
        return sorted(some)

    def of(self, blob: bytes) -> Iterable[WantedChunk]:
        """The wants that a missing chunk is part of."""
        chunk = self._chunks.get(blob)
        return chain(chunk.with_holder.values(), chunk.without_holder.values()) if chunk is not None else ()

    def holders_of(self, key: bytes, blob: bytes) -> set[int]:
        """Links whose peers said that they hold a chunk of `key` that is missing here."""
        return self._wants[key].holders_of(blob)

    def lacking(self, by: float, now: float) -> list[bytes]:
        """Keys wanted since `by` or earlier that are not complete, without those that nobody is known to hold
        and that have been wanted for `ORPHAN_PATIENCE_S`."""
        oldest = now - limits.ORPHAN_PATIENCE_S
        return [
            key
            for key, want in self._wants.items()
            if want.since <= by and (want.has_holder or want.since > oldest)
        ]

    def chunks_lacking(self, by: float) -> int:
        """Number of chunks missing of all keys wanted since `by` or earlier, with or without holders."""
        return sum(len(want.missing) for want in self._wants.values() if want.since <= by)

    @property
    def with_holder(self) -> Mapping[bytes, WantedChunk]:
        """The wants of which somebody is known to hold some chunk, in the order in which to fetch them."""
        return self._with_holder

    @property
    def any_has_holder(self) -> bool:
        """Whether somebody is known to hold any chunk that is missing."""
        return bool(self._with_holder)

    def since(self, key: bytes) -> float:
        """Since when chunks of a key have been missing."""
        return self._wants[key].since

    def is_sought(self, key: bytes, now: float) -> bool:
        """Whether a key has been wanted for so long that others may have given up on it."""
        want = self._wants.get(key)
        return want is not None and want.since <= now - limits.ORPHAN_PATIENCE_S


# --- Which links did not bring which chunk, and when each may be asked again: later each time.
#
# Other links are tried first. A link that fails a chunk for more than a moment is no longer believed to hold
# it. Links are asked most seldom for chunks that nobody is known to hold.


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
