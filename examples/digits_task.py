"""Handwritten digits as a task: what to train, without a loop. Gossamer's own trainer runs it.

    gossamer init digits.toml --task digits_task.py:Digits --option width=64
    gossamer bootstrap digits.toml --listen 127.0.0.1:7700
    gossamer node --join 127.0.0.1:7700 --task digits_task.py:Digits     # on each machine

The 1,797 images come with scikit-learn (``pip install scikit-learn``). The bootstrap peer needs neither them
nor this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.models.task import DataStream, Task

HELD_OUT = 300

Batch = tuple[Tensor, Tensor]
"""Images, float32[n, 1, 8, 8] from 0 to 1, and their digits, int64[n]."""


class Digits(Task):
    @dataclass(frozen=True)
    class Options:
        """Options that all nodes agree on, set by `gossamer init --option`."""

        width: int = 32
        batch_size: int = 32
        lr: float = 2e-3

    def __init__(self, options: Options, data: Any = ()) -> None:
        super().__init__(options, data)
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)

    def build_model(self, seed: int) -> nn.Module:
        width = self.options.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 10),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.options.lr)

    def batches(self, stream: DataStream) -> Iterator[Batch]:
        """One pass over the training images, in this node's own order, and in another after a restart."""
        numbers = stream.generator(stream.skip_batches)
        order = torch.from_numpy(numbers.permutation(len(self.images) - HELD_OUT))
        for chosen in order.split(self.options.batch_size):
            yield self.images[chosen], self.labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = next(model.parameters()).device
        images, labels = batch
        return cross_entropy(model(images.to(device)), labels.to(device))

    def tokens(self, batch: Batch) -> int:
        return len(batch[0])

    def evaluate(self, model: nn.Module) -> float:
        return float(self.loss(model, (self.images[-HELD_OUT:], self.labels[-HELD_OUT:])))
