"""`phi.loop`: what the core asks for is merged, and offered to the trainer once it has taken the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.phi import loop as loop_module
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol.errors import DivergedError, StorageError
from gossamer.protocol.fixedpoint import ONE
from gossamer.protocol.identity import short
from gossamer.protocol.merge.contributions import ROUNDS_MIN
from gossamer.protocol.payloads import encode_payload
from gossamer.protocol.records import Delta
from tests.node.chunkfiles import file_of
from tests.node.merging import Setup, arrive, delta_of, merging
from tests.node.trainer_side import until
from tests.node.world import World
from tests.protocol.builders import LAYOUT, body_of, identity, signed


@pytest.fixture
async def setup(rng: np.random.Generator, tmp_path: Path) -> AsyncIterator[Setup]:
    async with merging(World(rng, tmp_path / "chunks")) as setup:
        yield setup


async def test_records_from_before_the_model_wait_for_it(setup: Setup) -> None:
    setup.arrive(*setup.world.deltas)
    await asyncio.sleep(0.05)
    assert setup.merged == [] and await setup.loop.digest() is None
    await setup.begin(setup.state)
    await setup.merged_all()
    assert np.array_equal(setup.state.phi, setup.world.fold(setup.world.deltas))
    assert setup.loop.tokens == setup.state.tokens // 2, "a token stands in a delta of each fragment"


async def test_who_asks_for_the_digest_all_the_time_holds_nothing_up(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "REST", 10**6)
    await setup.begin(setup.state)
    first = await setup.loop.digest()
    setup.arrive(*setup.world.deltas)
    await setup.merged_all()
    assert first == await setup.loop.digest(), "of a moment ago"
    setup.loop._digest_until = 0.0
    found, average = await setup.loop.digest(), setup.state.average()
    assert found is not None and average is not None
    assert found[:2] == (setup.state.chain(), setup.state.digest()) != first
    assert found[2:] == (snapshots.digest(average[1]), average[0])


async def test_only_what_is_held_is_merged(setup: Setup) -> None:
    await setup.begin(setup.state)
    first, second = setup.world.deltas[:2]
    setup.arrive(first)
    setup.ledger.add(second)
    await setup.merged_all()
    assert np.array_equal(setup.state.phi, setup.world.fold([first]))
    setup.arrive(second)
    await setup.merged_all()
    assert np.array_equal(setup.state.phi, setup.world.fold([first, second]))


async def test_of_how_many_tokens_phi_is_is_told_before_it_is_offered(setup: Setup) -> None:
    """A joiner's schedule begins where the swarm is, and not where it was when it attached."""
    told: list[int] = []
    setup.before_offer = lambda: told.append(len(setup.offered()))
    await setup.begin(setup.state)
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1])
    assert told == [0, 1]


async def test_a_trainer_is_offered_everything_when_it_comes(setup: Setup) -> None:
    await setup.begin(setup.state)
    await until(lambda: setup.loop.ready)
    assert setup.port.offers == []
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1])
    # Another one so soon after that nothing was seen in between.
    setup.port.attached = False
    setup.loop.look()
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1, 0, 1])


async def test_nothing_is_offered_before_all_that_the_swarm_had_is_merged(setup: Setup) -> None:
    setup.core.caught_up = False
    setup.attach()
    await setup.begin(setup.state)
    setup.arrive(*setup.world.deltas)
    await until(lambda: setup.merged)
    await asyncio.sleep(0.05)
    assert not setup.loop.ready and setup.port.offers == []
    setup.core.caught_up = True
    await until(lambda: setup.offered() == [0, 1])
    for index, _, phi in setup.port.offers:
        fragment = LAYOUT.fragments[index]
        expected = setup.world.fold(setup.world.deltas)
        assert np.array_equal(phi, expected[fragment.offset : fragment.offset + fragment.numel])


async def test_a_trainer_that_does_not_look_does_not_hold_merging_up(setup: Setup) -> None:
    await setup.begin(setup.state)
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1])
    for delta in setup.world.deltas:
        setup.arrive(delta)
        await asyncio.sleep(0.01)
    await setup.merged_all()
    assert np.array_equal(setup.state.phi, setup.world.fold(setup.world.deltas))
    assert setup.offered() == [0, 1], "its memory is its own until it gives it back"
    setup.take(0)
    setup.take(1)
    await until(lambda: setup.offered() == [0, 1, 0, 1])


async def test_a_damaged_chunk_is_told_and_merged_when_it_is_back(setup: Setup) -> None:
    await setup.begin(setup.state)
    victim = setup.world.deltas[0]
    sound = setup.world.chunks.get(victim.body.chunks[0])
    file_of(setup.world.chunks, victim.body.chunks[0]).write_bytes(b"damaged")
    setup.arrive(*setup.world.deltas)
    await until(lambda: victim.body.chunks[0] in setup.lost)
    setup.world.chunks.put(victim.body.chunks[0], sound)
    setup.arrive(victim)
    await setup.merged_all()
    assert np.array_equal(setup.state.phi, setup.world.fold(setup.world.deltas))


