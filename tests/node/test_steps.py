"""`gossamer.node.trainer.peer`: the numbers that loops count in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.node.trainer.peer import mean_loss, token_count


@pytest.mark.parametrize(
    "tokens",
    [7, 7.0, np.int64(7), np.float32(7), torch.tensor(7), torch.tensor([7]), torch.tensor(7.0)],
)
def test_tokens_in_any_kind_of_number(tokens: Any) -> None:
    count = token_count(tokens)
    assert type(count) is int and count == 7


@pytest.mark.parametrize(
    "tokens",
    [
        0,
        -1,
        1.5,
        math.nan,
        math.inf,
        None,
        "7",
        b"7",
        torch.tensor([7, 7]),
        torch.tensor(2.5),
        2**41,
        10**300,
    ],
)
def test_tokens_that_are_none(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens is .*a whole number from 1 to 2\*\*40") as found:
        token_count(tokens)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])])
def test_a_loss_in_any_kind_of_number(loss: Any) -> None:
    assert float(mean_loss(loss)) == 0.5


def test_a_loss_keeps_its_device_and_loses_its_graph() -> None:
    loss = mean_loss(torch.ones((), requires_grad=True) * 2)
    assert isinstance(loss, torch.Tensor) and not loss.requires_grad
    assert math.isnan(float(mean_loss(math.nan))), "there may be none"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, r"loss is None: .*float\('nan'\) if there is none"),
        ("low", "loss is 'low'"),
        (10**400, "loss is 1000"),
        (torch.ones(2), r"loss is torch\.float32 of shape \[2\]: step takes one number"),
        (torch.ones(0), r"of shape \[0\]"),
        (torch.ones((), dtype=torch.complex64), r"loss is torch\.complex64"),
        (torch.ones((), device="meta"), r"loss is torch\.float32 of shape \[\]"),
        (torch.ones(1).to_sparse(), r"loss is torch\.float32 of shape \[1\]"),
    ],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_loss(loss)
