"""A task's inner optimizer, whether one or several, as a training loop uses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
