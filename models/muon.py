"""Muon: momentum SGD whose steps are orthogonalized, for the weight matrices inside a network.

A matrix's momentum is replaced by the nearest matrix with all singular values near 1, so that rare directions
are learnt as fast as frequent ones. Embeddings, heads and vectors are left to AdamW.

PyTorch's own Muon takes matrices one by one and always computes in bfloat16, which is many times slower on
processors that lack it. Here, matrices of the same shape are processed together, in the dtype that is fast on
their device.

Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), for the iteration
and its coefficients; Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982), section 2.2, for
steps of the usual length of AdamW's, and for weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# --- A task's inner optimizer, whether one or several, as a training loop uses it.

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class InnerOptimizer:
    """Steps all of a task's optimizers together, each group at a fraction of its own peak learning rate."""

    def __init__(self, built: Optimizers) -> None:
        """`built` is what `Task.build_optimizer` returned, at peak learning rates."""
        self.parts = (built,) if isinstance(built, torch.optim.Optimizer) else tuple(built)
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def scale_lr(self, factor: float) -> None:
        """Set every learning rate to this factor of its peak."""
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=False):  # groups may be added later
                group["lr"] = peak * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that drives singular values towards 1: steep at 0, and not exact at 1."""

ITERATIONS = 5
RMS = 0.2
"""RMS of an orthogonalized step's entries at learning rate 1: about that of AdamW's steps."""

EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon, for matrices only. Learning rates are of the same size as AdamW's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        """`params` as for any optimizer; each is floating-point [rows, columns]. Raises ValueError."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        shapes = [p.shape for group in self.param_groups for p in group["params"]]
        if wrong := next((shape for shape in shapes if len(shape) != 2), None):
            raise ValueError(f"a parameter of shape {list(wrong)} is no matrix")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[object, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = parameter.shape, parameter.dtype, parameter.device
                    by_shape.setdefault(key, []).append(parameter)
            for same in by_shape.values():
                steps = orthogonalized(torch.stack([self._momentum(p, group["momentum"]) for p in same]))
                length = group["lr"] * RMS * math.sqrt(max(same[0].shape))
                for parameter, step in zip(same, steps, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(step, alpha=-length)
        return loss

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum: where the running mean of gradients is about to be."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values of 0.7 to 1.2; zeros stay zeros.

    Takes and returns [count, rows, columns], of the same dtype.
    """
    rows, columns = matrices.shape[1:]
    x = matrices.to(_quick_dtype(matrices.device))
    if rows > columns:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if rows > columns else x).to(matrices.dtype)


def _quick_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if the hardware multiplies it fast, else float32; it is precise enough for the iteration.

    A CPU without AVX-512 BF16 emulates it, slower than float32. PyTorch tells this only by a private
    function; with a version that lacks it, we compute in float32.
    """
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    is_quick = device.type == "cuda" or (device.type == "cpu" and supported())
    return torch.bfloat16 if is_quick else torch.float32
