"""Which samples a node draws of the data that the whole swarm goes through."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gossamer.node.trainer.data import DrawnShard
from gossamer.node.trainer.draws import Draws, Order, Walk
from gossamer.protocol.blocks import runs_in
from gossamer.protocol.history.data_claims import Taken
from gossamer.protocol.manifest import DataSection
from tests.node.epochs import run


def draws(samples: int = 96, blocks: int = 24, rank: int = 0, ranks: int = 1) -> Draws:
    return Draws(DataSection(samples=samples, blocks=blocks), b"s" * 32, Walk(blocks, 1, rank, ranks))


def claimed(drawn: Draws, upto: int = 1 << 30) -> list[int]:
    """The blocks that are claimed by a delta now."""
    _, data = drawn.claim(upto)
    return [block for first, stop in runs_in(data) for block in range(first, stop)]


@pytest.mark.parametrize("samples", [1, 2, 97, 4096, 10_001])
def test_an_order_has_every_sample_once_and_each_epoch_another(samples: int):
    orders = [Order(samples, b"seed", epoch).part(0, samples) for epoch in (0, 1)]
    assert all((np.sort(order) == np.arange(samples)).all() for order in orders)
    assert samples < 97 or (orders[0] != orders[1]).mean() > 0.9
    assert samples < 97 or abs(np.corrcoef(orders[0], np.arange(samples))[0, 1]) < 0.3
    at = samples // 3
    assert (Order(samples, b"seed", 0).part(at, samples) == orders[0][at:]).all()


def test_a_walk_takes_what_nobody_has_and_then_the_next_epoch():
    walk = Walk(10, 1)
    claimed_now = np.zeros(10, np.bool_)
    claimed_now[3:6] = True
    walk.learn(Taken(4, claimed_now, np.zeros(10, np.bool_), 0, 0))
    found = [walk.draw() for _ in range(17)]
    assert Counter(found[:7]) == Counter((4, block) for block in (0, 1, 2, 6, 7, 8, 9))
    assert Counter(found[7:]) == Counter((5, block) for block in range(10))
    walk.learn(Taken(5, np.zeros(10, np.bool_), np.zeros(10, np.bool_), 0, 0))
    assert walk.draw()[0] == 6, "all of epoch 5 is drawn here already"


def test_a_walk_goes_on_although_what_it_drew_was_lost():
    """A delta that was never merged, say: nothing is left, and nothing gets claimed."""
    walk = Walk(10, 1)
    assert {walk.draw() for _ in range(20)} == {(epoch, block) for epoch in (0, 1) for block in range(10)}
    assert Counter(epoch for epoch, _ in (walk.draw() for _ in range(9)))[0] >= 8


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_has_fetched_and_not_trained_on_is_not_claimed(workers: int):
    if workers and "jax" in sys.modules:
        pytest.skip("another test has begun JAX in this process, which may not fork any more")
    drawn, seen, steps = draws(), Counter[int](), 0
    dataset = TensorDataset(torch.arange(96))
    loader = DataLoader(
        dataset, batch_size=3, sampler=DrawnShard(drawn), num_workers=workers, persistent_workers=workers > 0
    )
    order = Order(96, b"s" * 32, 0)
    for (batch,) in loader:
        steps += 1
        seen.update(batch.tolist())
        drawn.stepped(steps)
        blocks = [block for _, (_, block) in drawn.trained]
        trained = {sample for block in blocks for sample in order.part(4 * block, 4 * block + 4).tolist()}
        assert trained <= set(seen)
        if steps == 20:
            break
    assert len(blocks) >= 14, "of the 15 that 60 samples fill"
    assert claimed(drawn, upto=7) == sorted(blocks[:5]), "7 steps on 3 samples each: 5 blocks and one sample"
    for (batch,) in loader:  # the rest of what was drawn then is drawn again
        steps += 1
        seen.update(batch.tolist())
        drawn.stepped(steps)
    assert len(seen) == 96


def test_what_was_not_published_is_drawn_again():
    drawn = draws()
    items = drawn.items(lambda sample: (sample,))
    first = []
    for step in range(1, 4):
        first += [next(items) for _ in range(4)]
        drawn.stepped(step)
    assert len(drawn.trained) == 2
    drawn.dropped()
    assert claimed(drawn) == []
    assert set(first[:8]) <= {next(items) for _ in range(96 - 4)}


def test_ranks_draw_in_parts_of_their_own_and_files_count_once_they_are_read():
    teams = [draws(rank=rank, ranks=2) for rank in (0, 1)]
    drawn = [[next(items) for _ in range(48)] for items in (one.items(lambda n: (n,)) for one in teams)]
    assert len({*drawn[0], *drawn[1]}) == 96
    files = draws(samples=6, blocks=6)
    lines = files.items(lambda file: [f"{file}:{line}" for line in range(5)])
    for step in range(1, 4):
        assert len([next(lines) for _ in range(4)]) == 4
        files.stepped(step)
    assert len(claimed(files)) == 2, "12 lines: two files, and the beginning of a third"


def test_a_calm_swarm_sees_each_sample_once():
    found = run(8, 120)
    assert found.seen >= 0.99
    assert found.again <= 0.01
    assert found.bytes_max <= 20, "of a payload's 16 kB at a million parameters"


def test_crashes_joins_and_unequal_speeds_lose_nothing():
    found = run(8, 120, speeds=(1, 1, 0.5, 0.25), crash_every=12, blocks=4096)
    assert found.seen >= 0.98
    assert found.again <= 0.2


def test_a_partition_costs_what_both_halves_drew_in_common():
    found = run(8, 300, split=(75, 150))
    assert found.common > 0.02
    assert found.seen >= 0.98
    assert found.again <= found.common + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [64, 256])
def test_large_swarms_do_as_well(nodes: int):
    found = run(nodes, 200, blocks=16_384, crash_every=12, speeds=(1, 1, 0.5, 0.25))
    assert found.seen >= 0.98
    assert found.again <= 0.1
