"""Phi on one node: the fold of its records, kept up to date incrementally, and computed again from scratch.

``Phi += Merge(old set) - Merge(new set)`` whenever a round's set changes, as the daemon does it. At the end
the simulator compares this with ``Phi_0 - sum of Merge(round)``, computed from scratch. Closed rounds become
part of a base, as in the daemon; their records are kept for the checkers. Written from
`gossamer.protocol.merge.merge` alone, so that it is a second opinion on the daemon's state.
"""

from collections.abc import Callable, Sequence
from copy import copy as copy_of
from typing import NamedTuple

import numpy as np

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import average, folds
from gossamer.protocol.history.average import Sums
from gossamer.protocol.history.claims import chain, round_digest
from gossamer.protocol.history.folds import Folding, Folds
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge import merge
from gossamer.protocol.merge.merge import TokenCount
from gossamer.protocol.payloads import Fragment, Payload
from gossamer.protocol.records import Delta

Rounds = dict[int, tuple[Delta, ...]]
ReadChunk = Callable[[bytes], bytes]
ReadChunks = Callable[[Sequence[bytes]], bytes]
Decode = Callable[[Delta, bytes, Fragment, int], merge.Contribution | None]
MergeRound = Callable[[tuple[Delta, ...], Sequence[bytes], Fragment, Manifest], Ints]


def contribution(delta: Delta, data: bytes, fragment: Fragment, fragments: int) -> merge.Contribution | None:
    """A record as Merge sees it; None if its payload does not decode: no node gives that any weight."""
    try:
        payload = Payload(delta.body.codec, fragment, data)
        norms = merge.measure(payload).norms
    except PayloadError:
        return None
    return merge.Contribution(
        author=delta.author,
        tokens=delta.body.tokens,
        steps=delta.body.steps,
        staleness=delta.staleness(fragments),
        norms=norms,
        tensor=payload.section,
        turn=delta.body.turn,
    )


def merged(
    deltas: tuple[Delta, ...],
    payloads: Sequence[bytes],
    fragment: Fragment,
    manifest: Manifest,
    decode: Decode = contribution,
) -> Ints:
    """Merge one round's records, given in any order, with their payloads."""
    fragments = manifest.layout.fragments
    pairs = zip(deltas, payloads, strict=True)
    found = [c for delta, data in pairs if (c := decode(delta, data, fragment, fragments)) is not None]
    return merge.merge_round(found, fragment, manifest.outer)


class Base(NamedTuple):
    """What lies under the rounds that can still change: all of history up to `round`."""

    round: int
    chain: bytes
    tokens: int
    folds: bytes = b""


GENESIS = Base(0, bytes(32), 0)


