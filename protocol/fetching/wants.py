"""What is wanted of others: the chunks still missing, under which keys, and who is said to have them.

A key is a delta's record id, or a snapshot's root. Peers say what they hold, all of it or single chunks; such
a hint may be missing or wrong.
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
    """Of all of them."""
    parts: dict[bytes, set[int]] = field(default_factory=dict)
    """Of single ones."""
    is_told_of_since: float = -inf
    """When somebody last said that it holds another part: more is on its way to our neighbours."""
    got_at: float = -inf
    """When the last chunk came."""

    @property
    def is_held(self) -> bool:
        """Whether somebody is known to hold some of it."""
        return bool(self.holders or (self.parts and any(self.parts.values())))

    @property
    def may_be_guessed_at(self) -> float:
        """From when on others may be asked for it than those who said that they hold it."""
        return max(self.since, self.is_told_of_since) + limits.FETCH_RETRY_S

    def is_orphan(self, now: float) -> bool:
        """Whether nobody is known to hold any of it, and nothing of it was found for long."""
        return not self.is_held and max(self.since, self.got_at) <= now - limits.ORPHAN_PATIENCE_S

    def holders_of(self, blob: bytes) -> set[int]:
        part = self.parts.get(blob)
        return self.holders | part if part else self.holders


@dataclass(slots=True)
class _Chunk:
    """A missing chunk, and what it is missing of.

    Anybody may list one chunk in thousands of payloads: nothing that is done for each of those looks at all
    the others.
    """

    held: dict[bytes, Want] = field(default_factory=dict)
    """Wants that somebody is known to hold some of, by key."""
    unheld: dict[bytes, Want] = field(default_factory=dict)
    """The others."""
    size: int = 0
    """The most bytes that anybody has stated for it."""


class Wants:
    """Everything that is wanted, oldest first."""

    def __init__(self, fits: Callable[[bytes, int], bool | None]) -> None:
        """`fits` tells whether a chunk that is here has a size; None if it is not here."""
        self._fits = fits
        self._wants: dict[bytes, Want] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self._held: dict[bytes, Want] = {}
        """The wants that somebody is known to hold some of."""
        self._unheld: list[bytes] = []
        """Chunks that have come to be looked for, or may be longer than was thought, until they are taken."""

    # -- what is wanted

    def add(self, key: bytes, chunks: tuple[tuple[bytes, int], ...], now: float) -> bool | None:
        """Want chunks (hash, size) under a key. Returns whether any is missing; None if that cannot be.

        A hash has one size. A peer that states another for a chunk that is here, or two, describes what
        nobody can have: it is not looked for, and what is here is not taken for it. Else those would hold it
        who happen to have that chunk as part of something else, and nobody besides.
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
        if key in self._held:
            chunk.held[key] = want
        else:
            self._not_held(blob, key, want)
        if 0 < chunk.size < size:
            self._unheld.append(blob)  # who failed it may have been cut short
        chunk.size = max(chunk.size, size)

    def _not_held(self, blob: bytes, key: bytes, want: Want) -> None:
        unheld = self._chunks[blob].unheld
        if not unheld:
            self._unheld.append(blob)
        unheld[key] = want

    def forget(self, key: bytes) -> None:
        """Stop wanting a key (its record became void, or describes what cannot be)."""
        want = self._wants.pop(key, None)
        is_held = self._held.pop(key, None) is not None
        for blob in want.missing if want else ():
            chunk = self._chunks[blob]
            del (chunk.held if is_held else chunk.unheld)[key]
            if not chunk.held and not chunk.unheld:
                del self._chunks[blob]

    @property
    def blobs(self) -> KeysView[bytes]:
        """The chunks that are missing."""
        return self._chunks.keys()

    def size_of(self, blob: bytes) -> int:
        """The most bytes that a missing chunk can have, as far as was stated; 0 if it is not wanted.

        Of those who state different sizes for one hash all lie but one, and its bytes show which: so nobody's
        word keeps us from asking for it.
        """
        chunk = self._chunks.get(blob)
        return chunk.size if chunk is not None else 0

    def rule_out(self, blob: bytes) -> None:
        """A chunk is here: stop wanting what states another size for it, see `add`."""
        for key in self.keys_of(blob):
            if self._fits(blob, self._wants[key].missing[blob]) is False:
                self.forget(key)

    def arrived(self, blob: bytes, guessed: int | None, now: float) -> list[bytes]:
        """A chunk is stored; returns which keys are complete with it.

        `guessed` is the link that brought it without having said that it holds it: it may well have the rest.
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
        """A link's peer holds one chunk of a key, or all of them."""
        want = self._wants[key]
        (want.holders if blob is None else want.parts.setdefault(blob, set())).add(link)
        self._file(key, want)

    def not_held_by(self, links: Collection[int], key: bytes, blob: bytes) -> None:
        """Links that did not bring a chunk are not believed any more, neither of it nor of everything."""
        want = self._wants[key]
        want.holders.difference_update(links)
        if blob in want.parts:
            want.parts[blob].difference_update(links)
        self._file(key, want)

    def link_down(self, link: int) -> None:
        for key, want in list(self._held.items()):
            want.holders.discard(link)
            for part in want.parts.values():
                part.discard(link)
            self._file(key, want)

    def take_unheld(self) -> list[bytes]:
        """Chunks that have come to be looked for, since the last call, where nobody is known to hold any."""
        taken, self._unheld = self._unheld, []
        return [blob for blob in taken if self.unheld(blob)]

    def unheld(self, blob: bytes) -> Mapping[bytes, Want]:
        """What a chunk is missing of, by key, but for what somebody is known to hold some of."""
        chunk = self._chunks.get(blob)
        return chunk.unheld if chunk is not None else {}

    def put_last(self, keys: Iterable[bytes]) -> None:
        """Of what somebody is known to hold these come last from now on."""
        for key in keys:
            if key in self._held:
                self._held[key] = self._held.pop(key)

    def _file(self, key: bytes, want: Want) -> None:
        was_held = key in self._held
        if want.is_held and not was_held:
            self._held[key] = want
            for chunk in map(self._chunks.__getitem__, want.missing):
                chunk.held[key] = chunk.unheld.pop(key)
                chunk.unheld = chunk.unheld or {}  # an emptied one keeps its size
        elif was_held and not want.is_held:
            del self._held[key]
            for blob in want.missing:
                chunk = self._chunks[blob]
                del chunk.held[key]
                chunk.held = chunk.held or {}
                self._not_held(blob, key, want)

    # -- what others ask

    def __len__(self) -> int:
        return len(self._wants)

    def __contains__(self, key: bytes) -> bool:
        """Whether chunks are missing under a key."""
        return key in self._wants

    def get(self, key: bytes) -> Want | None:
        return self._wants.get(key)

    def of_key(self, key: bytes) -> Want:
        """What is wanted under a key that chunks are missing of."""
        return self._wants[key]

    def missing(self, key: bytes) -> Collection[bytes]:
        """The chunks of a key that are still to come."""
        return self._wants[key].missing.keys() if key in self._wants else ()

    def keys_of(self, blob: bytes) -> tuple[bytes, ...]:
        """The keys that a missing chunk is wanted under."""
        chunk = self._chunks.get(blob)
        return tuple(sorted(chain(chunk.held, chunk.unheld))) if chunk is not None else ()

    def some_keys_of(self, blob: bytes) -> list[bytes]:
        """`keys_of`, but of thousands only some, and others the next time. First comes what somebody is known
        to hold."""
        chunk = self._chunks.get(blob)
        if chunk is None:
            return []
        some = list(islice(chain(chunk.held, chunk.unheld), limits.WANTS_LOOKED_AT_MAX))
        if len(some) < len(chunk.held) + len(chunk.unheld):
            for key in some:
                wants = chunk.held if key in chunk.held else chunk.unheld
                wants[key] = wants.pop(key)
        return sorted(some)

    def of(self, blob: bytes) -> Iterable[Want]:
        """The wants that a chunk is missing of."""
        chunk = self._chunks.get(blob)
        return chain(chunk.held.values(), chunk.unheld.values()) if chunk is not None else ()

    def holders_of(self, key: bytes, blob: bytes) -> set[int]:
        """Links whose peers said that they hold a chunk of `key` that is missing here."""
        return self._wants[key].holders_of(blob)

    def lacking(self, by: float, now: float) -> list[bytes]:
        """Keys wanted by a time and not complete yet, less those that nobody is known to hold for long."""
        oldest = now - limits.ORPHAN_PATIENCE_S
        return [
            key
            for key, want in self._wants.items()
            if want.since <= by and (want.is_held or want.since > oldest)
        ]

    def chunks_lacking(self, by: float) -> int:
        """Chunks still missing of all keys wanted by a time, whoever holds them."""
        return sum(len(want.missing) for want in self._wants.values() if want.since <= by)

    @property
    def held(self) -> Mapping[bytes, Want]:
        """What somebody is known to hold some of, in the order in which it is to be fetched."""
        return self._held

    @property
    def are_held(self) -> bool:
        """Whether somebody is known to hold something of what is missing."""
        return bool(self._held)

    def is_stalled(self, key: bytes, now: float) -> bool:
        """Whether chunks of a key are missing, and none has come for as long as the slowest may take."""
        want = self._wants.get(key)
        return want is not None and max(want.since, want.got_at) <= now - limits.FETCH_TIMEOUT_S

    def since(self, key: bytes) -> float:
        """Since when chunks of a key have been missing."""
        return self._wants[key].since

    def is_sought(self, key: bytes, now: float) -> bool:
        """Whether a key has been looked for so long that others may have given up on it."""
        want = self._wants.get(key)
        return want is not None and want.since <= now - limits.ORPHAN_PATIENCE_S
