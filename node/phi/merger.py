"""Phi, kept equal to the fold of the ledger.

``Phi(S) = Phi_0 - sum over rounds of Merge(round)``. When a round's set grows or a record of it becomes
void, ``Phi += Merge(old set) - Merge(new set)``, computed from the stored payloads; sums wrap, so the order
in which rounds are caught up does not matter. Blocking: runs in worker threads.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt

from gossamer.node.phi import snapshots
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.conduct import RoundFigures, figures
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints, check_healthy
from gossamer.protocol.history import chain, round_digest
from gossamer.protocol.layout import Fragment
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge import Contribution, RoundMerge, Sample, measure
from gossamer.protocol.payload import Payload
from gossamer.protocol.records import Delta
from gossamer.protocol.rules.clipping import usual_rate

OUTLIER_TIMES = 8.0
"""A delta this many times as long as usual is looked at twice. Honest ones grow by less from round to round;
if one does not, it waits for those of others, and nothing else happens to it."""

PAYLOAD_CACHE_BYTES = 64 * 1024 * 1024
SAMPLES_KEPT = 256
"""Of the deltas read last, at most 256 KiB each: what a round with that many members needs. A delta whose
sample is gone, as one of an old round that is merged again, is not compared with the others."""


@dataclass(frozen=True, slots=True)
class Base:
    """What lies under the rounds that can still change: all of history up to `round`."""

    round: int
    chain: bytes
    """Digest of the records merged up to the round, see `protocol.history.chain`."""
    tokens: int


GENESIS = Base(0, bytes(32), 0)


@dataclass(frozen=True, slots=True)
class MergedState:
    """What a merge left behind, for those who display or hand on."""

    version: int
    merged_round: int
    """Highest round merged into the fragment; its first base if none."""
    own_round: int
    """Highest round merged into the fragment that holds a delta of ours."""


class Merger:
    """Phi of every fragment, and which records are in it."""

    def __init__(
        self,
        manifest: Manifest,
        phi: Ints,
        chunks: ChunkStore,
        own_id: bytes,
        *,
        base: Base | None = None,
        merged: Mapping[int, tuple[Delta, ...]] | None = None,
        threads: int = 1,
    ) -> None:
        """`phi`, int32[layout.numel], is taken over; it holds what `base` and `merged` say."""
        self._manifest = manifest
        self._layout = manifest.plan()
        self.phi = phi
        self._chunks = chunks
        self._own_id = own_id
        self._pool = ThreadPoolExecutor(threads, "merge") if threads > 1 else None
        self._merged = dict(merged or {})
        self.base = base or GENESIS
        self._reach = {fragment.index: self._reach_of(fragment.index) for fragment in self._layout.fragments}
        self._norms: dict[bytes, tuple[float, ...] | None] = {}
        self._samples: OrderedDict[bytes, Sample] = OrderedDict()
        self._payloads: OrderedDict[bytes, Payload] = OrderedDict()
        self._payload_bytes = 0
        self._digest: tuple[int, bytes] | None = None
        self._usual: dict[int, list[float]] = {}
        """Per fragment, what was the usual rate of each tensor (see `clipping`) when it was last merged."""
        self.version = 0
        self.tokens = self.base.tokens + _tokens(self._merged.values())
        """Tokens of all deltas merged."""
        self.figures: RoundFigures | None = None
        """What the latest call of `merge` found in the round's deltas; None if it left none merged."""

    def view(self, fragment: Fragment) -> Ints:
        """Phi of one fragment: int32[fragment.numel], not a copy."""
        return self.phi[fragment.offset : fragment.offset + fragment.numel]

    def merge(self, round_: int, new: tuple[Delta, ...]) -> MergedState:
        """Make `new` the set of records of a round that is merged: all that are valid and held here.

        Raises MissingChunkError if a payload on disk is damaged (nothing has changed then), and
        DivergedError.
        """
        fragment = self._layout.of_round(round_)
        old = self._merged.get(round_, ())
        self.figures = None
        if new != old and round_ > self.base.round:
            before, after = self._round_merge(fragment, old), self._round_merge(fragment, new)
            self._exchange(fragment, before, after)
            self._note(round_, old, new)
            check_healthy(self.view(fragment), f"fragment {fragment.index}")
        return self.state(fragment)

    def are_outliers(self, round_: int, deltas: tuple[Delta, ...]) -> bool:
        """Whether all of these deltas are far longer than was usual when their fragment was last merged.

        Raises MissingChunkError.
        """
        fragment = self._layout.of_round(round_)
        usual = self._usual.get(fragment.index)
        found = [c for delta in deltas if (c := self._contribution(delta, fragment)) is not None]
        if usual is None or not found:
            return False
        return all(
            any(n > OUTLIER_TIMES * rate * sqrt(c.steps) for n, rate in zip(c.norms, usual, strict=True))
            for c in found
        )

    def state(self, fragment: Fragment) -> MergedState:
        """How far a fragment has been merged."""
        return MergedState(self.version, *self._reach[fragment.index])

    @property
    def newest_round(self) -> int:
        """The highest round that is merged into any fragment."""
        return max(merged for merged, _ in self._reach.values())

    def digest(self) -> bytes:
        """The replica's digest: the root of Phi's snapshot bytes."""
        if self._digest is None or self._digest[0] != self.version:
            self._digest = (self.version, snapshots.digest(self.phi))
        return self._digest[1]

    def copy(self) -> "Merger":
        """A replica of the same state, for another thread; it shares what is known of payloads."""
        copy = Merger(
            self._manifest, self.phi.copy(), self._chunks, self._own_id, base=self.base, merged=self._merged
        )
        copy._norms = self._norms
        return copy

    def take_back(self, above: int) -> None:
        """Unmerge all rounds above one: what remains is Phi of that prefix. Raises MissingChunkError."""
        for round_ in sorted(r for r in self._merged if r > above):
            self.merge(round_, ())

    def chain(self, upto: int | None = None) -> bytes:
        """Digest of all records merged up to a round: equal digests promise equal Phi."""
        digest = self.base.chain
        for round_ in sorted(self._merged):
            if upto is None or round_ <= upto:
                digest = chain(digest, round_, round_digest(d.record_id for d in self._merged[round_]))
        return digest

    def merged_ids(self) -> list[bytes]:
        """Record ids of everything merged above the base."""
        return [delta.record_id for deltas in self._merged.values() for delta in deltas]

    def close_up_to(self, floor: int) -> None:
        """Make everything up to round `floor` part of the base: it cannot change any more."""
        closed = {r: self._merged[r] for r in self._merged if r <= floor}
        self.base = Base(floor, self.chain(floor), self.base.tokens + _tokens(closed.values()))
        for round_, deltas in closed.items():
            del self._merged[round_]
            for delta in deltas:
                self._norms.pop(delta.record_id, None)
                self._samples.pop(delta.record_id, None)
                payload = self._payloads.pop(delta.record_id, None)
                self._payload_bytes -= payload.size if payload is not None else 0

    def _note(self, round_: int, old: tuple[Delta, ...], new: tuple[Delta, ...]) -> None:
        self.tokens += _tokens([new]) - _tokens([old])
        if new:
            self._merged[round_] = new
        else:
            self._merged.pop(round_, None)
        index = round_ % len(self._layout.fragments)
        if len(new) > len(old):
            merged, own = self._reach[index]
            is_own = any(delta.author == self._own_id for delta in new)
            self._reach[index] = max(merged, round_), max(own, round_) if is_own else own
        else:
            self._reach[index] = self._reach_of(index)
        self.version += 1

    def _reach_of(self, index: int) -> tuple[int, int]:
        """The highest round merged into a fragment, and the highest with a delta of ours.

        What the base holds counts as both: nothing of ours below it is still to come.
        """
        count = len(self._layout.fragments)
        floor = self.base.round - (self.base.round - index) % count
        rounds = [round_ for round_ in self._merged if round_ % count == index]
        own = [r for r in rounds if any(delta.author == self._own_id for delta in self._merged[r])]
        return max(rounds, default=floor), max(own, default=max(0, floor))

    def _exchange(self, fragment: Fragment, before: RoundMerge | None, after: RoundMerge | None) -> None:
        """``Phi += before - after``, tensor by tensor.

        What was merged before is merged again to be taken back: it would cost as much memory as Phi to
        remember it, and mostly it is our own delta alone.
        """
        phi = self.view(fragment)

        def one(index: int) -> None:
            tensor = phi[fragment.slots[index].span]
            if before is not None:
                before.subtract(index, tensor, back=True)
            if after is not None:
                after.subtract(index, tensor)

        for _ in (self._pool.map if self._pool else map)(one, range(len(fragment.slots))):
            pass

    def _round_merge(self, fragment: Fragment, deltas: tuple[Delta, ...]) -> RoundMerge | None:
        """The merge of a round's deltas, ready to be carried out; None if there are none."""
        self.figures = None
        if not deltas:
            return None
        read = {delta.author: self._contribution(delta, fragment) for delta in deltas}
        contributions = [c for c in read.values() if c is not None]
        merge = RoundMerge(contributions, fragment, self._manifest.outer)
        self._note_usual(fragment, contributions)
        self.figures = figures(merge, void=[author for author, c in read.items() if c is None])
        return merge

    def _note_usual(self, fragment: Fragment, contributions: list[Contribution]) -> None:
        """Remember what was usual in a round; a single delta is taken for that only if it is our own."""
        root_steps = [sqrt(c.steps) for c in contributions]
        by_tensor = zip(*(c.norms for c in contributions), strict=True)
        if len(contributions) > 1:
            self._usual[fragment.index] = [usual_rate(norms, root_steps) for norms in by_tensor]
        elif contributions and contributions[0].author == self._own_id:
            self._usual[fragment.index] = [norm / root_steps[0] for (norm,) in by_tensor]

    def _contribution(self, delta: Delta, fragment: Fragment) -> Contribution | None:
        """A record as Merge sees it; None if its payload does not decode, which weighs nothing anywhere."""
        try:
            payload = self._payload(delta, fragment)
            if delta.record_id not in self._norms:
                self._measure(delta, payload)
        except PayloadError:
            self._norms[delta.record_id] = None
        norms = self._norms[delta.record_id]
        if norms is None:
            return None
        return Contribution(
            author=delta.author,
            tokens=delta.body.tokens,
            steps=delta.body.steps,
            staleness=delta.staleness(len(self._layout.fragments)),
            norms=norms,
            tensor=payload.section,
            sample=self._samples.get(delta.record_id),
        )

    def _measure(self, delta: Delta, payload: Payload) -> None:
        """Decode a payload for the first time. Raises PayloadError."""
        self._norms[delta.record_id], self._samples[delta.record_id] = measure(payload)
        while len(self._samples) > SAMPLES_KEPT:
            self._samples.popitem(last=False)

    def _payload(self, delta: Delta, fragment: Fragment) -> Payload:
        """Read a payload, keeping the latest ones in memory."""
        known = self._payloads.get(delta.record_id)
        if known is not None:
            self._payloads.move_to_end(delta.record_id)
            return known
        data = self._chunks.join(delta.body.chunks)
        payload = Payload(delta.body.codec, fragment, data)
        self._payloads[delta.record_id] = payload
        self._payload_bytes += payload.size
        while self._payload_bytes > PAYLOAD_CACHE_BYTES and len(self._payloads) > 1:
            self._payload_bytes -= self._payloads.popitem(last=False)[1].size
        return payload

    def close(self) -> None:
        """Stop the worker threads."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


def _tokens(rounds: Iterable[tuple[Delta, ...]]) -> int:
    return sum(delta.body.tokens for deltas in rounds for delta in deltas)
