"""Phi, the model, as a function of signed records.

Theory of operation
-------------------

Every replica of the model is the same function of a set of deltas. Nobody sends a model around to be
believed, and no order of arrival, restart or partition can make two replicas differ that hold the same
records::

    Phi(S)  =  Phi_0  -  sum over rounds r of  Merge(S_r)

**Rounds.** A round is a number. Round r concerns one fragment of the parameters, fragment r mod F, and a
member signs at most one delta for it. ``S_r``, the *set of a round*, is what the ledger calls valid of it
(who signed two has none, nor has who was revoked), as far as the payloads are here in full.

**Merge.** ``Merge(S_r)`` (`protocol.merge`) is a pure function of a *set*: it sorts by author, weighs, clips
and combines in a fixed order of IEEE operations, and rounds once, to int32 fixed point. The same set gives
the same bits on every machine. A record whose payload does not decode weighs nothing, on all machines alike.

**The fold.** Phi is int32, and sums wrap. Addition modulo 2**32 commutes, associates, and has inverses. So
the order in which rounds are merged cannot matter, no error accumulates, and whatever was merged can be taken
back to the last bit. That leaves a single operation, for whatever may happen to a round::

    Phi  +=  Merge(old set) - Merge(new set)

A record came late; a partition healed, and half a swarm's records came at once; a member equivocated or was
revoked, and its records became void: each time the round's set changed, and its merge is exchanged for
another. The state is a fixed point: to exchange a set for itself changes nothing, and once every round's
merged set is its valid set, Phi is what the formula says. When that is done is a matter of timing
(`phi.loop`), not of result.

To take the old set back, it is merged again from the payloads on disk. Of small models, the steps that the
last rounds took are remembered instead: to remember those of a large one would cost as much memory as Phi.

**Closed history.** Records cannot be kept for ever. Once the members agree on a snapshot of everything up to
a round, rounds far below it are *closed*: they become the `Base`, a few numbers, and their records and
payloads go. Nothing can change them any more. So the state is Phi's values, the base, and the sets merged
above the base.

**As of a round.** Fragments share no rounds. To get Phi as of round R, each fragment is copied at any time,
and the merges of its later rounds are taken back from the copy (`PhiState.prefix`). So a snapshot is written
while merging goes on, a fragment at a time.

**The average.** The averaged model is a mean of Phi at certain rounds, its *points*: a function of the same
sets. It is kept as sums of Phi that lie on disk beside a snapshot (`protocol.history.average`), and carried
from one snapshot to the next (`PhiState.sums`): what came late is added as often as the sums have points
after it, and Phi at each new point is found as Phi of a prefix is. No memory is held for it in between.

**Equality.** `PhiState.chain` is a digest of the sets merged, round by round; `PhiState.digest` the root of
Phi's bytes. Equal chains promise equal roots. `gossamer verify` asks nodes for both; a claim in a member's
record names both.

**Faults.** A payload that turns out damaged raises MissingChunkError, and nothing has changed then. A
fragment in which a magnitude has reached 64 has *diverged*: it is merged on, since it may be sound again once
a delta is void, but it is not offered to the trainer.

All of this blocks, and runs in worker threads, one call at a time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import GENESIS, Base, Rounds
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.fixedpoint import Ints, is_healthy
from gossamer.protocol.history import average, folds
from gossamer.protocol.history.average import Sums
from gossamer.protocol.history.claims import total
from gossamer.protocol.history.folds import Folding
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.contributions import RoundFigures, figures, greedy_in
from gossamer.protocol.merge.merge import (
    Contribution,
    Measures,
    RoundMerge,
    TokenCount,
    UsualRates,
    measure,
    of_ordinary_tokens,
)
from gossamer.protocol.pace import Windows
from gossamer.protocol.payloads import (
    Fragment,
    Payload,
    Section,
    payload_chunk_bytes,
    section_starts,
)
from gossamer.protocol.records import Delta

STEPS_BYTES = 32 * 1024 * 1024
"""Size of the steps of merged rounds that are remembered, so as to take them back without their payloads."""

STEPS_KEPT = 64
"""The most rounds whose steps are remembered. Older ones seldom change, and are merged again then."""


class Snapshot(NamedTuple):
    """The newest snapshot of a state: the last that was written of it, or the one that it began with."""

    round: int
    rounds: Rounds
    """The sets merged in it above the base."""
    sums: tuple[bytes, ...]
    """The roots of its sums; none of genesis."""


GENESIS_SNAPSHOT = Snapshot(0, {}, ())


class PhiState:
    """Phi of every fragment, and which records are in it."""

    def __init__(
        self,
        manifest: Manifest,
        phi: Ints,
        chunks: ChunkStore,
        own_id: bytes,
        *,
        base: Base | None = None,
        merged: Rounds | None = None,
        sealed: Snapshot = GENESIS_SNAPSHOT,
    ) -> None:
        """`phi`, int32[layout.numel], is taken over; it holds the records of `base` and `merged`. It is the
        snapshot `sealed`."""
        self._manifest = manifest
        self._layout = manifest.plan()
        self.phi = phi
        self._own_id = own_id
        self._merged = dict(merged or {})
        self.base = base or GENESIS
        self._folding = Folding(manifest)
        self._chunks = chunks
        self._sealed = sealed
        self._steps: OrderedDict[int, Ints] = OrderedDict()
        """By round: what it has taken from its fragment of Phi, as far as that is remembered."""
        self._reach = {fragment.index: self._reach_of(fragment.index) for fragment in self._layout.fragments}
        self._payloads = Payloads(manifest, chunks)
        self._usual = UsualRates(own_id)
        self.windows = self._next_windows()
        """How long windows are, by the records merged. A new object each time: it is read meanwhile."""
        self.version = 0
        self.diverged = frozenset(f.index for f in self._layout.fragments if not is_healthy(self.view(f)))
        """Fragments in which a magnitude has reached 64. They are merged like others: they may be sound again
        once some of their deltas are void. A new set each time, since it is read while rounds are merged."""
        self._count = TokenCount(manifest, (delta for deltas in self._merged.values() for delta in deltas))
        """Counts the tokens of the deltas merged above the base."""
        self.tokens = total((self.base.tokens, self._count.total))
        """The tokens that all deltas merged count for, as claims state them; see `Base.tokens`. They are read
        while rounds are merged and closed."""
        self.figures: RoundFigures | None = None
        """What the latest call of `merge` found in the round's deltas; None if it left none merged."""

    def view(self, fragment: Fragment) -> Ints:
        """Phi of one fragment: int32[fragment.numel], not a copy."""
        return self.phi[fragment.offset : fragment.offset + fragment.numel]

    def merge(self, round_: int, new: tuple[Delta, ...]) -> bool:
        """Make `new`, all valid records of a round that are held here, the set that is merged of it.

        Returns whether it was another before. Raises MissingChunkError if a payload on disk is damaged, or
        StorageError if one cannot be read just now; nothing has changed then.
        """
        fragment = self._layout.of_round(round_)
        old = self._merged.get(round_, ())
        self.figures = None
        if new == old or round_ <= self.base.round:
            return False
        found = self._replace(round_, fragment, old, new)
        self._note(round_, old, new)
        self._usual.note(round_, fragment, found)
        if new:
            merge = RoundMerge(found, fragment, self._manifest.outer)
            self.figures = figures(merge, self._payloads.undecodable(new), greedy_in(new))
        this = {fragment.index}
        self.diverged = self.diverged - this if is_healthy(self.view(fragment)) else self.diverged | this
        return True

    def are_outliers(self, round_: int, deltas: tuple[Delta, ...]) -> bool:
        """Whether each of these deltas is far longer than was usual in the last rounds of its fragment, or
        states far more tokens than others' deltas do.

        Raises MissingChunkError.
        """
        ordinary = deltas
        if self._manifest.outer.weight_cap:
            ordinary = of_ordinary_tokens(deltas, self._count)
        if not ordinary:
            return bool(deltas)
        fragment = self._layout.of_round(round_)
        if not self._usual.are_known(fragment):
            return False
        found, _ = self._payloads.read(ordinary, fragment)
        if not found:
            return len(ordinary) < len(deltas)
        return self._usual.are_all_exceeded(fragment, list(found.values()))

    def reach(self, fragment: Fragment) -> tuple[int, int]:
        """The highest round merged into a fragment, and the highest with a delta of ours; its first base if
        there is none."""
        return self._reach[fragment.index]

    @property
    def newest_round(self) -> int:
        """The highest round that is merged into any fragment."""
        return max(merged for merged, _ in self._reach.values())

    def digest(self) -> bytes:
        """The replica's digest: the root of Phi's snapshot bytes."""
        return snapshots.digest(self.phi)

    def prefix(self, fragment: Fragment, upto: int) -> tuple[Ints, dict[int, tuple[Delta, ...]]]:
        """A copy of a fragment with all rounds above `upto` taken back, and the records that are merged into
        it above the base. Raises MissingChunkError.

        Fragments share no rounds. So the prefixes of all fragments, each made at its own time, together are
        Phi of exactly the records that they list, whatever was merged into other fragments meanwhile.
        """
        phi = self.view(fragment).copy()
        count = len(self._layout.fragments)
        rounds = {r: deltas for r, deltas in self._merged.items() if r % count == fragment.index}
        self._take_back(fragment, phi, rounds, upto)
        return phi, rounds

    def sums(self, fragment: Fragment, upto: int, phi: Ints, rounds: Rounds) -> Sums | None:
        """The sums of a fragment as of round `upto`, from what `prefix` returned for it.

        Returns None if those of the newest snapshot still hold: there is no point since, and nothing came
        late. Raises MissingChunkError, or PayloadError for a liar's sums.
        """
        since, sealed, _ = self._sealed
        count = len(self._layout.fragments)
        old = {r: deltas for r, deltas in sealed.items() if r % count == fragment.index}
        known = {*old, *(round_ for round_ in rounds if round_ <= since)}
        late = [round_ for round_ in sorted(known) if old.get(round_, ()) != rounds.get(round_, ())]
        points = list(average.points(since, upto))
        if not late and not points:
            return None
        sums = self._sums_before(fragment)
        for round_ in late:
            step = np.zeros_like(phi)
            self._exchange(fragment, step, old.get(round_, ()), rounds.get(round_, ()))
            for one, number in zip(sums, average.counts(round_, since), strict=True):
                one += np.int32(number) * step
        sums = average.carried(sums, since, upto)
        walk, left = phi.copy(), dict(rounds)
        for point in points:
            is_current = average.is_current(point, upto)
            if is_current is None:
                break
            self._take_back(fragment, walk, left, point)
            into = sums.current if is_current else sums.earlier
            into += walk
        return sums

    def _sums_before(self, fragment: Fragment) -> Sums:
        """Those of the newest snapshot."""
        return snapshots.read_sums(self._sealed.sums, fragment, self._layout.snapshot_bytes, self._chunks)

    def note_sealed(self, sealed: Snapshot) -> None:
        """This snapshot is the newest."""
        above = {r: deltas for r, deltas in sealed.rounds.items() if r > self.base.round}
        self._sealed = sealed._replace(rounds=above)

    def average(self) -> tuple[int, Ints] | None:
        """The averaged model, int32[layout.numel], as of the newest round, and that round.

        Returns None while its sums are being fetched. Raises as `sums`.
        """
        if not snapshots.are_here(self._sealed.sums, self._layout.snapshot_bytes, self._chunks):
            return None
        upto = max(self.newest_round, self._sealed.round)
        found = np.empty_like(self.phi)
        for fragment in self._layout.fragments:
            phi, rounds = self.prefix(fragment, upto)
            sums = self.sums(fragment, upto, phi, rounds) or self._sums_before(fragment)
            found[fragment.offset : fragment.offset + fragment.numel] = average.mean(phi, sums, upto)
        return upto, found

    def chain(self, upto: int | None = None) -> bytes:
        """Digest of all records merged up to a round, or in all rounds: equal digests promise equal Phi."""
        return self.base.chain_with({r: d for r, d in self._merged.items() if upto is None or r <= upto})

    def merged_ids(self) -> list[bytes]:
        """Record ids of everything merged above the base."""
        return [delta.record_id for deltas in self._merged.values() for delta in deltas]

    def pace(self, round_: int) -> tuple[int, int, int]:
        """Of a round that is not merged yet, the steps in a window (0 if windows are counted in seconds), and
        how often members contribute (see `sampling.is_drawn`); and the round after which that holds."""
        windows, every = self.windows, self._manifest.history.snapshot_every
        place = round_ > windows.after + every
        return windows.lengths[place], windows.turns[place], windows.after + place * every

    def close_up_to(self, floor: int) -> None:
        """Make everything up to round `floor` part of the base: it cannot change any more.

        A base that lies higher stays: it was adopted after this was decided.
        """
        if floor < self.base.round:
            return
        closed = {r: self._merged[r] for r in self._merged if r <= floor}
        base, manifest = self.base, self._manifest
        tokens, decided = base.tokens_with(closed, manifest), base.folds_with(floor, closed, manifest)
        self.base = Base(floor, self.chain(floor), tokens, decided)
        self._count.change((delta for deltas in closed.values() for delta in deltas), ())
        self.note_sealed(self._sealed)
        for round_, deltas in closed.items():
            del self._merged[round_]
            self._steps.pop(round_, None)
            for delta in deltas:
                self._payloads.forget(delta)

    def _note(self, round_: int, old: tuple[Delta, ...], new: tuple[Delta, ...]) -> None:
        self._count.change(old, new)
        self.tokens = total((self.base.tokens, self._count.total))
        if new:
            self._merged[round_] = new
        else:
            self._merged.pop(round_, None)
        index = round_ % len(self._layout.fragments)
        self._reach[index] = self._reach_of(index)
        self._folding.changed(round_)
        every = self._manifest.history.snapshot_every
        if round_ <= self.windows.after or self.newest_round >= self.windows.after + every:
            self.windows = self._next_windows()  # else the round's epoch does not count yet
        self.version += 1

    def _next_windows(self) -> Windows:
        base = self.base
        decided = folds.unpack(base.folds, self._manifest)
        return self._folding.windows(self.newest_round, base.round, decided, self._merged)

    def _reach_of(self, index: int) -> tuple[int, int]:
        """The highest round merged into a fragment, and the highest with a delta of ours.

        The base counts as both: no delta of ours below it is still to come.
        """
        count = len(self._layout.fragments)
        floor = self.base.round - (self.base.round - index) % count
        rounds = sorted((round_ for round_ in self._merged if round_ % count == index), reverse=True)
        own = (r for r in rounds if any(delta.author == self._own_id for delta in self._merged[r]))
        return next(iter(rounds), floor), next(own, max(0, floor))

    def _replace(
        self, round_: int, fragment: Fragment, old: tuple[Delta, ...], new: tuple[Delta, ...]
    ) -> list[Contribution]:
        """Exchange a round's merge in Phi, and remember the step that it has taken. Raises as `_exchange`."""
        phi = self.view(fragment)
        if phi.nbytes > STEPS_BYTES:
            return self._exchange(fragment, phi, old, new)
        step = self._steps.get(round_)
        if step is None and old:
            return self._exchange(fragment, phi, old, new)
        was = phi.copy() if step is None else phi + step
        phi[:] = was
        try:
            found = self._exchange(fragment, phi, (), new)
        except StorageError:
            phi -= step if step is not None else 0
            raise
        was -= phi
        self._steps[round_] = was
        if len(self._steps) > min(STEPS_KEPT, STEPS_BYTES // phi.nbytes):
            self._steps.popitem(last=False)
        return found

    def _take_back(
        self, fragment: Fragment, phi: Ints, rounds: dict[int, tuple[Delta, ...]], upto: int
    ) -> None:
        """Take the rounds above `upto` back from values of Phi, and out of `rounds`, those merged in them."""
        for round_ in sorted(r for r in rounds if r > upto):
            deltas, step = rounds.pop(round_), self._steps.get(round_)
            if step is not None and deltas == self._merged.get(round_):
                phi += step
            else:
                self._exchange(fragment, phi, deltas, ())

    def _exchange(
        self, fragment: Fragment, phi: Ints, old: tuple[Delta, ...], new: tuple[Delta, ...]
    ) -> list[Contribution]:
        """``phi += Merge(old) - Merge(new)``; returns the contributions merged of `new`.

        Raises MissingChunkError or StorageError, and then nothing has changed: payloads read on the way may
        turn out damaged when some tensors are done already, so these are put back.
        """
        found, in_memory = self._payloads.read({d.record_id: d for d in (*new, *old)}.values(), fragment)
        taken, added = (
            [found[delta.record_id] for delta in deltas if delta.record_id in found] for deltas in (old, new)
        )
        undo = None if in_memory else phi.copy()
        before = RoundMerge(taken, fragment, self._manifest.outer)
        after = RoundMerge(added, fragment, self._manifest.outer)
        try:
            for index, slot in enumerate(fragment.slots):
                tensor = phi[slot.span]
                before.subtract(index, tensor, back=True)
                after.subtract(index, tensor)
        except StorageError:
            assert undo is not None, "nothing was read on the way"
            phi[:] = undo
            raise
        return added


# --- Deltas' payloads as merges want them: measured once, then read tensor by tensor.
#
# A round has as many payloads as the swarm has members. As many of them as the limits allow are in memory
# while it is merged. The others stay on disk, and are read one tensor at a time.

KEPT_ROUNDS = 4
"""From one merge to the next, payloads, norms and samples of so many rounds are kept: while its deltas come
one after another, a round is merged again and again. Those of others are read and measured anew."""

KEPT_BYTES = 64 * 1024 * 1024
"""The most bytes of payloads that are kept."""

MERGED_BYTES_PER_VALUE = 4
"""Size of the payloads in memory while a fragment is merged: as much as its Phi takes. If some were on disk,
the merge would need a copy of its Phi (see `PhiState`), so keeping fewer in memory would save nothing."""

MEASURED_KEPT = 256
"""The most deltas whose norms and samples are kept, the latter up to 256 KiB each."""


class Payloads:
    """Reads the payloads of deltas that are here. It blocks, and serves one merge at a time."""

    def __init__(self, manifest: Manifest, chunks: ChunkStore) -> None:
        self._fragments = len(manifest.plan().fragments)
        self._chunks = chunks
        self._measured: OrderedDict[bytes, Measures | None] = OrderedDict()
        """What is known of payloads that were decoded once; None for one that does not decode."""
        self._recent: OrderedDict[bytes, Payload] = OrderedDict()
        self._recent_bytes = 0
        self._kept = 0
        """Of how many deltas something is kept: those of `KEPT_ROUNDS` of the largest rounds so far."""

    def read(self, deltas: Collection[Delta], fragment: Fragment) -> tuple[dict[bytes, Contribution], bool]:
        """Records as Merge sees them, by id, and whether all of them can be merged without reading files.

        A record whose payload does not decode is left out: it weighs nothing on any node. Raises
        MissingChunkError, as does reading a tensor that is not in memory.
        """
        self._kept = max(self._kept, KEPT_ROUNDS * len(deltas))
        room, in_memory = max(KEPT_BYTES, MERGED_BYTES_PER_VALUE * fragment.numel), True
        found: dict[bytes, Contribution] = {}
        for delta in deltas:
            fits, payload = delta.body.payload_bytes <= room, None
            if fits or delta.record_id not in self._measured:
                payload = self._whole(delta, fragment)
            measures = self._measured[delta.record_id]
            if measures is None:
                continue
            room -= delta.body.payload_bytes if fits else 0
            in_memory &= fits
            found[delta.record_id] = Contribution(
                author=delta.author,
                tokens=delta.body.tokens,
                steps=delta.body.steps,
                staleness=delta.staleness(self._fragments),
                norms=measures.norms,
                tensor=(payload if payload and fits else _Stored(self._chunks, delta, fragment)).section,
                sample=measures.sample,
                turn=delta.body.turn,
            )
        return found, in_memory

    def undecodable(self, deltas: Iterable[Delta]) -> list[bytes]:
        """Authors of the deltas, which were read, whose payloads do not decode."""
        return [delta.author for delta in deltas if self._measured.get(delta.record_id, ()) is None]

    def forget(self, delta: Delta) -> None:
        """A delta's round is closed: its payload will not be asked for again."""
        self._measured.pop(delta.record_id, None)
        if (payload := self._recent.pop(delta.record_id, None)) is not None:
            self._recent_bytes -= payload.size

    def _whole(self, delta: Delta, fragment: Fragment) -> Payload | None:
        """A whole payload, which is measured the first time; None if it does not decode."""
        record_id = delta.record_id
        payload = self._recent.get(record_id)
        if payload is None or record_id not in self._measured:
            data = b"".join(map(self._chunks.get, delta.body.chunks))
            self.forget(delta)
            try:
                payload = Payload(delta.body.codec, fragment, data)
                self._measured[record_id] = measure(payload)
            except PayloadError:
                self._measured[record_id] = payload = None
            if len(self._measured) > min(self._kept, MEASURED_KEPT):
                self._measured.popitem(last=False)
        if payload is not None and record_id not in self._recent:
            self._recent[record_id] = payload
            self._recent_bytes += payload.size
            while self._recent_bytes > KEPT_BYTES or len(self._recent) > self._kept:
                self._recent_bytes -= self._recent.popitem(last=False)[1].size
        return payload


class _Stored:
    """A payload on disk. The chunk read last is kept, since the next tensor usually begins in it."""

    def __init__(self, chunks: ChunkStore, delta: Delta, fragment: Fragment) -> None:
        self._chunks = chunks
        self._delta = delta
        self._fragment = fragment
        self._starts = section_starts(CODECS[delta.body.codec], fragment)
        self._chunk_bytes = payload_chunk_bytes(delta.body.payload_bytes)
        self._last = (-1, b"")

    def section(self, index: int) -> Section:
        """One tensor's bytes, read and checked. Raises MissingChunkError."""
        start, stop = self._starts[index], self._starts[index + 1]
        data = bytearray()
        for place in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            if self._last[0] != place:
                self._last = place, self._chunks.get(self._delta.body.chunks[place])
            first = place * self._chunk_bytes
            data += memoryview(self._last[1])[max(0, start - first) : stop - first]
        return Section(self._delta.body.codec, memoryview(data), self._fragment.slots[index].numel)
