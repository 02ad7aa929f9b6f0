"""Windows: each has those of its own steps."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.node.trainer.fragments import Losses


@pytest.mark.parametrize("kind", [float, lambda loss: torch.tensor(float(loss))])
def test_each_window_has_the_losses_of_its_own_steps(kind) -> None:
    losses = Losses(3)
    begun = [0, 0, 0]
    for step in range(1, 20):
        losses.add(kind(2**step % 101))
        if step % 4 == 0:
            index = step // 4 % 3
            expected = sum(2**i % 101 for i in range(begun[index] + 1, step + 1))
            assert float(losses.close(index)) == expected
            begun[index] = step


def test_two_windows_may_close_at_the_same_step() -> None:
    losses = Losses(2)
    losses.add(1.5)
    assert (losses.close(0), losses.close(1)) == (1.5, 1.5)
    assert (losses.close(0), losses.close(1)) == (0.0, 0.0)


def test_a_loss_may_come_from_another_device_at_each_step() -> None:
    """As that of a model that is spread over several."""
    losses = Losses(2)
    with FakeTensorMode():
        for device in ("xpu:0", "xpu:1"):  # of a kind that no machine with these tests is likely to have
            losses.add(torch.ones((), device=device))
        assert losses.close(0).device == torch.device("xpu:0")
        losses.add(torch.ones((), device="xpu:1"))
        assert losses.close(1).device == torch.device("xpu:0")
