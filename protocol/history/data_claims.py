"""Which part of the data the swarm has trained on: a fold over the claims in deltas.

The data, where it is the same on all nodes, is cut into blocks of samples. In each delta its author *claims*
the blocks that it has trained on: those of which all that they taught is in its deltas by now. What is merged
is the same everywhere, so this fold over it is, too: which epoch it is, and which of its blocks are claimed.
So nobody has to assign blocks: a node draws those that nobody has claimed (`node.trainer.draws`). A crash
leaves its blocks unclaimed, and somebody else draws them.

**Epochs.** An epoch ends with the round in which all but 1 % of its blocks are claimed. The rest are mostly
under way by then: their claims still count when they come, for the epoch before. Without this margin all
nodes would draw the last few blocks at once. A node that is ahead of the fold, since its own deltas have yet
to be merged, may claim blocks of the next epoch. Claims of any other epoch count for nothing.

**Liars.** Of one claim, only so many blocks count as `outer.weight_cap` times the median of its round's
claims: as with weights, nobody counts for more than a few others do. What a liar wastes is drawn again in the
next epoch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossamer.protocol import limits
from gossamer.protocol.blocks import first_of, runs_in, size_of
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.records import Delta, DeltaBody
from gossamer.protocol.wire import blob, integer, pack, take, unpack

Bits = npt.NDArray[np.bool_]

LEFT_ONE_IN = 100
"""An epoch ends once at most one block in so many is left."""


_NUMBER_BYTES = 8
_NUMBERS_BYTES = 4 * _NUMBER_BYTES


class Tally(NamedTuple):
    """The claims of one epoch."""

    claimed: Bits
    """By block."""
    again: int
    """Claims of a block that was claimed already."""

    def plus(self, runs: Iterable[tuple[int, int]]) -> "Tally":
        """These claims too; `claimed` is changed."""
        again = self.again
        for first, stop in runs:
            again += int(self.claimed[first:stop].sum())
            self.claimed[first:stop] = True
        return Tally(self.claimed, again)


class DataClaims:
    """The state of the fold."""

    def __init__(self, blocks: int, epoch: int = 0, tallies: Sequence[Tally] = ()) -> None:
        self.epoch = epoch
        self._tallies = tuple(tallies) or tuple(Tally(np.zeros(blocks, np.bool_), 0) for _ in range(3))

    @property
    def before(self) -> Tally:
        """The epoch before this one."""
        return self._tallies[0]

    @property
    def current(self) -> Tally:
        return self._tallies[1]

    @property
    def open(self) -> tuple[Tally, Tally]:
        """This epoch and the next."""
        return self._tallies[1], self._tallies[2]

    def copy(self) -> "DataClaims":
        return DataClaims(0, self.epoch, [Tally(one.claimed.copy(), one.again) for one in self._tallies])

    def add(self, claims: Sequence[tuple[int, bytes]], weight_cap: float) -> None:
        """Take in the claims of the next round: the epoch and the packed runs of each, in any order. None is
        empty, and none is of blocks that do not exist."""
        if not claims:
            return
        found = [(epoch, runs_in(packed)) for epoch, packed in claims]
        sizes = [size_of(runs) for _, runs in found]
        most = int(weight_cap * median_low(sizes)) if weight_cap else max(sizes)
        tallies = list(self._tallies)
        for epoch, runs in found:
            place = epoch - self.epoch + 1
            if 0 <= place < len(tallies):
                tallies[place] = tallies[place].plus(first_of(runs, max(1, most)))
        while tallies[1].claimed.size - tallies[1].claimed.sum() <= tallies[1].claimed.size // LEFT_ONE_IN:
            tallies = [*tallies[1:], Tally(np.zeros_like(tallies[1].claimed), 0)]
            self.epoch += 1
        self._tallies = tuple(tallies)

    def as_of(
        self, upto: int, base: int, rounds: Mapping[int, Sequence[Delta]], weight_cap: float
    ) -> "DataClaims":
        """The state as of round `upto`, if this is that as of round `base`, from the records merged since."""
        if not self.current.claimed.size:
            return self
        found = self.copy()
        for round_ in sorted(round_ for round_ in rounds if base < round_ <= upto):
            bodies = [delta.body for delta in rounds[round_]]
            found.add([(body.epoch, body.blocks) for body in bodies if body.blocks], weight_cap)
        return found

    def pack(self) -> bytes:
        """As it goes into a snapshot: of a fixed length, and nothing if there are no blocks."""
        if not self.current.claimed.size:
            return b""
        numbers = (self.epoch, *(tally.again for tally in self._tallies))
        packed = (np.packbits(tally.claimed).tobytes() for tally in self._tallies)
        return b"".join((*(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers), *packed))

    @classmethod
    def unpack(cls, data: bytes, blocks: int) -> "DataClaims":
        """Inverse of `pack`. Raises PayloadError."""
        epoch, *again = (int.from_bytes(data[at : at + _NUMBER_BYTES]) for at in range(0, _NUMBERS_BYTES, 8))
        size = -(-blocks // 8)
        if len(data) != _NUMBERS_BYTES + 3 * size:
            raise PayloadError("a snapshot with claims of another number of blocks")
        starts = range(_NUMBERS_BYTES, len(data), size)
        tallies = [
            Tally(bits(data[at : at + size], blocks), number)
            for at, number in zip(starts, again, strict=True)
        ]
        return cls(blocks, epoch, tallies)


class Taken(NamedTuple):
    """Which blocks a node had better not draw."""

    epoch: int
    now: Bits
    """Those of the epoch: bool[blocks]."""
    next: Bits
    """Those of the next one."""
    part: int
    """Which part of the blocks is this node's own, and of how many; 0 of 0 if others do not know of it."""
    parts: int

    def pack(self) -> bytes:
        now, next_ = (np.packbits(one).tobytes() for one in (self.now, self.next))
        return pack([self.epoch, now, next_, self.part, self.parts])

    @classmethod
    def unpack(cls, data: bytes, blocks: int) -> "Taken":
        """Inverse of `pack`. Raises MalformedError."""
        count, packed = integer(0, limits.COUNTER_MAX), blob(-(-blocks // 8))
        values = take(unpack(data, limits.BLOCKS_MAX), "taken", count, packed, packed, count, count)
        epoch, now, next_, part, parts = values
        return cls(epoch, bits(now, blocks), bits(next_, blocks), part, parts)


def taken(claims: DataClaims, recent: Iterable[Delta], own_id: bytes) -> Taken:
    """What is taken as node `own_id` sees it: what is claimed, and what is under way.

    `recent` are the deltas of as many of the last rounds as a claim takes from drawing a block to here,
    oldest first. An author that has claimed so much in that time has drawn as much again, behind its last
    claims.
    """
    drawn: Counter[bytes] = Counter()
    last: dict[bytes, DeltaBody] = {}
    for delta in recent:
        drawn[delta.author] += size_of(runs_in(delta.body.blocks))
        if delta.body.blocks or delta.author not in last:
            last[delta.author] = delta.body
    now, following = (tally.claimed.copy() for tally in claims.open)
    found = {claims.epoch: now, claims.epoch + 1: following}
    for author, body in last.items():
        if author != own_id and body.epoch in found:
            for _, stop in runs_in(body.blocks):
                found[body.epoch][stop : stop + drawn[author]] = True
    authors = sorted(last)
    part, parts = (authors.index(own_id), len(authors)) if own_id in last else (0, 0)
    return Taken(claims.epoch, now, following, part, parts)


def bits(packed: bytes, blocks: int) -> Bits:
    """Inverse of `np.packbits`: bool[blocks]."""
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=blocks).view(np.bool_)
