"""`held_back`: a round whose deltas are far too long waits for those of others, but not for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from gossamer.protocol.merge.schedule import HELD_BACK_MIN_S
from gossamer.protocol.payloads import encode_payload
from gossamer.protocol.records import Delta
from tests.node.merging import Setup, arrive, delta_of, merging
from tests.node.trainer_side import until
from tests.node.world import World
from tests.protocol.builders import LAYOUT, body_of, identity, signed


@pytest.fixture
async def setup(rng: np.random.Generator, tmp_path: Path) -> AsyncIterator[Setup]:
    async with merging(World(rng, tmp_path / "chunks")) as setup:
        yield setup


async def test_a_delta_far_longer_than_usual_waits_for_others(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone in a round under way it would be taken whole; beside another's it is clipped by that."""
    caplog.set_level("INFO")
    await setup.begin(setup.state)
    setup.core.clock = 3
    arrive(setup, *(delta_of(author, 2, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    before = setup.state.phi.copy()
    arrive(setup, delta_of(1, 4, 100_000))
    await until(lambda: "delta far beyond the usual; round 4 waits" in caplog.text)
    assert setup.core.rounds_behind == 0 and np.array_equal(setup.state.phi, before)
    arrive(setup, delta_of(2, 4, 1000))
    await setup.merged_all()
    assert setup.merged == [2, 4]
    assert np.abs(setup.state.phi - before).max() < 10_000


async def test_a_delta_of_far_more_tokens_than_usual_waits_for_others(setup: Setup) -> None:
    """Alone where a stretch of rounds begins it would be counted whole, and schedules with it be over."""
    await setup.begin(setup.state)
    setup.core.clock = 16
    arrive(setup, *(delta_of(author, 14, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    before = setup.loop.tokens
    arrive(setup, delta_of(1, 17, 1000, tokens=2**40))
    await until(lambda: setup.core.merges.is_held_back(17))
    assert (setup.merged, setup.loop.tokens) == ([14], before)
    arrive(setup, delta_of(2, 17, 1000))
    await setup.merged_all()
    assert setup.merged == [14, 17]
    assert setup.loop.tokens == before + (4 + 1) * 1000 // 2


async def test_what_the_swarm_had_when_we_came_waits_for_nobody(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all who have trained are gone, nobody's row says that those rounds are over."""
    caplog.set_level("INFO")
    setup.core.caught_up = False
    setup.core.clock = 3
    await setup.begin(setup.state)
    arrive(setup, *(delta_of(author, 2, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    arrive(setup, *(delta_of(2, round_, 100_000) for round_ in (4, 6, 8)))
    late = delta_of(2, 10, 100_000)
    setup.ledger.add(late[0])  # its payload is still to come
    await setup.merged_all()
    setup.core.caught_up = True
    await until(lambda: setup.loop.ready)
    arrive(setup, late)
    await until(lambda: sorted(setup.merged) == [2, 4, 6, 8, 10])
    assert "waits for deltas of others" not in caplog.text
    arrive(setup, delta_of(2, 12, 1_000_000))
    await until(lambda: "delta far beyond the usual; round 12 waits" in caplog.text)


async def test_what_waited_is_merged_once_the_swarm_has_gone_past_it(setup: Setup) -> None:
    await setup.begin(setup.state)
    setup.core.clock = 3
    arrive(setup, *(delta_of(author, 2, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    arrive(setup, delta_of(1, 4, 100_000))
    await until(lambda: setup.core.merges.is_held_back(4))
    assert setup.merged == [2]
    setup.core.clock = 5
    await until(lambda: setup.merged == [2, 4])


async def test_what_waited_is_merged_when_nobody_else_publishes_any_more(setup: Setup) -> None:
    """Training has ended: Phi is what the records say all the same, and on all nodes."""
    await setup.begin(setup.state)
    setup.core.clock = 3
    arrive(setup, *(delta_of(author, 2, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    await until(lambda: not setup.loop.unmerged)  # the schedule sees that we are ready after the merge
    arrive(setup, delta_of(1, 4, 100_000))
    await until(lambda: setup.core.merges.is_held_back(4))
    assert (setup.merged, setup.loop.unmerged, setup.core.rounds_behind) == ([2], 1, 0)
    setup.core.ahead += HELD_BACK_MIN_S
    await until(lambda: setup.merged == [2, 4])
    assert setup.loop.unmerged == 0


async def test_an_ordinary_delta_waits_for_nobody(setup: Setup) -> None:
    await setup.begin(setup.state)
    setup.core.clock = 3
    arrive(setup, *(delta_of(author, 2, 1000) for author in (1, 2, 3)))
    await setup.merged_all()
    arrive(setup, delta_of(1, 4, 3000))
    await until(lambda: setup.merged == [2, 4])


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
