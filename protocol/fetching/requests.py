"""What is wanted of others, who is said to have it, and what is under way from whom.

A key is a delta's record id, or a snapshot's. Under it chunks are wanted, each known by its hash (`blob`).
Peers say what they hold: all chunks of a key, or single ones. Such a hint may be missing or wrong.

One rule says what becomes of a request in vain: the link *rests* from that chunk, twice as long each time,
and somebody else is asked. A link that said that it holds the chunk, and still has not brought it after a few
tries or is silent, is *doubted*: as part of this key it is asked like any other that has said nothing, until
it brings a chunk.

How many bytes may be under way at a time is a *window*, smaller where our own line brings them too late
(`test_requests` shows what happens without it). Peers send as soon as they are asked, and all of them share
our line. On a slow line each gets so small a share that no chunk is in time, and the parts that have come are
thrown away. Nobody tells us how fast our line is; only what it brings shows that. So the window grows with
each chunk that comes in good time, and falls to what came meanwhile when transfers are given up.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from gossamer.protocol import limits


@dataclass(slots=True)
class WantedKey:
    """The chunks (hash and size) still missing under one key, and the links that are said to have them."""

    missing: dict[bytes, int]
    since: float
    holders: set[int] = field(default_factory=set)
    """Links said to have all the chunks."""
    parts: dict[bytes, set[int]] = field(default_factory=dict)
    """Links said to have single chunks, by chunk."""
    doubted: set[int] = field(default_factory=set)
    """Links that said so and did not bring what they were asked for: what they say counts no more."""
    got_at: float = -inf
    """When the last chunk came."""

    @property
    def has_holder(self) -> bool:
        """Whether any link is known to hold any of the missing chunks."""
        return bool(self.holders or (self.parts and any(self.parts.values())))

    def holders_of(self, blob: bytes) -> set[int]:
        part = self.parts.get(blob)
        return self.holders | part if part else self.holders


@dataclass(slots=True)
class _Chunk:
    """A missing chunk: the keys that it is part of, and the largest size that anybody has stated for it.

    Anybody may list one chunk in thousands of payloads, so no work done for one of those looks at all others.
    """

    keys: dict[bytes, None] = field(default_factory=dict)
    size: int = 0
    rests: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Until when each link that did not bring it is not asked for it again, and how long that was in all."""


