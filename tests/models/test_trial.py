"""`gossamer.models.checking`: what is found before a swarm is founded on a task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.models import TaskError
from gossamer.models.task_file import kind_of, task_errors
from gossamer.models.trial import STREAM, build_again, try_step
from tests.models.own_tasks import write_task

MODEL = "return nn.Sequential(nn.Linear(8, self.options.width), nn.Linear(self.options.width, 1))"
EVALUATE = "return float(self.loss(model, (inputs, inputs.sum(1, keepdim=True))))"
LOSS = "return (model(inputs) - targets).square().mean()"


def try_out(folder: Path, old: str = "", new: str = "") -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model, and the one that the step was tried on."""
    task = kind_of(write_task(folder, old, new)).task({})
    model = task.build_model(3)
    again = build_again(task, 3, model)
    with task_errors("the trial step"):
        try_step(task, again, next(task.batches(STREAM)))
    return model, again


def test_a_good_task_takes_its_step_on_a_model_of_its_own(task_folder: Path) -> None:
    model, tried = try_out(task_folder)
    assert not torch.equal(model[0].weight, tried[0].weight)
    untouched = kind_of(write_task(task_folder)).task({}).build_model(3)
    assert torch.equal(model[0].weight, untouched[0].weight)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            MODEL,
            "import random; m = nn.Linear(8, 1); nn.init.constant_(m.weight, random.random()); return m",
            "build_model gives different values for 'weight' each time it is called with the same seed",
        ),
        (
            MODEL,
            "self.n = getattr(self, 'n', 0) + 1; return nn.Linear(8, 1, bias=self.n > 1)",
            "build_model returns different parameters each time: only one of two has 'bias'",
        ),
        (
            MODEL,
            "self.n = getattr(self, 'n', 0) + 1; return nn.Linear(8, self.n)",
            "different values for 'weight'",
        ),
        (
            MODEL,
            "self.m = getattr(self, 'm', None) or nn.Linear(8, 1); return self.m",
            "build_model returns the same model each time, or parts of it ('weight'): build a new one",
        ),
        (
            MODEL,
            "self.w = getattr(self, 'w', torch.ones(1, 8)); m = nn.Linear(8, 1); m.weight.data = self.w;"
            " return m",
            "build_model returns the same model each time, or parts of it ('weight'): build a new one",
        ),
        (
            MODEL,
            "import random; m = nn.Linear(8, 1); nn.init.constant_(m.bias, random.random());"
            " m.bias.requires_grad_(False); return m",
            "different values for 'bias' each time it is called with the same seed",
        ),
        (
            MODEL,
            "import random; m = nn.Linear(8, 1); m.register_buffer('p', torch.tensor(random.random()));"
            " return m",
            "different values for 'p' each time it is called with the same seed",
        ),
        (LOSS, "return model(inputs).mean() / 0", "the loss of the first batch is "),
        (LOSS, "return torch.ones((), requires_grad=True).square()", "no parameter has a gradient"),
        (
            LOSS,
            "return model(inputs).mean() * 0 + model[0].weight.sub(model[0].weight).sqrt().sum()",
            "the held-out loss after one step is nan",
        ),
        ("lr: float = 0.1", "lr: float = 3e38", "the held-out loss after one step is "),
        (EVALUATE, "return float('nan')", "the held-out loss after one step is nan: it should be finite"),
        (LOSS, "x = model(inputs).exp(); x.add_(1); return x.mean()", "the trial step: RuntimeError"),
        ("torch.optim.SGD(", "torch.optim.LBFGS(", "the trial step: TypeError"),
        (
            LOSS,
            f"model[0] = nn.Linear(8, self.options.width); {LOSS}",
            "loss replaces '0.weight': change the",
        ),
        (
            EVALUATE,
            f"model[0].weight.data.mul_(0.5); {EVALUATE}",
            "evaluate changes '0.weight': a node would",
        ),
        (
            EVALUATE,
            f"model[1] = nn.Linear(self.options.width, 1); {EVALUATE}",
            "evaluate replaces '1.weight'",
        ),
        ("inputs = torch.eye(8)", "inputs = torch.eye(7)", "own_line.py:"),
        ("return len(batch[0])", "return -1", "tokens returned -1"),
    ],
)
def test_what_does_not_work(task_folder: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        try_out(task_folder, old, new)
    assert message in str(caught.value) and "\n" not in str(caught.value)


SPARSE = """class Rows(nn.Module):
            def __init__(self):
                super().__init__()
                self.rows = nn.Embedding(8, 1, sparse=True)

            def forward(self, inputs):
                return inputs @ self.rows(torch.arange(8))

        return Rows()"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LOSS, f"model[0].weight.requires_grad_(False); {LOSS}"),
        ("torch.optim.SGD(", "model[0].requires_grad_(False) and torch.optim.SGD("),
        (EVALUATE, f"model[0].weight.data.mul_(1.3).mul_(1 / 1.3); {EVALUATE}"),
    ],
)
def test_layers_may_be_frozen_and_averages_swapped_in_and_out(task_folder: Path, old: str, new: str) -> None:
    try_out(task_folder, old, new)


@pytest.mark.parametrize("buffer", ["torch.rand(3)", "torch.tensor(torch.nan)", "torch.zeros(0)"])
def test_buffers_may_hold_what_is_alike_each_time(task_folder: Path, buffer: str) -> None:
    made = f"m = nn.Linear(8, 1); m.register_buffer('p', {buffer}); return m"
    try_out(task_folder, MODEL, made)


def test_what_a_state_dict_does_not_hold_may_be_any_memory(task_folder: Path) -> None:
    scratch = "m.register_buffer('p', torch.tensor(random.random()), persistent=False)"
    try_out(task_folder, MODEL, f"import random; m = nn.Linear(8, 1); {scratch}; return m")


def test_gradients_may_be_sparse(task_folder: Path) -> None:
    model, tried = try_out(task_folder, MODEL, SPARSE)
    assert not torch.equal(model.rows.weight, tried.rows.weight)
