"""`gossamer.node.trainer.data`: every node draws the data in an order of its own."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.node.trainer.data import Shard
from gossamer.protocol.errors import ConfigError


def test_an_epoch_is_every_sample_once_and_the_next_is_another_order() -> None:
    shard = Shard(100, node_id=b"a")
    first, second = list(shard), list(shard)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert list(Shard(100, node_id=b"a")) == first, "the same node, the same order"
    assert list(Shard(100, node_id=b"a", begun_at=5)) != first, "a resumed node draws afresh"
    assert list(Shard(100, node_id=b"b")) != first


def test_a_part_is_a_nodes_own_and_lasts() -> None:
    parts = [Shard(1000, node_id=node, fraction=0.25) for node in (b"a", b"b")]
    assert [len(part) for part in parts] == [250, 250]
    drawn = [set(part) for part in parts]
    assert len(drawn[0]) == 250 and drawn[0] != drawn[1]
    assert set(parts[0]) == drawn[0] == set(parts[0].indices.tolist())
    assert set(Shard(1000, node_id=b"a", fraction=0.25, begun_at=9)) == drawn[0]


def test_ranks_draw_equal_parts_without_overlap() -> None:
    shards = [Shard(103, node_id=b"a", rank=rank, ranks=4) for rank in range(4)]
    drawn = [list(shard) for shard in shards]
    assert [len(part) for part in drawn] == [len(shard) for shard in shards] == [25] * 4
    assert len(set().union(*drawn)) == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"fraction": 0.0},
        {"fraction": 1.5},
        {"fraction": np.array([0.5, 0.5])},
        {"size": 1, "ranks": 2},
    ],
)
def test_what_cannot_be(wrong: dict[str, object]) -> None:
    settings = {"size": 10, "node_id": b"a", **wrong}
    with pytest.raises(ConfigError):
        Shard(settings.pop("size"), **settings)  # type: ignore[arg-type]