class Wants:
    """Everything that is wanted, oldest first."""

    def __init__(self, fits: Callable[[bytes, int], bool | None]) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self._fits = fits
        self._wants: dict[bytes, WantedKey] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self.with_holder: dict[bytes, WantedKey] = {}
        """The wants of which a link is known to hold some chunk, in the order in which to fetch them."""
        self.without_holder: dict[bytes, WantedKey] = {}
        """All others, in the order in which to look for them."""

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
        if missing and key not in self._wants:
            self._wants[key] = self.without_holder[key] = WantedKey({}, now)
        for blob, size in missing.items():
            self._wants[key].missing[blob] = size
            chunk = self._chunks.setdefault(blob, _Chunk())
            chunk.keys[key] = None
            chunk.size = max(chunk.size, size)
        return bool(missing)

    def forget(self, key: bytes) -> None:
        """Stop wanting a key (its record became void, or describes something that cannot exist)."""
        want = self._wants.pop(key, None)
        self.with_holder.pop(key, None)
        self.without_holder.pop(key, None)
        for blob in want.missing if want else ():
            chunk = self._chunks[blob]
            del chunk.keys[key]
            if not chunk.keys:
                del self._chunks[blob]

    def rule_out(self, blob: bytes) -> None:
        """A chunk is here: stop wanting keys that state another size for it, see `add`."""
        for key in self.keys_of(blob):
            if self._fits(blob, self._wants[key].missing[blob]) is False:
                self.forget(key)

    def arrived(self, blob: bytes, link: int | None, now: float) -> list[bytes]:
        """A chunk is stored. Returns the keys that are complete with it.

        `link` is the one that brought it, if that is known, though it was not known to hold it. It may well
        have the rest too, so it counts as a holder from now on.
        """
        done: list[bytes] = []
        keys = self.keys_of(blob)
        self._chunks.pop(blob, None)
        for key in keys:
            want = self._wants[key]
            want.got_at = now
            if link is not None:
                want.doubted.discard(link)
                want.holders.add(link)
            del want.missing[blob]
            want.parts.pop(blob, None)
            if not want.missing:
                self.forget(key)
                done.append(key)
            else:
                self._file(key, want)
        return done

    # -- who has it

    def held_by(self, link: int, key: bytes, blobs: Iterable[bytes]) -> None:
        """A link's peer has come to hold these chunks: it may be asked for them at once."""
        for blob in blobs:
            self._chunks[blob].rests.pop(link, None)
        self._file(key, self._wants[key])

    def rest(self, link: int, blob: bytes, now: float, least: float) -> float:
        """A link did not bring a chunk: it is not asked for it again for `least` s, or for twice as long as
        the last time. Returns for how long."""
        if (chunk := self._chunks.get(blob)) is None:
            return 0.0
        _, before = chunk.rests.get(link, (0.0, 0.0))
        wait = max(least, min(2 * before, limits.FETCH_REST_MAX_S))
        chunk.rests[link] = (now + wait, wait)
        return wait

    def rests(self, link: int, blob: bytes, now: float) -> bool:
        """Whether a link is not to be asked for a chunk now."""
        chunk = self._chunks.get(blob)
        return chunk is not None and chunk.rests.get(link, (-inf, 0.0))[0] > now

    def doubt(self, link: int, key: bytes) -> None:
        """A link does not bring what it said that it holds of a key."""
        if (want := self._wants.get(key)) is not None:
            self._drop_holder(link, key, want)
            want.doubted.add(link)

    def link_down(self, link: int) -> None:
        for key, want in list(self.with_holder.items()):
            self._drop_holder(link, key, want)
        for chunk in self._chunks.values():
            chunk.rests.pop(link, None)

    def _drop_holder(self, link: int, key: bytes, want: WantedKey) -> None:
        want.holders.discard(link)
        for part in want.parts.values():
            part.discard(link)
        self._file(key, want)

    def put_last(self, keys: Iterable[bytes]) -> None:
        """From now on these keys come last among those with a holder, or those without."""
        for key in keys:
            wants = self.with_holder if key in self.with_holder else self.without_holder
            wants[key] = wants.pop(key)

    def _file(self, key: bytes, want: WantedKey) -> None:
        here, there = self.with_holder, self.without_holder
        if not want.has_holder:
            here, there = there, here
        here.setdefault(key, want)
        there.pop(key, None)

    # -- what others ask

    def __len__(self) -> int:
        return len(self._wants)

    def __contains__(self, key: bytes) -> bool:
        """Whether chunks are missing under a key."""
        return key in self._wants

    def get(self, key: bytes) -> WantedKey | None:
        return self._wants.get(key)

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

    def missing(self, key: bytes) -> Collection[bytes]:
        """The chunks of a key that are still to come."""
        return self._wants[key].missing.keys() if key in self._wants else ()

    def keys_of(self, blob: bytes) -> tuple[bytes, ...]:
        """The keys under which a missing chunk is wanted."""
        chunk = self._chunks.get(blob)
        return tuple(sorted(chunk.keys)) if chunk is not None else ()

    def holders_of(self, key: bytes, blob: bytes) -> set[int]:
        """Links whose peers said that they hold a chunk of `key` that is missing here."""
        return self._wants[key].holders_of(blob)

    def lacking(self, by: float, now: float) -> list[bytes]:
        """Keys wanted since `by` or earlier that are not complete, without those that nobody has said to hold
        and that have been wanted for `PAYLOAD_PATIENCE_S`."""
        oldest = now - limits.PAYLOAD_PATIENCE_S
        return [
            key
            for key, want in self._wants.items()
            if want.since <= by and (want.has_holder or want.doubted or want.since > oldest)
        ]

    def chunks_lacking(self, by: float) -> int:
        """Number of chunks missing of all keys wanted since `by` or earlier, with or without holders."""
        return sum(len(want.missing) for want in self._wants.values() if want.since <= by)

    @property
    def any_has_holder(self) -> bool:
        """Whether somebody is known to hold any chunk that is missing."""
        return bool(self.with_holder)

    def since(self, key: bytes) -> float:
        """Since when chunks of a key have been missing."""
        return self._wants[key].since


