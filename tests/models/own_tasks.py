"""A small task in a file of its own, as a user would write it, and the same task with a mistake."""

from __future__ import annotations

import textwrap
from pathlib import Path

GOOD = textwrap.dedent('''
    """A line through the origin, in eight dimensions."""

    from dataclasses import dataclass

    import torch
    from torch import nn

    from gossamer.models.task import Task

    # HERE


    class Line(Task):
        @dataclass(frozen=True)
        class Options:
            width: int = 8
            lr: float = 0.1
            bias: bool = False
            note: str = "-"

            def __post_init__(self):
                if self.width > 64:
                    raise ValueError("width is 64 at most")

        def build_model(self, seed):
            return nn.Sequential(nn.Linear(8, self.options.width), nn.Linear(self.options.width, 1))

        def build_optimizer(self, model):
            return torch.optim.SGD(model.parameters(), lr=self.options.lr)

        def batches(self, stream):
            numbers = stream.generator(stream.skip_batches)
            for _ in range(4):
                inputs = torch.from_numpy(numbers.standard_normal((16, 8))).float()
                yield inputs, inputs.sum(1, keepdim=True)

        def loss(self, model, batch):
            inputs, targets = batch
            return (model(inputs) - targets).square().mean()

        def tokens(self, batch):
            return len(batch[0])

        def evaluate(self, model):
            inputs = torch.eye(8)
            return float(self.loss(model, (inputs, inputs.sum(1, keepdim=True))))
''').lstrip()


def write_task(folder: Path, old: str = "", new: str = "", *, name: str = "own_line.py") -> str:
    """Write the good task with `old` replaced by `new`; returns how a command line names it."""
    assert old in GOOD
    (folder / name).write_text(GOOD.replace(old, new, 1) if old else GOOD)
    return f"{folder / name}:Line"
