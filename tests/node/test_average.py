"""`gossamer.protocol.history.average` and the sums beside snapshots: the same on every node, to the bit."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi import state as phi_state
from gossamer.node.daemon.phi.restore import averaged
from gossamer.node.daemon.phi.state import PhiState, Snapshot
from gossamer.protocol.errors import StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import average
from gossamer.protocol.history.average import Sums
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.records import Claim, Delta
from tests.node.folders import Folder, sealed, some_deltas, text_model
from tests.node.world import World
from tests.protocol.builders import LAYOUT, SMALL

NEWEST = 44
"""Rounds of the worlds here: their points lie two apart at the end, and two stretches have been left."""


class LongWorld(World):
    """A world with sparse deltas in many rounds."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        super().__init__(rng, folder)
        self.deltas += [
            self.make(rng, author, round_)
            for round_ in range(7, NEWEST + 1)
            for author in range(3)
            if author == 0 or rng.random() < 0.4
        ]


@pytest.fixture
def world(rng: np.random.Generator, tmp_path: Path) -> LongWorld:
    return LongWorld(rng, tmp_path / "chunks")


def mean_by_definition(phis: list[Ints], upto: int) -> Ints:
    """The averaged model from Phi as of every round, in Python's own integers."""
    points = [p for p in range(1, upto + 1) if p % (1 << max(0, p.bit_length() - 6)) == 0]
    octave = 1 << (upto.bit_length() - 1)
    quarter = max(1, octave // 4)
    first = upto // quarter * quarter
    before = first - (quarter if first > octave else max(1, octave // 8))
    current = [p for p in points if p >= first]
    earlier = [p for p in points if before <= p < first]
    full = sum(p % max(1, octave // 32) == 0 for p in range(first, first + quarter))
    weights = dict.fromkeys(current, full) | {p: full - len(current) for p in earlier}
    total = sum(weights.values())
    result = []
    for value in range(len(phis[0])):
        off = sum(w * (int(phis[p][value]) - int(phis[upto][value])) for p, w in weights.items())
        share, left = divmod(off, total)
        share += 2 * left > total or (2 * left == total and share % 2)
        result.append(int(phis[upto][value]) + share)
    return np.array(result, dtype=np.int32)


@pytest.mark.parametrize("upto", [*range(1, 34), 47, 48, 63, 64, 79, 80, 100, 127, 128, 300, 1000])
def test_it_is_the_weighted_mean_of_phi_at_the_points_of_two_stretches(
    rng: np.random.Generator, upto: int
) -> None:
    steps = rng.integers(-(1 << 18), 1 << 18, (upto + 1, 5)).astype(np.int32)
    phis = list(np.cumsum(steps, axis=0, dtype=np.int32))
    sums, since = Sums(np.zeros(5, np.int32), np.zeros(5, np.int32)), 0
    while since < upto:
        to = min(upto, since + int(rng.integers(1, 40)))
        sums = average.carried(sums, since, to)
        for point in average.points(since, to):
            if (is_current := average.is_current(point, to)) is not None:
                sums[is_current][:] += phis[point]
        since = to
    assert np.array_equal(average.mean(phis[upto], sums, upto), mean_by_definition(phis, upto))


@given(st.integers(1, 1 << 40))
def test_between_an_eighth_and_a_third_of_a_run_is_averaged_whenever_one_looks(upto: int) -> None:
    points = list(average.points(0, 10**3)) if upto <= 10**3 else None
    earlier, current = average.counts(0, upto)
    assert 1 <= current <= 8 and earlier <= 8
    if upto >= 64:
        oldest = [p for p, _ in zip(average.points(0, upto), range(earlier + current), strict=False)][-1]
        assert 0.11 < (upto - oldest) / upto < 0.37
    assert points is None or points == sorted(points, reverse=True)


def test_phi_0_is_the_average_before_there_is_a_round(rng: np.random.Generator) -> None:
    phi = rng.integers(-100, 100, 9).astype(np.int32)
    assert np.array_equal(average.mean(phi, Sums(phi * 0, phi * 0), 0), phi)


class Replica:
    """A state that seals now and then, and the sums in its newest snapshot."""

    def __init__(self, world: World) -> None:
        self.world, self.state, self.ledger = world, world.state(), Ledger()
        self.claim = Claim(0, 0, bytes(32), snapshots.store(world.phi_0, world.chunks))
        self.covered: dict[int, tuple[Delta, ...]] = {}

    def arrive(self, delta: Delta) -> None:
        self.ledger.add(delta)
        self.state.merge(delta.round, tuple(self.ledger.valid(delta.round)))

    def seal(self, round_: int) -> None:
        """As the archive does."""
        root = sealed(self.state, round_, self.claim, self.world.chunks)
        self.covered = {r: d for f in LAYOUT.fragments for r, d in self.state.prefix(f, round_)[1].items()}
        self.claim = Claim(round_, 0, self.state.chain(round_), root)
        self.state.note_sealed(Snapshot(round_, self.covered, self.sums()))

    def sums(self) -> tuple[bytes, ...]:
        return snapshots.read_index(self.claim.root, LAYOUT.snapshot_bytes, self.world.chunks)[1]

    def average(self) -> Ints:
        found = self.state.average()
        assert found is not None and found[0] == NEWEST
        return found[1]

    def restarted(self) -> PhiState:
        """The state of a node that starts from its newest snapshot."""
        phi = snapshots.load(self.claim, LAYOUT.numel, self.world.chunks)
        sealed = Snapshot(self.claim.round, self.covered, self.sums())
        return PhiState(SMALL, phi, self.world.chunks, bytes(32), merged=self.covered, sealed=sealed)


def expected(world: World) -> Ints:
    phis = [world.fold([d for d in world.deltas if d.round <= r]) for r in range(NEWEST + 1)]
    return mean_by_definition(phis, NEWEST)


@pytest.mark.parametrize("remembers", [True, False])
def test_any_order_lateness_and_times_of_sealing_give_the_same_bits(
    world: LongWorld, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    if not remembers:
        monkeypatch.setattr(phi_state, "STEPS_BYTES", 0)
    wanted, roots = expected(world), set()
    for _ in range(4):
        replica = Replica(world)
        late = rng.random(len(world.deltas)) < 0.3
        order = sorted(zip(world.deltas, late, strict=True), key=lambda pair: (pair[1], pair[0].round))
        for number, (delta, _) in enumerate(order):
            replica.arrive(delta)
            if rng.random() < 0.1:
                replica.seal(max(replica.claim.round, replica.state.newest_round - int(rng.integers(0, 9))))
            if number == len(order) // 2:
                replica.state = replica.restarted()
                for round_ in replica.ledger.rounds():
                    replica.state.merge(round_, tuple(replica.ledger.valid(round_)))
        assert np.array_equal(replica.average(), wanted)
        replica.seal(NEWEST)
        assert np.array_equal(replica.average(), wanted)
        roots.add(replica.claim.root)
    assert len(roots) == 1


def test_a_joiner_carries_the_sums_on_that_it_was_given(world: LongWorld) -> None:
    donor = Replica(world)
    for delta in world.deltas:
        if delta.round <= 30:
            donor.arrive(delta)
    donor.seal(30)
    joiner = Replica(world)
    joiner.claim = donor.claim
    phi = snapshots.load(donor.claim, LAYOUT.numel, world.chunks)
    joiner.state = PhiState(SMALL, phi, world.chunks, bytes(32), sealed=Snapshot(30, {}, joiner.sums()))
    for delta in world.deltas:
        if delta.round > 30:
            joiner.arrive(delta)
    assert np.array_equal(joiner.average(), expected(world))


def test_what_nothing_has_changed_is_not_written_again(world: LongWorld) -> None:
    replica = Replica(world)
    for delta in world.deltas:
        replica.arrive(delta)
    replica.seal(NEWEST)
    sums = replica.sums()
    for fragment in LAYOUT.fragments:
        phi, rounds = replica.state.prefix(fragment, NEWEST)
        assert replica.state.sums(fragment, NEWEST, phi, rounds) is None
    replica.seal(NEWEST)
    assert replica.sums() == sums


def test_the_bits_are_pinned() -> None:
    """They must not change: every node of a swarm has them."""
    values = np.arange(-4, 5, dtype=np.int32) << 20
    sums, since = Sums(values * 0, values * 0), 0
    for upto in (3, 17, 64, 100, 1000):
        sums = average.carried(sums, since, upto)
        for point in average.points(since, upto):
            if (is_current := average.is_current(point, upto)) is not None:
                sums[is_current][:] += values + np.int32(point * point)
        since = upto
    mean = average.mean(values + np.int32(10**6), sums, since)
    found = sha256(b"".join(one.astype("<i4").tobytes() for one in (*sums, mean))).hexdigest()
    assert found == "4378c4bd28856a77b36c1fdb90364d1fc711694d528fad9e5684d60a8248f03a"


def test_a_snapshot_that_gives_way_to_another_while_it_is_read_is_not_missed(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, phi = text_model()
    folder = Folder(tmp_path / "d", manifest, phi)
    folder.add(*some_deltas(rng, manifest, rounds=11))
    before = averaged(folder.home)[2]
    folder.seal(5)

    def too_late(state: PhiState) -> None:
        monkeypatch.undo()
        folder.seal(9)

    monkeypatch.setattr(PhiState, "average", too_late)
    assert np.array_equal(averaged(folder.home)[2], before)


def test_it_is_read_from_a_folder_and_named_when_it_is_not_here_yet(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    manifest, phi = text_model()
    folder = Folder(tmp_path / "d", manifest, phi)
    folder.add(*some_deltas(rng, manifest, rounds=11))
    before = averaged(folder.home)[2]
    claim = folder.seal(9)
    _, state, now = averaged(folder.home)
    assert np.array_equal(now, before) and not np.array_equal(now, state.phi)
    _, sums, _ = snapshots.read_index(claim.root, manifest.plan().snapshot_bytes, folder.chunks)
    folder.chunks.drop(sums[0])
    with pytest.raises(StorageError, match="still fetching"):
        averaged(folder.home)
