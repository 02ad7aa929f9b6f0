"""`gossamer.node.trainer.data`: factors by the swarm's tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.node.trainer.data import Schedule, constant, cosine, linear
from gossamer.node.trainer.peer import Standing
from gossamer.protocol.errors import ConfigError


def test_cosine() -> None:
    schedule = cosine(1_000, floor=0.1)
    assert [schedule(t) for t in (0, 500, 1_000, 10**12)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_linear() -> None:
    schedule = linear(1_100, warm_up_tokens=100)
    assert [schedule(t) for t in (100, 600, 1_100, 5_000)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    "schedule",
    [constant(warm_up_tokens=100), linear(200, warm_up_tokens=100), cosine(200, warm_up_tokens=100)],
)
def test_warm_up_rises_from_nearly_nothing_to_all(schedule: Schedule) -> None:
    values = [schedule(t) for t in range(0, 101, 10)]
    assert 0 < values[0] <= 0.01
    assert values == sorted(values)
    assert values[-1] == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: cosine(0),
        lambda: linear(10, warm_up_tokens=10),
        lambda: cosine(10, floor=1.5),
        lambda: constant(warm_up_tokens=-1),
    ],
)
def test_what_cannot_be(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_a_schedule_that_computes_in_tensors_gives_plain_factors() -> None:
    role: Any = SimpleNamespace(resumed=True, seen=SimpleNamespace(swarm_tokens=7))
    factor = Standing(nn.Linear(1, 1), role).lr_scale(lambda tokens: torch.tensor(tokens) / 14)  # type: ignore[arg-type,return-value]
    assert type(factor) is float and factor == 0.5


@pytest.mark.parametrize("nonsense", [None, float("nan"), float("inf"), -0.5, "1"])
def test_a_schedule_of_ones_own_that_gives_no_factor_is_said(nonsense: Any) -> None:
    role: Any = SimpleNamespace(resumed=True, seen=SimpleNamespace(swarm_tokens=7))
    standing = Standing(nn.Linear(1, 1), role)
    assert standing.lr_scale(lambda tokens: tokens / 14) == 0.5
    with pytest.raises(ValueError, match="it must return a factor of 0 or more"):
        standing.lr_scale(lambda _: nonsense)
    with pytest.raises(TypeError, match="a function of the swarm's tokens, not 1.0"):
        standing.lr_scale(1.0)  # type: ignore[arg-type]
