"""The ledger: a node's copy of S, the grow-only set of delta records.

Two different records by one author for one round prove equivocation: both are void, on every node and for
ever. The proof is the two records themselves; a third adds nothing and is not kept. Digests therefore
cover what the set *means* (a record, or "void"), so that nodes holding different pairs of proof agree.

Two ledgers are compared in a few messages, however long they are, by digests of ranges of rounds. These form
a tree (a Merkle tree) with 16 children to a node: a leaf is the digest of one round, a parent the hash of its
children, an empty range 32 zero bytes. Where digests differ, one descends.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Set
from enum import Enum, auto
from hashlib import sha256

from gossamer.protocol import limits
from gossamer.protocol.records import NO_RECORD, Delta

EMPTY = bytes(32)


def can_be(level: int, index: int) -> bool:
    """Whether a range has any valid round numbers in it."""
    return index << (limits.RANGE_FANOUT_BITS * level) <= limits.ROUND_MAX


class RangeDigests:
    """A digest for every range ``[index * 16**level, (index + 1) * 16**level)`` of rounds.

    Parents are computed when asked for, and forgotten when something below them changes.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, bytes] = {}
        self._rounds: list[int] = []
        """Rounds that are not empty, ascending: so a gap of millions of rounds costs nothing to hash."""
        self._parents: dict[tuple[int, int], bytes] = {}

    def update(self, round_: int, digest: bytes) -> None:
        """Set the digest of one round; EMPTY if nothing is left in it."""
        if round_ in self._leaves:
            del self._leaves[round_], self._rounds[bisect_left(self._rounds, round_)]
        if digest != EMPTY:
            self._leaves[round_] = digest
            insort(self._rounds, round_)
        for level in range(1, limits.RANGE_LEVEL_MAX + 2):
            self._parents.pop((level, round_ >> (limits.RANGE_FANOUT_BITS * level)), None)

    def digest(self, level: int, index: int, floor: int = -1) -> bytes:
        """Digest of one range as if the set had nothing up to round `floor`; EMPTY if nothing is left."""
        bits = limits.RANGE_FANOUT_BITS * level
        first, end = index << bits, (index + 1) << bits
        found = bisect_left(self._rounds, max(first, floor + 1))
        if found == len(self._rounds) or self._rounds[found] >= end:
            return EMPTY
        if level == 0:
            return self._leaves[index]
        if first > floor and (level, index) in self._parents:
            return self._parents[level, index]
        digest = sha256(b"".join(digest for _, digest in self.children(level, index, floor))).digest()
        if first > floor:
            self._parents[level, index] = digest
        return digest

    def children(self, level: int, index: int, floor: int = -1) -> list[tuple[int, bytes]]:
        """The ranges one level down, with their digests above `floor`, empty ones included."""
        first = index << limits.RANGE_FANOUT_BITS
        children = range(first, first + limits.RANGE_FANOUT)
        return [(child, self.digest(level - 1, child, floor)) for child in children]

    @property
    def top(self) -> int:
        """The lowest level on which 16 ranges hold everything."""
        highest = self._rounds[-1] if self._rounds else 0
        return max(0, (highest.bit_length() - 1) // limits.RANGE_FANOUT_BITS)

    def summary(self, floor: int = -1) -> list[tuple[int, bytes]]:
        """All ranges of the top level, above `floor`."""
        return self.children(self.top + 1, 0, floor)

    @property
    def root(self) -> bytes:
        """One digest for the whole set."""
        return self.digest(self.top + 1, 0)


class Added(Enum):
    """What adding a record did."""

    NEW = auto()
    VOIDED = auto()
    """The delta is the second of its author and round: both are void from now on."""
    IGNORED = auto()
    """Held already, or a further delta by an author who is void in this round already."""
    CLOSED = auto()
    """The delta's round is closed."""


class Ledger:
    """Delta records by round and author."""

    def __init__(self, is_member: Callable[[bytes], bool] = lambda author: False) -> None:
        """`is_member` tells whether an author is a member: members' last rounds are always remembered."""
        self._is_member = is_member
        self._digests = RangeDigests()
        self._undigested: set[int] = set()
        """Rounds that changed since they were last digested: a digest costs time in proportion to the records
        of its round."""
        self._rounds: dict[int, dict[bytes, tuple[Delta, ...]]] = {}
        self._voids: dict[bytes, set[int]] = {}
        """The rounds in which each author equivocated. Displays ask for them all the time, and without
        `retain` there may be a hundred thousand rounds."""
        self._by_id: dict[bytes, Delta] = {}
        self._by_data: dict[bytes, bytes] = {}
        self.last_rounds: dict[bytes, int] = {}
        """The highest round, closed or not, with a record of each author: of members, and some others."""
        self._lasts: list[int] = []
        """The values of `last_rounds`, ascending: the clock may be read off them with every record, and where
        keys are free there may be thousands."""
        self._authors_max = limits.AUTHORS_KEPT
        self._last_records: dict[bytes, bytes] = {}
        """Each author's record id in its highest round."""
        self.floor = 0
        """Rounds up to this one are closed: their records are gone, and no more are taken."""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def digests(self) -> RangeDigests:
        """Digests of all rounds, up to date."""
        for round_ in self._undigested:
            self._digests.update(round_, self._digest_of(round_))
        self._undigested.clear()
        return self._digests

    def __contains__(self, record_id: bytes) -> bool:
        return record_id in self._by_id

    def add(self, delta: Delta) -> Added:
        """Unite one verified record with the set."""
        if delta.round <= self.floor:
            return Added.CLOSED
        authors = self._rounds.setdefault(delta.round, {})
        held = authors.get(delta.author, ())
        if len(held) > 1 or delta.record_id in self._by_id:
            return Added.IGNORED
        authors[delta.author] = (*held, delta)
        if held:
            self._voids.setdefault(delta.author, set()).add(delta.round)
        self._by_id[delta.record_id] = delta
        self._by_data[delta.data] = delta.record_id
        self.note_last(delta.author, delta.round, delta.record_id)
        self._undigested.add(delta.round)
        return Added.VOIDED if held else Added.NEW

    def note_last(self, author: bytes, round_: int, record_id: bytes) -> None:
        """Remember an author's latest delta, even after its round has closed."""
        before = self.last_round(author)
        if round_ > before:
            if before:
                del self._lasts[bisect_left(self._lasts, before)]
            insort(self._lasts, round_)
            self.last_rounds[author] = round_
            self._last_records[author] = record_id
            if len(self.last_rounds) > self._authors_max:
                self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        """Forget authors that are not members and whose rounds are closed: in an open swarm anybody can make
        up any number of them. Done each time their number has doubled, since it looks at every author."""
        for author, round_ in list(self.last_rounds.items()):
            if round_ <= self.floor and not self._is_member(author):
                del self.last_rounds[author], self._last_records[author]
        self._lasts = sorted(self.last_rounds.values())
        self._authors_max = max(limits.AUTHORS_KEPT, 2 * len(self.last_rounds))

    def close(self, floor: int) -> list[Delta]:
        """Drop all rounds up to `floor`, for good in this history; returns the records dropped."""
        dropped = self._take_out([round_ for round_ in self._rounds if round_ <= floor])
        self.floor = max(self.floor, floor)
        if len(self.last_rounds) > limits.AUTHORS_KEPT:
            self._forget_the_gone()
        return dropped

    def reopen(self, floor: int) -> None:
        """Accept records of rounds after `floor` again: they are open in the history that we start from."""
        self.floor = min(self.floor, floor)

    def drop_beyond(self, round_: int) -> list[Delta]:
        """Take out all records of later rounds; returns them. How far their authors got is not forgotten."""
        return self._take_out([later for later in self._rounds if later > round_])

    def drop(self, author: bytes, after: int) -> list[Delta]:
        """Take out an author's records of rounds past `after`, as if they had never come; returns them."""
        later = [r for r, authors in self._rounds.items() if r > after and author in authors]
        dropped = self._take_out(later, only=author)
        if self.last_round(author) > max(after, self.floor):
            del self._lasts[bisect_left(self._lasts, self.last_rounds.pop(author))]
            del self._last_records[author]
            for delta in self.by(author):
                self.note_last(author, delta.round, delta.record_id)
        return dropped

    def _take_out(self, rounds: Iterable[int], only: bytes | None = None) -> list[Delta]:
        """Take out the records of these rounds, perhaps of one author only; returns them."""
        dropped: list[Delta] = []
        for round_ in rounds:
            authors = self._rounds[round_]
            for author in list(authors) if only is None else [only]:
                dropped.extend(authors.pop(author))
                voids = self._voids.get(author, set())
                voids.discard(round_)
                if not voids:
                    self._voids.pop(author, None)
            self._undigested.add(round_)
            if not authors:
                del self._rounds[round_]
        for delta in dropped:
            del self._by_id[delta.record_id]
            del self._by_data[delta.data]
        return dropped

    def get(self, record_id: bytes) -> Delta | None:
        return self._by_id.get(record_id)

    def id_of(self, data: bytes) -> bytes | None:
        """Id of the record whose envelope is exactly these bytes, None if it is not here."""
        return self._by_data.get(data)

    def valid(self, round_: int) -> list[Delta]:
        """The round's records that count, in order of author."""
        authors = self._rounds.get(round_, {})
        return [authors[author][0] for author in sorted(authors) if len(authors[author]) == 1]

    def by(self, author: bytes) -> Iterator[Delta]:
        """An author's records, void ones included."""
        for authors in self._rounds.values():
            yield from authors.get(author, ())

    def is_void(self, delta: Delta) -> bool:
        """Whether a delta's author equivocated in its round."""
        return delta.round in self.void_rounds(delta.author)

    def ids(self, round_: int) -> list[bytes]:
        """All record ids of a round, void ones included: what another node needs to agree with us."""
        return sorted(d.record_id for held in self._rounds.get(round_, {}).values() for d in held)

    def voided(self) -> Iterator[tuple[bytes, int]]:
        """Author and round of every equivocation."""
        return ((author, round_) for author, rounds in self._voids.items() for round_ in rounds)

    def void_rounds(self, author: bytes) -> Set[int]:
        """The rounds in which an author equivocated."""
        return self._voids.get(author, frozenset())

    def void_in(self, round_: int) -> list[bytes]:
        """Authors who equivocated in a round."""
        return [author for author, held in self._rounds.get(round_, {}).items() if len(held) > 1]

    def last_round(self, author: bytes) -> int:
        """The highest round an author has a record in; 0 if none."""
        return self.last_rounds.get(author, 0)

    def reached(self, but: bytes = b"") -> int:
        """The round that the authors of open rounds have reached, even if gone by now, leaving out `but`, and
        of the others the top third, as `pace.round_clock` does."""
        last = self._lasts[bisect_right(self._lasts, self.floor) :]
        left_out = self.last_round(but)
        if left_out > self.floor:
            del last[bisect_left(last, left_out)]
        return max([self.floor, *last[: len(last) - len(last) // 3][-1:]])

    @property
    def horizon(self) -> int:
        """The newest round that authors can have reached: honest ones open none past their clock plus one."""
        return 1 + self.reached()

    def last_record(self, author: bytes) -> bytes:
        """Record id of an author's latest delta, or NO_RECORD."""
        return self._last_records.get(author, NO_RECORD)

    def rounds(self) -> list[int]:
        """All rounds that have records, ascending."""
        return sorted(self._rounds)

    def __iter__(self) -> Iterator[Delta]:
        return iter(self._by_id.values())

    def _digest_of(self, round_: int) -> bytes:
        authors = self._rounds.get(round_, {})
        parts = [
            authors[author][0].record_id if len(authors[author]) == 1 else sha256(b"void" + author).digest()
            for author in sorted(authors)
        ]
        return sha256(b"".join(parts)).digest() if parts else EMPTY
