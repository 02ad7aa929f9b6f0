"""Fake GPUs: training on the CPU that takes the code paths of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from gossamer.node.trainer import phi_updates
from gossamer.node.trainer.outer import FragmentState


class Late:
    """Is reached when it has been asked for a few times, or waited for."""

    def __init__(self, _: torch.device) -> None:
        self._left = 3

    def query(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def synchronize(self) -> None:
        self._left = 0


def pretend(set_: Any = setattr) -> None:
    """Process tensors on the CPU as on a GPU that takes some steps to copy; `set_` sets an attribute."""
    set_(FragmentState, "gpu", torch.device("cpu"))
    set_(phi_updates, "_pin", lambda *_: None)
    set_(phi_updates, "_end_of_work", Late)
