"""`gossamer.node.daemon.phi.state`: whatever the order in which records come, Phi is the fold over their
set."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi import state as payloads
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.records import GENESIS, Base, RecordStore
from gossamer.node.ipc.messages import LENGTH_BYTES, Clock, decode, encode
from gossamer.node.trainer.data import cosine
from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import VALUE_LIMIT
from gossamer.protocol.history.claims import chain, round_digest
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import TOKENS_MAX, TOKENS_TOTAL_MAX
from gossamer.protocol.merge import merge
from gossamer.protocol.payloads import TensorSpec, section_starts, split_payload
from gossamer.protocol.records import Claim, Delta
from tests.node.chunkfiles import file_of
from tests.node.world import OWN, ROUNDS, World, arrive
from tests.protocol.builders import (
    LAYOUT,
    SMALL,
    body_of,
    identity,
    manifest,
    one_rung,
    random_delta,
    row,
    signed,
)


@pytest.fixture
def world(rng: np.random.Generator, tmp_path: Path) -> World:
    return World(rng, tmp_path / "chunks")


def test_any_order_of_arrival_gives_the_fold(world: World, rng: np.random.Generator) -> None:
    expected = world.fold(world.deltas)
    digests = set()
    for _ in range(4):
        state = world.state()
        order = [world.deltas[i] for i in rng.permutation(len(world.deltas))]
        arrive(state, Ledger(), order)
        assert np.array_equal(state.phi, expected)
        digests.add((state.chain(), state.digest(), state.tokens))
    assert len(digests) == 1
    assert state.digest() == snapshots.digest(expected)
    assert state.tokens == sum(delta.body.tokens for delta in world.deltas)


def test_a_void_pair_leaves_as_if_it_had_never_come(world: World, rng: np.random.Generator) -> None:
    state, ledger = world.state(), Ledger()
    arrive(state, ledger, world.deltas)
    twin = world.make(rng, 2, 3, tokens=77)
    arrive(state, ledger, [twin])
    without = [d for d in world.deltas if (d.author, d.round) != (twin.author, 3)]
    assert np.array_equal(state.phi, world.fold(without))
    assert np.array_equal(state.phi, world.fold([*world.deltas, twin]))
    assert state.tokens == sum(delta.body.tokens for delta in without)
    chain, phi = state.chain(), state.phi.copy()
    arrive(state, ledger, [world.make(rng, 1, 9), world.make(rng, 1, 9)])
    assert np.array_equal(state.phi, phi) and state.chain() == chain, "of a round nothing is left"


def test_a_payload_that_does_not_decode_weighs_nothing(world: World, rng: np.random.Generator) -> None:
    payload = rng.bytes(100)
    broken = signed(identity(5), body_of(payload, "int4", 2, 2))
    world.keep(broken, payload)
    state, ledger = world.state(), Ledger()
    arrive(state, ledger, [*world.deltas, broken])
    assert np.array_equal(state.phi, world.fold(world.deltas))
    assert state.tokens == sum(d.body.tokens for d in [*world.deltas, broken]), "it was merged, at no weight"
    plain = world.state()
    arrive(plain, Ledger(), world.deltas)
    assert state.chain() != plain.chain()


def test_a_damaged_chunk_changes_nothing_and_is_named(world: World) -> None:
    state, ledger = world.state(), Ledger()
    arrive(state, ledger, world.deltas[:1])
    before = (state.phi.copy(), state.version, state.tokens, state.chain())
    victim = world.deltas[2]
    path = file_of(world.chunks, victim.body.chunks[0])
    path.write_bytes(b"damaged")
    for delta in world.deltas[:4]:
        ledger.add(delta)
    with pytest.raises(MissingChunkError) as error:
        state.merge(1, tuple(ledger.valid(1)))
    assert error.value.blob == victim.body.chunks[0]
    assert np.array_equal(state.phi, before[0])
    assert (state.version, state.tokens, state.chain()) == before[1:]
    world.keep(victim, world.payloads[victim.record_id])
    state.merge(1, tuple(ledger.valid(1)))
    assert np.array_equal(state.phi, world.fold(world.deltas[:4]))


def test_how_far_a_fragment_has_come(world: World, rng: np.random.Generator) -> None:
    state, ledger = world.state(), Ledger()
    even, odd = LAYOUT.fragments
    assert state.reach(even) == (0, 0)
    assert state.reach(odd) == (-1, 0)
    arrive(state, ledger, [d for d in world.deltas if d.round == 3 and d.author != OWN])
    assert state.reach(odd) == (3, 0)
    arrive(state, ledger, [d for d in world.deltas if d.round == 1])
    assert state.reach(odd) == (3, 1)
    arrive(state, ledger, [d for d in world.deltas if d.round == 3 and d.author == OWN])
    assert state.reach(odd) == (3, 3)
    assert state.reach(even)[0] == 0
    arrive(state, ledger, [world.make(rng, 0, 3)])
    assert state.reach(odd)[1] == 1, "ours of round 3 is void"


def test_taking_back_and_closing(world: World) -> None:
    state = world.state()
    arrive(state, Ledger(), world.deltas)
    prefix = [delta for delta in world.deltas if delta.round <= 4]
    parts = [state.prefix(fragment, 4) for fragment in LAYOUT.fragments]
    assert np.array_equal(np.concatenate([phi for phi, _ in parts]), world.fold(prefix))
    rounds = {round_: deltas for _, part in parts for round_, deltas in part.items()}
    assert state.base.chain_with(rounds) == state.chain(4)
    assert state.base.tokens_with(rounds, SMALL) == sum(delta.body.tokens for delta in prefix)
    assert np.array_equal(state.phi, world.fold(world.deltas)), "what was asked for is a copy"

    chain, digest, tokens = state.chain(), state.digest(), state.tokens
    state.close_up_to(4)
    assert (state.chain(), state.digest(), state.tokens) == (chain, digest, tokens)
    for round_ in (3, 4):
        state.merge(round_, ())
    state.merge(4, tuple(prefix[-1:]))
    assert state.digest() == digest, "what is closed cannot change"
    base = state.base
    state.close_up_to(2)
    assert state.base == base, "nor is it opened again"
    assert set(state.merged_ids()) == {d.record_id for d in world.deltas if d.round > 4}
    kept = state._payloads._measured.keys() | state._payloads._recent.keys()
    assert kept <= set(state.merged_ids()), "nothing is kept of what is closed"


def test_the_chain_is_of_what_is_merged_whatever_it_was_when_last_asked_for(world: World) -> None:
    state = world.state()
    held: list[Delta] = []

    def expected(upto: int) -> bytes:
        found = GENESIS.chain
        for round_ in range(1, upto + 1):
            ids = [delta.record_id for delta in held if delta.round == round_]
            found = chain(found, round_, round_digest(ids)) if ids else found
        return found

    def check() -> None:
        assert [state.chain(upto) for upto in range(state.base.round, 8)] == [
            expected(upto) for upto in range(state.base.round, 8)
        ]
        assert state.chain() == expected(max(ROUNDS))

    check()
    for delta in (*world.deltas[8:], *world.deltas[:8]):
        held.append(delta)
        state.merge(delta.round, tuple(d for d in held if d.round == delta.round))
        check()
    held = [delta for delta in held if delta.round != 5]
    state.merge(5, ())
    check()
    state.close_up_to(3)
    check()
    assert state.base.chain == expected(3)
    held = [delta for delta in held if delta.round != 6]
    state.merge(6, ())
    check()


def test_what_liars_claim_adds_up_to_a_number_that_can_be_stored_and_told(
    world: World, tmp_path: Path
) -> None:
    base = Base(0, GENESIS.chain, 2**63 - 50)
    state = PhiState(SMALL, world.phi_0.copy(), world.chunks, OWN, base=base)
    ledger = Ledger()
    arrive(state, ledger, world.deltas)
    assert state.tokens == TOKENS_TOTAL_MAX
    prefix = state.prefix(LAYOUT.fragments[0], 4)
    assert state.base.tokens_with(prefix[1], SMALL) == TOKENS_TOTAL_MAX
    for round_ in ledger.rounds()[4:]:
        state.merge(round_, ())
    state.close_up_to(4)
    assert state.tokens == state.base.tokens == TOKENS_TOTAL_MAX
    store = RecordStore(tmp_path / "ledger.sqlite", SMALL.swarm_id)
    store.close_up_to(state.base, own_last=0)
    store.add_snapshot(Claim(4, state.tokens, bytes(32), bytes(32)), [], [])
    assert store.load_history().base == state.base
    store.close()
    claims = (Claim(4, state.tokens, bytes(32), bytes(32)),)
    assert row(identity(1), claims=claims).body.claims == claims, "others can read it"
    assert decode(encode(Clock(1, state.tokens))[LENGTH_BYTES:]) == Clock(1, state.tokens)


@pytest.mark.parametrize(
    ("round_", "base"), [(7, 5), (101, 1)], ids=["alone in its round", "too stale to weigh anything"]
)
def test_one_member_that_states_any_number_of_tokens_ends_nobodys_schedule(
    world: World, rng: np.random.Generator, round_: int, base: int
) -> None:
    state, ledger = world.state(), Ledger()
    arrive(state, ledger, world.deltas)
    before = LAYOUT.trained_tokens(state.tokens)
    schedule = cosine(total_tokens=20 * before)
    arrive(state, ledger, [world.make(rng, 5, round_, base=base, tokens=TOKENS_MAX)])
    assert before <= LAYOUT.trained_tokens(state.tokens) <= 1.25 * before
    assert schedule(LAYOUT.trained_tokens(state.tokens)) > 0.95
    tokens = state.tokens
    state.close_up_to(112)
    assert state.tokens == state.base.tokens == tokens


def test_what_a_merge_found_in_its_round(world: World, rng: np.random.Generator) -> None:
    """The figures are those of the set just merged, those that do not decode among them."""
    payload = rng.bytes(100)
    broken = signed(identity(5), body_of(payload, "int4", 2, 2))
    world.keep(broken, payload)
    state, ledger = world.state(), Ledger()
    assert state.figures is None
    arrive(state, ledger, [d for d in world.deltas if d.round == 2][:3])
    assert state.figures is not None
    assert {author for author, f in state.figures.members.items() if f.agreement is not None} == {
        identity(author).node_id for author in range(3)
    }
    arrive(state, ledger, [broken])
    assert state.figures is not None and state.figures.members[broken.author].void
    assert state.figures.agreement is not None
    state.merge(2, tuple(ledger.valid(2)))
    assert state.figures is None, "nothing was merged"
    state.merge(2, ())
    assert state.figures is None


@pytest.mark.parametrize("which", ["too stale", "broken", "both"])
def test_a_round_in_which_nothing_counts_is_merged_like_any(
    world: World, rng: np.random.Generator, which: str
) -> None:
    """A node that slept publishes the only delta of its round, too stale; or its payload does not decode."""
    sent: list[Delta] = []
    if which != "broken":
        sent.append(world.make(rng, 1, 101, base=1))
    if which != "too stale":
        payload = rng.bytes(100)
        sent.append(signed(identity(2), body_of(payload, "int4", 101, 2)))
        world.keep(sent[-1], payload)
    state, ledger = world.state(), Ledger()
    arrive(state, ledger, sent)
    assert np.array_equal(state.phi, world.phi_0)
    assert set(state.merged_ids()) == {delta.record_id for delta in sent}
    assert state.figures is not None and state.figures.agreement is None
    found = state.figures.members
    assert {author for author, f in found.items() if f.stale or f.void} == {d.author for d in sent}
    late = world.make(rng, 3, 101)
    arrive(state, ledger, [late])
    assert np.array_equal(state.phi, world.fold([*sent, late])), "who comes later counts alone"


@pytest.mark.parametrize("states_many", [False, True])
def test_a_round_in_which_nothing_counts_is_an_outlier_only_by_its_tokens(
    world: World, states_many: bool
) -> None:
    state = world.state()
    arrive(state, Ledger(), world.deltas)
    payload = b"no payload"
    found = [
        signed(identity(author), body_of(payload, "int4", 7, 2, tokens=tokens))
        for author, tokens in ((1, 1000), (2, TOKENS_MAX if states_many else 1000))
    ]
    for delta in found:
        world.keep(delta, payload)
    assert state.are_outliers(7, tuple(found)) is states_many


def test_divergence_is_noted_until_it_is_taken_back(world: World) -> None:
    state, ledger = world.state(), Ledger()
    assert state.diverged == set()
    fragment = LAYOUT.fragments[1]
    state.view(fragment)[:] = VALUE_LIMIT - 1
    found = [d for d in world.deltas if d.round == 1]
    arrive(state, ledger, found)
    assert state.diverged == {1}
    begun_so = PhiState(SMALL, state.phi.copy(), world.chunks, OWN)
    assert begun_so.diverged == {1}
    state.merge(1, ())
    assert state.diverged == set() and (state.view(fragment) == VALUE_LIMIT - 1).all()


# -- payloads that do not fit in memory are read tensor by tensor: the same bits, in bounded memory

CHUNK = 64
"""Bytes: tensors begin and end inside chunks, and go over several."""


@pytest.fixture
def finely_cut(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(limits, "PAYLOAD_CHUNK_BYTES_MIN", CHUNK)
    return World(rng, tmp_path / "chunks")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "KEPT_BYTES", 0)
    monkeypatch.setattr(payloads, "MERGED_BYTES_PER_VALUE", 0)


@pytest.mark.usefixtures("no_room")
def test_payloads_left_on_disk_do_not_change_a_bit(finely_cut: World) -> None:
    state = finely_cut.state()
    arrive(state, Ledger(), finely_cut.deltas)
    assert np.array_equal(state.phi, finely_cut.fold(finely_cut.deltas))
    assert not state._payloads._recent


@pytest.mark.usefixtures("no_room")
def test_damage_found_half_way_through_a_merge_changes_nothing(finely_cut: World) -> None:
    state, ledger = finely_cut.state(), Ledger()
    of_round = [delta for delta in finely_cut.deltas if delta.round == 1]
    arrive(state, ledger, of_round[:3])  # measured, so that they are read next while Phi changes
    before = (state.phi.copy(), state.version, state.tokens, state.chain())
    victim, blob = of_round[1], of_round[1].body.chunks[6]
    assert not any(blob in delta.body.chunks for delta in of_round if delta is not victim)
    first = section_starts(CODECS["int4"], LAYOUT.of_round(1))[1]
    assert first <= 6 * CHUNK, "the first tensor is merged by then"
    file_of(finely_cut.chunks, blob).write_bytes(b"damaged")
    with pytest.raises(MissingChunkError) as error:
        arrive(state, ledger, of_round[3:])
    assert error.value.blob == blob
    assert np.array_equal(state.phi, before[0])
    assert (state.version, state.tokens, state.chain()) == before[1:]
    finely_cut.keep(victim, finely_cut.payloads[victim.record_id])
    state.merge(1, tuple(ledger.valid(1)))
    assert np.array_equal(state.phi, finely_cut.fold(of_round))


def _peak_of_merge(state: PhiState, deltas: tuple[Delta, ...]) -> int:
    """The most memory that the first merge of a round takes."""
    tracemalloc.start()
    try:
        state.merge(1, deltas)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_round_of_many_members_does_not_need_memory_for_all_their_payloads(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "KEPT_BYTES", 0)
    monkeypatch.setattr(limits, "PAYLOAD_CHUNK_BYTES_MIN", 4096)
    monkeypatch.setattr(merge, "SAMPLE_MAX", 64)
    members, tensors = 64, tuple(TensorSpec(f"w{n}", (1 << 15,), "rda") for n in range(8))
    large = manifest(tensors, fragments=1, outer=one_rung("int4"))
    phi = np.zeros(large.plan().numel, dtype=np.int32)
    chunks = ChunkStore(tmp_path / "chunks")
    made = [random_delta(rng, identity(n), 1, of=large, codec="int4") for n in range(members)]
    for delta, payload in made:
        for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
            chunks.put(blob, piece)
    deltas = tuple(sorted((delta for delta, _ in made), key=lambda delta: delta.author))
    of_payloads = sum(len(payload) for _, payload in made)
    del made, payload
    # The lesser of two: the interpreter's own table of names may grow by megabytes during one.
    peak = min(_peak_of_merge(PhiState(large, phi[:], chunks, OWN), deltas) for _ in range(2))
    assert phi.any()
    # Payloads and a copy of the fragment, each as large as it; a tensor of everybody's, and its sums.
    assert peak < 2 * phi.nbytes + of_payloads / 2 < of_payloads