class Fold:
    """Phi and the records in it."""

    def __init__(
        self,
        manifest: Manifest,
        phi: Ints,
        read: ReadChunks,
        merge_round: MergeRound,
        *,
        base: Base = GENESIS,
        rounds: Rounds | None = None,
        below: Rounds | None = None,
    ) -> None:
        """`phi` holds the records of `base` and `rounds`. `below`: those in `base`, which no node knows."""
        self._manifest = manifest
        self._layout = manifest.plan()
        self._read = read
        self._merge_round = merge_round
        self.phi = phi.copy()
        self.base = base
        self.rounds = dict(rounds or {})
        self.below = dict(below or {})
        self._folding = Folding(manifest)
        self._steps: dict[int, Ints] = {}
        """By round: the result of Merge, for rounds that were merged here."""
        self.key = 0
        """Exclusive or of the ids of all records merged, closed ones included: equal for equal sets."""
        for deltas in (*self.below.values(), *self.rounds.values()):
            self._toggle(deltas)

    def change(self, round_: int, new: tuple[Delta, ...]) -> bool:
        """Make `new` the records merged of a round. Returns whether Phi changed. Raises as `read` does."""
        old = self.rounds.get(round_, ())
        if new == old or round_ <= self.base.round:
            return False
        self._folding.changed(round_)
        fragment = self._layout.of_round(round_)
        before = self._steps[round_] if round_ in self._steps else self._result(old, fragment)
        after = self._result(new, fragment)
        view = self.phi[fragment.offset : fragment.offset + fragment.numel]
        if before is not None:
            view += before
        self._toggle(old)
        if after is not None:
            view -= after
            self._toggle(new)
            self.rounds[round_], self._steps[round_] = new, after
        else:
            del self.rounds[round_]
            self._steps.pop(round_, None)
        return True

    def highest(self, index: int) -> int:
        """The highest round merged into a fragment; its first base if there is none."""
        count = len(self._layout.fragments)
        floor = self.base.round - (self.base.round - index) % count
        return max((round_ for round_ in self.rounds if round_ % count == index), default=floor)

    # -- history

    def chain(self, upto: int) -> bytes:
        """Digest of all records merged up to a round."""
        digest = self.base.chain
        for round_ in sorted(round_ for round_ in self.rounds if round_ <= upto):
            digest = chain(digest, round_, round_digest(d.record_id for d in self.rounds[round_]))
        return digest

    def prefix(self, upto: int) -> "Fold":
        """A copy with the rounds above `upto` taken back."""
        copy = copy_of(self)
        copy.phi, copy.rounds, copy._steps = self.phi.copy(), dict(self.rounds), dict(self._steps)
        copy._folding = Folding(self._manifest)
        for round_ in [round_ for round_ in self.rounds if round_ > upto]:
            copy.change(round_, ())
        return copy

    def sums(self, upto: int, since: int, sealed: Rounds, before: Sums) -> Sums:
        """The sums of the averaged model as of round `upto`, up to which this is a prefix.

        `before`: those as of round `since`, in which `sealed` were merged above the base.
        """
        sums = Sums(*(one.copy() for one in before))
        for round_ in {*sealed, *self.rounds}:
            old, new = sealed.get(round_, ()), self.rounds.get(round_, ())
            if self.base.round < round_ <= since and old != new:
                fragment = self._layout.of_round(round_)
                span = slice(fragment.offset, fragment.offset + fragment.numel)
                for sign, deltas in ((1, old), (-1, new)):
                    if (step := self._result(deltas, fragment)) is not None:
                        for one, number in zip(sums, average.counts(round_, since), strict=True):
                            one[span] += np.int32(sign * number) * step
        sums = average.carried(sums, since, upto)
        for point in average.points(since, upto):
            if (is_current := average.is_current(point, upto)) is not None:
                sums[is_current][:] += self.prefix(point).phi
        return sums

    def folds(self, upto: int) -> Folds:
        """What the swarm has decided as of a round at the end of an epoch."""
        base = folds.unpack(self.base.folds, self._manifest)
        return Folding(self._manifest).as_of(upto, self.base.round, base, self.rounds)

    def epoch(self) -> int:
        """The epoch of the data, by all that is merged."""
        return self.folds(max(self.rounds, default=self.base.round)).data.epoch

    def pace(self, clock: int) -> tuple[int, int, int]:
        """The steps in a window in the round after the clock's (0 if they are counted in seconds), and how
        often members contribute; and the round after which that holds."""
        base, every = folds.unpack(self.base.folds, self._manifest), self._manifest.history.snapshot_every
        first = max(self.base.round, (clock // every - 1) * every)
        found = self._folding.windows(first, self.base.round, base, self.rounds)
        place = clock // every > first // every
        return found.lengths[place], found.turns[place], first + place * every

    def tokens(self) -> int:
        """The tokens that all deltas merged count for."""
        return self.base.tokens + count(self._manifest, self.rounds)

    def close_up_to(self, floor: int) -> None:
        """Make everything up to a round part of the base."""
        closed = {round_: self.rounds[round_] for round_ in self.rounds if round_ <= floor}
        tokens = self.base.tokens + count(self._manifest, closed)
        self.base = Base(floor, self.chain(floor), tokens, self.folds(floor).pack(self._manifest))
        for round_ in closed:
            del self.rounds[round_]
            self._steps.pop(round_, None)
        self.below = {**self.below, **closed}  # a new dict: copies share the old one

    # -- inside

    def _toggle(self, deltas: tuple[Delta, ...]) -> None:
        for delta in deltas:
            self.key ^= int.from_bytes(delta.record_id, "big")

    def _result(self, deltas: tuple[Delta, ...], fragment: Fragment) -> Ints | None:
        if not deltas:
            return None
        payloads = [self._read(delta.body.chunks) for delta in deltas]
        return self._merge_round(deltas, payloads, fragment, self._manifest)


def count(manifest: Manifest, rounds: Rounds) -> int:
    """The tokens that the deltas of some rounds count for."""
    return TokenCount(manifest, (delta for deltas in rounds.values() for delta in deltas)).total


def average_from_scratch(manifest: Manifest, phi: Ints, rounds: Rounds, read: ReadChunk, upto: int) -> Ints:
    """The averaged model as of round `upto`: a mean over Phi at points, computed from payload bytes."""
    at = phi.copy()
    sums = Sums(np.zeros_like(phi), np.zeros_like(phi))
    for round_ in range(1, upto + 1):
        at = from_scratch(manifest, at, {r: rounds[r] for r in (round_,) if r in rounds}, read)
        is_current = average.is_current(round_, upto)
        if is_current is not None and next(average.points(round_ - 1, round_), None):
            sums[is_current][:] += at
    return average.mean(at, sums, upto)


def from_scratch(manifest: Manifest, phi: Ints, rounds: Rounds, read: ReadChunk) -> Ints:
    """Phi_0 less every round's merge, computed from payload bytes without any cache."""
    layout, result = manifest.plan(), phi.copy()
    for round_, deltas in rounds.items():
        fragment = layout.of_round(round_)
        ordered = tuple(sorted(deltas, key=lambda delta: delta.author))
        payloads = [b"".join(read(blob) for blob in delta.body.chunks) for delta in ordered]
        view = result[fragment.offset : fragment.offset + fragment.numel]
        view -= merged(ordered, payloads, fragment, manifest)
    return result