async def test_settled_waits_for_what_can_be_merged_and_for_no_round_that_the_swarm_has_yet_to_reach(
    setup: Setup,
) -> None:
    """Who went back holds rounds of its own that nobody comes near for hours."""
    setup.core.clock, setup.core.horizon = 4, 5
    await setup.begin(setup.state)
    arrive(setup, delta_of(1, 4, 1000), delta_of(99, 90, 1000))
    async with asyncio.timeout(60):
        assert await setup.loop.settled(5)
        assert setup.merged == [4]
        assert not await setup.loop.settled(100)


async def test_a_delta_that_is_lost_does_not_hold_up_its_round(setup: Setup) -> None:
    await setup.begin(setup.state)
    victim = setup.world.deltas[0]
    file_of(setup.world.chunks, victim.body.chunks[0]).write_bytes(b"damaged")
    setup.loop._damaged = lambda blob: setup.held.discard(victim.record_id)
    setup.arrive(*setup.world.deltas)
    await setup.merged_all()
    rest = [delta for delta in setup.world.deltas if delta is not victim]
    assert np.array_equal(setup.state.phi, setup.world.fold(rest))


async def test_a_member_that_keeps_lying_is_named_once(
    setup: Setup, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends the others' own direction, turned around and ten times as long."""
    caplog.set_level("INFO", "gossamer.merging")
    await setup.begin(setup.state)
    liar = identity(3)
    for round_ in range(1, ROUNDS_MIN + 3):
        fragment = LAYOUT.of_round(round_)
        common = [rng.integers(-1000, 1001, slot.numel) for slot in fragment.slots]
        for author in range(4):
            factor = -10 if author == 3 else 1
            tensors = [(factor * c + rng.integers(-200, 201, c.size)).astype(np.int32) for c in common]
            payload = encode_payload("int8", fragment, tensors)
            delta = signed(identity(author), body_of(payload, "int8", round_, len(LAYOUT.fragments)))
            setup.world.keep(delta, payload)
            setup.arrive(delta)
        await setup.merged_all()
    verdict = setup.loop.contributions.of(liar.node_id).verdict
    assert verdict is not None and "clipped in" in verdict and "opposed to the others in" in verdict
    assert all(setup.loop.contributions.of(identity(n).node_id).verdict is None for n in range(3))
    assert setup.loop.contributions.agreement is not None
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"{short(liar.node_id)}: clipped in 8 of the last 8 rounds")


async def test_whoever_equivocates_is_noted_even_if_nothing_of_it_was_merged(
    setup: Setup, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """However many keys do so, as one person may have them, they draw one line."""
    await setup.begin(setup.state)
    for round_ in (1, 2):
        for author in range(1, 9):
            setup.arrive(
                setup.world.make(rng, author, round_), setup.world.make(rng, author, round_, tokens=5)
            )
    await setup.merged_all()
    verdict = setup.loop.contributions.of(identity(1).node_id).verdict
    assert verdict is not None and verdict.startswith("void (equivocated") and setup.merged == []
    [line] = [text for text in caplog.messages if "equivocated" in text]
    assert line.endswith(f" and 3 more: {verdict}")


async def test_who_went_back_to_a_snapshot_from_before_its_own_last_delta_is_offered_what_comes(
    setup: Setup,
) -> None:
    """Its trainer leaves out what does not hold that one, which nobody will merge for hours."""
    setup.core.clock, setup.core.horizon = 4, 5
    setup.ledger.note_last(identity(99).node_id, 91, bytes(32))
    await setup.begin(setup.state)
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1])
    assert [state.own_round for _, state, _ in setup.port.offers] == [90, 91]
    setup.core.horizon = 91
    setup.take(0)
    arrive(setup, delta_of(1, 6, 1000))
    await until(lambda: setup.offered() == [0, 1, 0])
    assert setup.port.offers[-1][1].own_round < 90


async def test_payloads_on_their_way_are_not_merged_yet(setup: Setup) -> None:
    setup.core.caught_up = False
    await setup.begin(setup.state)
    await asyncio.sleep(0.1)
    assert setup.loop.unmerged == 1, "a daemon that has just started: others may have gone on meanwhile"
    setup.core.caught_up = True
    await until(lambda: not setup.loop.unmerged)
    setup.core.fetcher.wants.any_has_holder = True
    assert setup.loop.unmerged == 1 and setup.core.rounds_behind == 0