@dataclass(frozen=True, slots=True)
class Request:
    """One chunk that a link was asked for."""

    link: int
    key: bytes
    blob: bytes
    size: int
    """The most bytes that the chunk can have, as far as was known."""
    began: float
    deadline: float
    """When the request is given up."""
    is_guess: bool
    """Whether the link's peer has not said that it holds the chunk."""
    came_before: int
    """Bytes that had come when this request began."""


class Requests:
    """What is under way from which link.

    Each chunk is under way once. If it takes too long it is *late*: it may still come, and meanwhile it is
    asked for as if it was not under way.
    """

    def __init__(self) -> None:
        self.current: dict[bytes, Request] = {}
        """What is under way and not late, by chunk."""
        self.late: dict[bytes, Request] = {}
        self.load: dict[int, int] = {}
        """Number of requests under way, late ones included, of each link that is up."""
        self.came = 0
        """Bytes of all chunks that came, each counted at the largest size that it might have had."""
        self.window = limits.FETCH_WINDOW_BYTES_AT_FIRST

    def __iter__(self) -> Iterator[Request]:
        return chain(self.late.values(), self.current.values())

    def link_down(self, link: int) -> None:
        for request in [request for request in self if request.link == link]:
            self.end(request)
        self.load.pop(link, None)

    def is_full(self, of_guesses: bool | None = None) -> bool:
        """Whether no other transfer may begin: of those that are guesses, of those that are none, or of all.

        Guesses, which bring little, are counted apart: silence there must not keep us from chunks that
        somebody is known to hold. What is late fills the window only.
        """
        under_way = sum(of_guesses in (None, request.is_guess) for request in self.current.values())
        most = limits.GUESSES_MAX if of_guesses else limits.FETCHES_MAX
        sizes = (request.size for request in self if of_guesses in (None, request.is_guess))
        return under_way >= most or sum(sizes) >= self.window

    def begin(self, link: int, key: bytes, blob: bytes, size: int, now: float, *, is_guess: bool) -> Request:
        """Ask a link for a chunk that is not under way, or is late."""
        # A peer sends one chunk after another: those under way on its link come first.
        queued = size + sum(request.size for request in self if request.link == link)
        per_chunk = limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S
        deadline = now + limits.FETCH_PATIENCE_S + per_chunk * queued / limits.CHUNK_BYTES_MAX
        request = Request(link, key, blob, size, now, deadline, is_guess, self.came)
        self.current[blob] = request
        self.load[link] += 1
        return request

    def is_late(self, request: Request) -> None:
        """A request takes too long. There must be no other late one of the same chunk."""
        self.late[request.blob] = self.current.pop(request.blob)

    def end(self, request: Request) -> None:
        """A request is over."""
        of_kind = self.current if self.current.get(request.blob) is request else self.late
        del of_kind[request.blob]
        self.load[request.link] -= 1

    def of(self, blob: bytes) -> list[Request]:
        """The requests for a chunk, oldest first."""
        return [requests[blob] for requests in (self.late, self.current) if blob in requests]

    def arrived(self, blob: bytes, now: float) -> tuple[Request | None, float]:
        """A chunk is here: all requests for it are over. Returns the oldest, if any, and its share (from 0
        to 1) of the patience with it."""
        over = self.of(blob)
        for request in over:
            self.end(request)
        if not over:
            return None, 0.0
        first = over[0]
        share = min(1.0, max(0.0, now - first.began) / (first.deadline - first.began))
        self.came += first.size
        if share < limits.FETCH_SHARE_GOOD:
            self.window = min(limits.FETCH_WINDOW_BYTES_MAX, self.window + first.size)
        return first, share

    def given_up(self, over: Collection[Request]) -> None:
        """Some transfers are given up: our line brings no more than what came meanwhile."""
        came = self.came - min(request.came_before for request in over)
        self.window = max(limits.FETCH_WINDOW_BYTES_MIN, min(self.window, came))
