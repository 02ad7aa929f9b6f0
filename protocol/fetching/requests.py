"""What is wanted of others, who is said to have it, and what is under way from whom.

A key is a delta's record id, or a snapshot's. Under it chunks are wanted, each known by its hash (`blob`).
Peers say what they hold: all chunks of a key, or single ones. Such a hint may be missing or wrong.

One rule says what becomes of a request in vain: the link *rests* from that chunk, twice as long each time,
and somebody else is asked. A link that said that it holds the chunk, and still has not brought it after a few
tries or is silent, is *doubted*: as part of this key it is asked like any other that has said nothing, until
it brings a chunk.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.backoff import Backoff

Pick = tuple[int, bytes, bytes]
"""A link to ask, the key, and the chunk."""


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
    heard_at: float = -inf
    """When a link last said that it holds another part: more is on its way to our neighbours."""
    got_at: float = -inf
    """When the last chunk came."""
    search_at: float = inf
    """When anybody may be asked for it next, while no link is known to hold any of it."""

    @property
    def has_holder(self) -> bool:
        """Whether any link is known to hold any of the missing chunks."""
        return bool(self.holders or (self.parts and any(self.parts.values())))

    @property
    def may_be_guessed_at(self) -> float:
        """When links that have not said that they hold the chunks may be asked for them too."""
        return max(self.since, self.heard_at) + limits.FETCH_RETRY_S

    def is_orphan(self, now: float) -> bool:
        """Whether no link has said that it holds any of it, and none of it has come for
        `ORPHAN_PATIENCE_S`."""
        return not (self.has_holder or self.doubted) and max(self.since, self.got_at) <= (
            now - limits.ORPHAN_PATIENCE_S
        )

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


class Wants:
    """Everything that is wanted, oldest first."""

    def __init__(self, fits: Callable[[bytes, int], bool | None]) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self._fits = fits
        self._wants: dict[bytes, WantedKey] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self._with_holder: dict[bytes, WantedKey] = {}
        """The wants of which a link is known to hold some chunk."""
        self.lost_holders: list[bytes] = []
        """Keys newly wanted without a known holder, until they are looked for."""
        self.longer: list[bytes] = []
        """Chunks that may be longer than was thought when they were asked for."""

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
            self._wants[key] = WantedKey({}, now)
            self.lost_holders.append(key)
        for blob, size in missing.items():
            self._wants[key].missing[blob] = size
            chunk = self._chunks.setdefault(blob, _Chunk())
            chunk.keys[key] = None
            if 0 < chunk.size < size:  # a link that failed it may have been cut short
                self.longer.append(blob)
            chunk.size = max(chunk.size, size)
        return bool(missing)

    def forget(self, key: bytes) -> None:
        """Stop wanting a key (its record became void, or describes something that cannot exist)."""
        want = self._wants.pop(key, None)
        self._with_holder.pop(key, None)
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

    def held_by(self, link: int, key: bytes, blob: bytes | None = None) -> None:
        """A link's peer holds one chunk of a key or, without `blob`, all of them."""
        want = self._wants[key]
        (want.holders if blob is None else want.parts.setdefault(blob, set())).add(link)
        self._file(key, want)

    def doubt(self, link: int, key: bytes) -> None:
        """A link does not bring what it said that it holds of a key."""
        if (want := self._wants.get(key)) is not None:
            self._drop_holder(link, key, want)
            want.doubted.add(link)

    def link_down(self, link: int) -> None:
        for key, want in list(self._with_holder.items()):
            self._drop_holder(link, key, want)

    def _drop_holder(self, link: int, key: bytes, want: WantedKey) -> None:
        want.holders.discard(link)
        for part in want.parts.values():
            part.discard(link)
        self._file(key, want)

    def put_last(self, keys: Iterable[bytes]) -> None:
        """From now on these keys come last among those that somebody is known to hold."""
        for key in keys:
            if key in self._with_holder:
                self._with_holder[key] = self._with_holder.pop(key)

    def _file(self, key: bytes, want: WantedKey) -> None:
        if want.has_holder:
            self._with_holder.setdefault(key, want)
        elif self._with_holder.pop(key, None) is not None:
            self.lost_holders.append(key)

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
        and that have been wanted for `ORPHAN_PATIENCE_S`."""
        oldest = now - limits.ORPHAN_PATIENCE_S
        return [
            key
            for key, want in self._wants.items()
            if want.since <= by and (want.has_holder or want.doubted or want.since > oldest)
        ]

    def chunks_lacking(self, by: float) -> int:
        """Number of chunks missing of all keys wanted since `by` or earlier, with or without holders."""
        return sum(len(want.missing) for want in self._wants.values() if want.since <= by)

    def without_holder(self) -> list[bytes]:
        """The keys of which nobody is known to hold any chunk."""
        return [key for key in self._wants if key not in self._with_holder]

    @property
    def with_holder(self) -> Mapping[bytes, WantedKey]:
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
    is_search: bool
    """Whether nobody is known to hold any chunk of the key."""
    came_before: int
    lost_before: int
    """Bytes that had come, and that had been lost, when this request began: see `Requests`."""


class Requests:
    """What is under way from which link, and who rests from what.

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
        self.lost = 0
        """Bytes of requests given up for which our own line may be to blame: see `window`."""
        self._rests: dict[tuple[int, bytes], Backoff] = {}
        self._swept_at = 0.0

    def __iter__(self) -> Iterator[Request]:
        return chain(self.current.values(), self.late.values())

    def link_up(self, link: int) -> None:
        self.load[link] = 0

    def link_down(self, link: int) -> None:
        for request in [request for request in self if request.link == link]:
            self.end(request)
        self.load.pop(link, None)
        self._rests = {which: rest for which, rest in self._rests.items() if which[0] != link}

    def begin(self, pick: Pick, size: int, now: float, *, is_guess: bool, is_search: bool) -> Request:
        """Ask a link for a chunk that is not under way, or is late."""
        link, key, blob = pick
        # A peer sends one chunk after another: those under way on its link come first.
        queued = size + sum(request.size for request in self if request.link == link)
        per_chunk = limits.FETCH_TIMEOUT_S - limits.FETCH_PATIENCE_S
        deadline = now + limits.FETCH_PATIENCE_S + per_chunk * queued / limits.CHUNK_BYTES_MAX
        request = Request(link, key, blob, size, now, deadline, is_guess, is_search, self.came, self.lost)
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

    def arrived(self, blob: bytes) -> list[Request]:
        """A chunk is here: all requests for it are over. Returns them, oldest first."""
        over = self.of(blob)
        for request in over:
            self.end(request)
        self.came += over[0].size if over else 0
        return over

    def sizes(self, *, of_searches: bool) -> list[int]:
        """The sizes of the chunks that are under way and not late: of searches, or of all others."""
        return [request.size for request in self.current.values() if request.is_search == of_searches]

    @property
    def twice(self) -> int:
        """Number of chunks that are late, and under way from somebody else too."""
        return sum(blob in self.current for blob in self.late)

    # -- rests

    def rest(self, link: int, blob: bytes, now: float, least: float, most: float) -> Backoff:
        """A link did not bring a chunk: it is not asked for it again for `least` s, or for twice as long as
        the last time, at most `most`."""
        rest = Backoff.after(self._rests.get((link, blob)), now, least, most, limits.TARDY_REST_MAX_S)
        self._rests[link, blob] = rest
        return rest

    def rests_until(self, link: int, blob: bytes) -> float:
        """The earliest time at which a link may be asked for a chunk."""
        rest = self._rests.get((link, blob))
        return rest.until if rest is not None else -inf

    def end_rest(self, link: int, blob: bytes, now: float) -> None:
        """A link may be asked for a chunk at once: it has come to hold it, or the chunk may be longer than it
        was asked for. If that is in vain too, it rests for longer than before."""
        rest = self._rests.get((link, blob))
        if rest is not None:
            self._rests[link, blob] = rest.ended(now)

    def sweep(self, now: float) -> None:
        """Forget old rests, now and then: payloads that nobody has cause thousands."""
        if now >= self._swept_at + limits.FETCH_RETRY_MAX_S:
            self._swept_at = now
            self._rests = {which: rest for which, rest in self._rests.items() if rest.forgotten_at > now}
