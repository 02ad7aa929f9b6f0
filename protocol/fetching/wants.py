"""What is wanted of others: the chunks still missing, under which keys, and which links should have them.

A key is a delta's record id or a snapshot's root. Peers say what they hold: all chunks of a key, or single
ones. Such a hint may be missing or wrong.
"""

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

from gossamer.protocol import limits


@dataclass(slots=True)
class Want:
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

    with_holder: dict[bytes, Want] = field(default_factory=dict)
    """Wants of which a link is known to hold some chunk, by key."""
    without_holder: dict[bytes, Want] = field(default_factory=dict)
    """All other wants, by key."""
    size: int = 0
    """The largest size that anybody has stated for the chunk."""


class Wants:
    """Everything that is wanted, oldest first."""

    def __init__(self, fits: Callable[[bytes, int], bool | None]) -> None:
        """`fits(blob, size)` tells whether a stored chunk has that size; None if it is not stored."""
        self._fits = fits
        self._wants: dict[bytes, Want] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self._with_holder: dict[bytes, Want] = {}
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
            self._add(key, self._wants.setdefault(key, Want({}, now)), blob, size)
        return bool(missing)

    def _add(self, key: bytes, want: Want, blob: bytes, size: int) -> None:
        want.missing[blob] = size
        chunk = self._chunks.setdefault(blob, _Chunk())
        if key in self._with_holder:
            chunk.with_holder[key] = want
        else:
            self._file_without_holder(blob, key, want)
        if 0 < chunk.size < size:
            self._newly_without_holder.append(blob)  # a link that failed it may have been cut short
        chunk.size = max(chunk.size, size)

    def _file_without_holder(self, blob: bytes, key: bytes, want: Want) -> None:
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

    def without_holder(self, blob: bytes) -> Mapping[bytes, Want]:
        """The wants that a chunk is part of, by key, of which no link is known to hold any chunk."""
        chunk = self._chunks.get(blob)
        return chunk.without_holder if chunk is not None else {}

    def put_last(self, keys: Iterable[bytes]) -> None:
        """From now on these keys come last among those that somebody is known to hold."""
        for key in keys:
            if key in self._with_holder:
                self._with_holder[key] = self._with_holder.pop(key)

    def _file(self, key: bytes, want: Want) -> None:
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

    def get(self, key: bytes) -> Want | None:
        return self._wants.get(key)

    def of_key(self, key: bytes) -> Want:
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

    def of(self, blob: bytes) -> Iterable[Want]:
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
    def with_holder(self) -> Mapping[bytes, Want]:
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
