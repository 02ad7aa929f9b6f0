"""Which samples a node draws where the data is the same on all nodes: those that nobody has claimed.

`protocol.history.data_claims` says which blocks are taken. From the others, each node draws for itself:

* It *walks*: it draws the block after its last one, until that is taken. So what it claims are a few runs of
  blocks, which take a few bytes, and others see where it will be next.
* It begins in a part of the blocks that is its own, in the longest gap there: the authors whose deltas come
  divide the blocks by their ids, and so do the ranks of one trainer. Nobody has to agree on that. Where nodes
  see other authors, or one is done with its part and goes on elsewhere, two may draw the same block.
* A block holds random samples: blocks are cut from a random order of all samples, the same on all nodes and
  another one in each epoch.

A block is *trained on* when a step has been done on its last sample. A `DataLoader` draws ahead of that. How
far is seen from the first two steps of a pass over it: before the first, it draws more than before the
second. What is drawn and not trained on when the next pass begins is drawn again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import islice
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gossamer.protocol.blocks import pack_blocks
from gossamer.protocol.history.data_claims import Bits, Taken
from gossamer.protocol.manifest import DataSection

T = TypeVar("T")

Block = tuple[int, int]
"""An epoch, and a block of it."""

Trained = tuple[int, Block]
"""The inner step that was done on its last sample, and the block."""

ROUNDS = 4
"""Of the Feistel network: by Luby and Rackoff, four make a permutation that passes for random."""

PAGE = 4096
"""So much of the order is found at a time."""


class Order:
    """A random order of all samples, the same wherever `seed` and `epoch` are.

    A Feistel network: any part of the order is known without the rest, in any version of NumPy.
    """

    def __init__(self, samples: int, seed: bytes, epoch: int) -> None:
        self._samples = samples
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)
        keys = (
            sha256(seed + bytes((number,)) + epoch.to_bytes(8, "big")).digest() for number in range(ROUNDS)
        )
        self._keys = [np.uint64(int.from_bytes(key[:8], "big")) for key in keys]

    def part(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at these places of the order: int64[stop - first]."""
        found = self._permuted(np.arange(first, stop, dtype=np.uint64))
        while (outside := found >= self._samples).any():  # walks along the cycle, until it is inside again
            found[outside] = self._permuted(found[outside])
        return found.astype(np.int64)

    def _permuted(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """A permutation of the numbers of `2 * half` bits."""
        bits, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right


class Walk:
    """Draws blocks. Of several ranks in one trainer, each has its own."""

    def __init__(self, blocks: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._blocks = blocks
        self._rank, self._ranks = rank, ranks
        self._random = np.random.default_rng((seed, rank))
        self._drawn: dict[int, Bits] = {}
        """By epoch, this one and the next: what has been drawn here."""
        self._last: Block = (-1, 0)
        self.learn(Taken(0, np.zeros(blocks, np.bool_), np.zeros(blocks, np.bool_), 0, 0))

    def learn(self, taken: Taken) -> None:
        """What others have taken is this now."""
        self._taken = taken
        first = taken.part * self._ranks + self._rank
        parts = max(1, taken.parts) * self._ranks
        self._own = slice(self._blocks * first // parts, self._blocks * (first + 1) // parts)
        epochs = taken.epoch, taken.epoch + 1
        self._drawn = {epoch: drawn for epoch, drawn in self._drawn.items() if epoch in epochs}

    def draw(self) -> Block:
        """A block of this epoch that nobody has taken; if there is none, one of the next epoch."""
        own = self._own
        for epoch, taken in enumerate((self._taken.now, self._taken.next), self._taken.epoch):
            drawn = self._drawn.setdefault(epoch, np.zeros_like(taken))
            block = self._last[1] + 1
            goes_on = self._last[0] == epoch and block < drawn.size and not (drawn[block] or taken[block])
            if not (goes_on and own.start <= block < own.stop):
                places = own.start + np.flatnonzero(~(drawn[own] | taken[own]))
                if places.size:
                    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
                    longest = max(runs, key=len)
                    block = int(longest[0 if self._taken.parts else self._random.integers(longest.size)])
                elif not goes_on:
                    places = np.flatnonzero(~(drawn | taken))
                    if not places.size:
                        continue
                    block = int(places[self._random.integers(places.size)])
            break
        else:  # both are drawn faster than they are merged, or what was drawn has been lost
            self._drawn.clear()
            drawn = self._drawn.setdefault(epoch, np.zeros(self._blocks, np.bool_))
            block = int(self._random.integers(self._blocks))
        drawn[block] = True
        self._last = epoch, block
        return self._last

    def put_back(self, block: Block) -> None:
        """It may be drawn again: what it taught has not been published."""
        if block[0] in self._drawn:
            self._drawn[block[0]][block[1]] = False


class Draws:
    """The samples that one rank draws, and the blocks that it has trained on."""

    def __init__(self, data: DataSection, swarm_id: bytes, walk: Walk) -> None:
        self.walk = walk
        self.taken = b""
        """What was learnt last, packed."""
        self.trained: list[Trained] = []
        """What has been trained on, and not been claimed yet."""
        self._data = data
        self._swarm_id = swarm_id
        self._page: tuple[int, int, list[int]] = (0, -1, [])
        """Of the order of which epoch, which page it is, and its samples."""
        self._samples = self._draw()
        self._open: deque[tuple[Block, float]] = deque()
        """The blocks that are not trained on yet; each with the number of items drawn up to its end, inf if
        that is still to be drawn."""
        self._drawn = self._begun = self._trained = 0
        """Items drawn so far, before this pass, and those of them that steps have been done on."""
        self._steps = self._first = self._ahead = 0
        """Steps of this pass, items drawn before the first of them, and how many the loader is ahead by."""
        self._has_ended = False
        """Whether this pass has drawn all that it was to draw."""

    def items(self, read: Callable[[int], Iterable[T]], limit: int | None = None) -> Iterator[T]:
        """One pass: what `read` makes of each sample drawn; without a `limit` in samples, endless."""
        if self._has_ended:
            self._trained = self._drawn  # the loader ends once the loop has got everything
        else:
            for block, _ in self._open:
                self.walk.put_back(block)
            self._open.clear()
            self._samples = self._draw()
        self._begun, self._steps, self._has_ended = self._drawn, 0, False
        for sample in islice(self._samples, limit):
            for item in read(sample):
                self._drawn += 1
                yield item
        self._has_ended = True

    def learn(self, taken: bytes) -> None:
        """This is taken now: a packed `Taken`."""
        self.taken = taken
        self.walk.learn(Taken.unpack(taken, self._data.blocks))

    @property
    def samples(self) -> int:
        """How many the data has."""
        return self._data.samples

    def stepped(self, step: int) -> None:
        """The node's inner step of this number is done, on what was drawn for it here."""
        self._steps += 1
        drawn = self._drawn - self._begun
        if self._steps == 1:
            self._first = drawn
        elif self._steps == 2:
            self._ahead = max(0, 2 * self._first - drawn)
        if self._steps > 1:
            self._trained = max(self._trained, self._drawn - self._ahead)
        while self._open and self._open[0][1] <= self._trained:
            self.trained.append((step, self._open.popleft()[0]))

    def claim(self, published: int) -> tuple[int, bytes]:
        """The epoch and the blocks to claim in a delta, once all that was learnt up to step `published` is in
        this one and those before it."""
        ready = [block for step, block in self.trained if step <= published]
        epoch = min((epoch for epoch, _ in ready), default=0)
        claim, left = pack_blocks(number for one, number in ready if one == epoch)
        is_claimed = {(epoch, number) for one, number in ready if one == epoch}.difference(
            (epoch, number) for number in left
        )
        self.trained = [each for each in self.trained if each[1] not in is_claimed]
        return epoch, claim

    def dropped(self) -> None:
        """What has been learnt and not published is lost."""
        for _, block in self.trained:
            self.walk.put_back(block)
        self.trained.clear()

    def _draw(self) -> Iterator[int]:
        while True:
            block = epoch, number = self.walk.draw()
            self._open.append((block, inf))
            samples, blocks = self._data.samples, self._data.blocks
            for place in range(samples * number // blocks, samples * (number + 1) // blocks):
                yield self._sample(epoch, place)
            self._open[-1] = block, self._drawn

    def _sample(self, epoch: int, place: int) -> int:
        number, at = divmod(place, PAGE)
        if self._page[:2] != (epoch, number):
            order = Order(self._data.samples, self._swarm_id, epoch)
            first = number * PAGE
            self._page = epoch, number, order.part(first, min(first + PAGE, self._data.samples)).tolist()
        return self._page[2][at]