async def test_a_payload_that_cannot_be_read_just_now_is_merged_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not given up for lost."""
    monkeypatch.setattr(loop_module, "RETRY_S", 0.01)
    refusals = iter(range(3))
    get = ChunkStore.get

    def refuse(store: ChunkStore, blob: bytes) -> bytes:
        if next(refusals, None) is not None:
            raise StorageError("cannot read it: Too many open files")
        return get(store, blob)

    monkeypatch.setattr(ChunkStore, "get", refuse)
    await setup.begin(setup.state)
    setup.arrive(*setup.world.deltas)
    await setup.merged_all()
    assert setup.lost == []
    assert next(refusals, None) is None
    assert caplog.text.count("Too many open files; trying again") == 1
    assert np.array_equal(setup.state.phi, setup.world.fold(setup.world.deltas))


async def test_what_others_alone_make_diverge_is_offered_to_nobody_until_it_is_void(setup: Setup) -> None:
    """One key can do that where nobody trains: who would hear that it is revoked, were all nodes gone?"""
    await setup.begin(setup.state)
    setup.attach()
    setup.loop.look()
    await until(lambda: setup.offered() == [0, 1])
    for round_ in (2, 4, 6):
        setup.take(0)
        arrive(setup, delta_of(1, round_, 31 * ONE))
        await until(lambda round_=round_: round_ in setup.merged)
    author = short(identity(1).node_id)
    assert setup.loop.diverged == f"fragment 0 reached a magnitude of 64 in round 6, of {author}"
    setup.take(0)
    arrive(setup, delta_of(2, 7, 1000))
    setup.take(1)
    await until(lambda: setup.offered()[-1] == 1)
    assert all(np.abs(phi).max() < 64 * ONE for _, _, phi in setup.port.offers)
    count = len(setup.port.offers)
    arrive(setup, delta_of(1, 6, 1))  # a second record of that round: both are void
    await until(lambda: len(setup.port.offers) > count)
    assert setup.offered()[-1] == 0 and setup.loop.diverged == ""


async def test_who_has_trained_what_diverges_ends(rng: np.random.Generator, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"fragment 0 reached .* in round 6.*lower learning rate"):
        async with merging(World(rng, tmp_path / "chunks")) as setup:
            setup.core.identity = identity(1)
            await setup.begin(setup.state)
            for round_ in (2, 4, 6):
                arrive(setup, delta_of(1, round_, 31 * ONE))
                await until(lambda round_=round_: round_ in setup.merged)
            await until(lambda: bool(setup.loop.diverged))


@pytest.mark.parametrize(
    ("round_", "value", "tokens"), [(16, 100_000, 1000), (17, 1000, 2**40)], ids=["length", "tokens"]
)
async def test_an_outlier_alone_in_a_round_under_way_waits_for_others(
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    round_: int,
    value: int,
    tokens: int,
) -> None:
    """Alone it would be taken whole, and schedules with it be over; another's beside it clips it."""
    caplog.set_level("INFO")
    monkeypatch.setattr("gossamer.protocol.merge.schedule.HELD_BACK_MIN_S", 3600.0)
    await setup.begin(setup.state)
    setup.core.clock = 15
    arrive(setup, *(delta_of(author, 14, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    before, tokens_before = setup.state.phi.copy(), setup.loop.tokens
    arrive(setup, delta_of(1, round_, value, tokens=tokens))
    await until(lambda: f"delta far beyond the usual; round {round_} waits" in caplog.text)
    assert setup.core.rounds_behind == 0 and np.array_equal(setup.state.phi, before)
    arrive(setup, delta_of(2, round_, 1000))
    await setup.merged_all()
    assert setup.merged == [14, round_]
    assert np.abs(setup.state.phi - before).max() < 10_000
    assert setup.loop.tokens <= tokens_before + (4 + 1) * 1000 // 2


def partial_delta_of(author: int, round_: int, value: int, *trained: int) -> tuple[Delta, bytes]:
    """One of which only some tensors are not 0."""
    fragment = LAYOUT.of_round(round_)
    tensors = [
        np.full(slot.numel, value if index in trained else 0, dtype=np.int32)
        for index, slot in enumerate(fragment.slots)
    ]
    payload = encode_payload("int8", fragment, tensors)
    return signed(identity(author), body_of(payload, "int8", round_, len(LAYOUT.fragments))), payload


async def test_what_we_do_not_train_says_nothing_of_others(setup: Setup) -> None:
    setup.core.identity = identity(0)
    await setup.begin(setup.state)
    setup.core.clock = 4
    arrive(setup, partial_delta_of(0, 3, 1000, 0))
    await setup.merged_all()
    arrive(setup, partial_delta_of(1, 5, 1000, 0, 2))
    await until(lambda: setup.merged == [3, 5])
