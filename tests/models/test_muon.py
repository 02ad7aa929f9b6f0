"""Muon: against PyTorch's own, and against what it is meant to do to singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer.models.muon import InnerOptimizer, Muon, orthogonalized

SHAPES = ((8, 8), (8, 8), (6, 16), (16, 6), (1, 5))


def parameters() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=random)) for shape in SHAPES]


def give_gradients(*many: list[nn.Parameter], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for same in zip(*many, strict=True):
        gradient = torch.randn(same[0].shape, generator=random)
        for parameter in same:
            parameter.grad = gradient.clone()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has none")
def test_it_does_what_pytorchs_does() -> None:
    ours, theirs, before = parameters(), parameters(), parameters()
    mine = Muon(ours, lr=0.01, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        give_gradients(ours, theirs, seed=seed)
        mine.step()
        reference.step()
    for our, their, old in zip(ours, theirs, before, strict=True):
        moved = (their - old).abs().mean()
        assert moved > 1e-3
        assert (our - their).abs().mean() < 0.05 * moved, "but for bfloat16, with which it computes"


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 48), (2, 48, 16)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalized(matrices)
    values = torch.linalg.svdvals(result)
    assert result.shape == matrices.shape and result.dtype == matrices.dtype
    assert values.max() < 1.3
    # The smallest of a square matrix may be too small to come all the way.
    assert values.quantile(0.2) > 0.6
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    nearest = u @ v
    cosine = (result * nearest).sum() / (result.norm() * nearest.norm())
    assert cosine > 0.95


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_it_computes_in_bfloat16_only_where_the_processor_does(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    matrices = torch.randn((1, 16, 16), generator=torch.Generator().manual_seed(0))
    result = orthogonalized(matrices)
    assert torch.equal(result, result.bfloat16().float()) == has_bfloat16


def test_zeros_and_missing_gradients_move_nothing() -> None:
    still, moving = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = Muon([still, moving], lr=0.1, weight_decay=0.0)
    moving.grad = torch.zeros(3, 3)
    optimizer.step()
    assert torch.equal(still, torch.ones(3, 3)) and torch.equal(moving, torch.ones(3, 3))


def test_a_closure_is_called_with_gradients() -> None:
    matrix = nn.Parameter(torch.eye(4))
    optimizer = Muon([matrix], lr=0.1)

    def closure() -> Tensor:
        loss = matrix.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert not torch.equal(matrix, torch.eye(4))


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a parameter of shape \[3\] is no matrix"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_several_optimizers_step_as_one() -> None:
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    inner = InnerOptimizer([torch.optim.SGD([one], lr=1.0), torch.optim.SGD([other], lr=0.1)])
    for parameter in (one, other):
        parameter.grad = torch.ones(1)
    inner.scale_lr(0.5)
    inner.step()
    assert one.item() == -0.5 and other.item() == pytest.approx(-0.05)
    inner.scale_lr(1.0)
    inner.step()
    assert one.item() == -1.5, "a factor is of the peak, not of what the rate happens to be"
    inner.zero_grad()
    assert one.grad is None and other.grad is None
