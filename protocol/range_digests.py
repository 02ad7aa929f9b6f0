"""Digests of a set by ranges of rounds: two sets are compared in a few messages, however long they are.

The digests form a tree (a Merkle tree) over round numbers, with 16 children to a node: a leaf is the digest
of one round, a parent the hash of its children, an empty range 32 zero bytes. Equal digests mean equal
content; where digests differ, one descends. Parents are computed when asked for, and forgotten when something
below them changes.
"""

from hashlib import sha256

from gossamer.protocol.limits import RANGE_FANOUT_BITS, ROUND_MAX

EMPTY = bytes(32)
FANOUT = 1 << RANGE_FANOUT_BITS
LEVEL_MAX = -(-ROUND_MAX.bit_length() // RANGE_FANOUT_BITS) - 1


def can_be(level: int, index: int) -> bool:
    """Whether a range has any valid round numbers in it."""
    return index << (RANGE_FANOUT_BITS * level) <= ROUND_MAX


class RangeDigests:
    """A digest for every range ``[index * 16**level, (index + 1) * 16**level)`` of rounds."""

    def __init__(self) -> None:
        self._levels: list[dict[int, bytes]] = [{} for _ in range(LEVEL_MAX + 2)]
        # How many rounds of each range are not empty: so a gap of millions of rounds costs nothing to hash.
        self._counts: list[dict[int, int]] = [{} for _ in range(LEVEL_MAX + 2)]
        self._highest = 0

    def update(self, round_: int, digest: bytes) -> None:
        """Set the digest of one round; EMPTY if nothing is left in it."""
        leaves = self._levels[0]
        change = (digest != EMPTY) - (round_ in leaves)
        if digest == EMPTY:
            leaves.pop(round_, None)
            if round_ == self._highest:
                self._highest = max(leaves, default=0)
        else:
            leaves[round_] = digest
            self._highest = max(self._highest, round_)
        index = round_
        for level, counts in zip(self._levels[1:], self._counts[1:], strict=True):
            index >>= RANGE_FANOUT_BITS
            level.pop(index, None)
            counts[index] = counts.get(index, 0) + change
            if not counts[index]:
                del counts[index]

    def digest(self, level: int, index: int) -> bytes:
        """Digest of one range; EMPTY if the set has nothing there."""
        known = self._levels[level].get(index)
        if known is not None or level == 0:
            return known or EMPTY
        if index not in self._counts[level]:
            return EMPTY
        combined = sha256(b"".join(digest for _, digest in self.children(level, index))).digest()
        self._levels[level][index] = combined
        return combined

    def digest_above(self, level: int, index: int, floor: int) -> bytes:
        """Digest of one range as if the set had nothing up to round `floor`."""
        first = index << (RANGE_FANOUT_BITS * level)
        if first > floor:
            return self.digest(level, index)
        if (index + 1) << (RANGE_FANOUT_BITS * level) <= floor + 1:
            return EMPTY
        return _combine(self.children(level, index, floor))

    def children(self, level: int, index: int, floor: int = -1) -> list[tuple[int, bytes]]:
        """The ranges one level down, with their digests above `floor`, empty ones included."""
        first = index << RANGE_FANOUT_BITS
        return [(child, self.digest_above(level - 1, child, floor)) for child in range(first, first + FANOUT)]

    @property
    def top(self) -> int:
        """The lowest level on which 16 ranges hold everything."""
        return max(0, (self._highest.bit_length() - 1) // RANGE_FANOUT_BITS)

    def summary(self, floor: int = -1) -> list[tuple[int, bytes]]:
        """All ranges of the top level, above `floor`."""
        return self.children(self.top + 1, 0, floor)

    @property
    def root(self) -> bytes:
        """One digest for the whole set."""
        return self.digest(self.top + 1, 0)


def _combine(children: list[tuple[int, bytes]]) -> bytes:
    if all(digest == EMPTY for _, digest in children):
        return EMPTY
    return sha256(b"".join(digest for _, digest in children)).digest()
