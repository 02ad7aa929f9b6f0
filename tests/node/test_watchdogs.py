"""Parameters that are no longer as at the last step boundary, and a loop that trains nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gossamer.node.trainer.watchdogs import EMPTY_TURNS, IdleWatch, StepBoundary

FRAGMENTS = 3


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1, bias=False))


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        make(list(model.parameters())).step()

    return step


def swapped_by_data(model: nn.Module) -> None:
    """As Lightning's EMAWeightAveraging does it, whose changes torch does not count."""
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))


def replaced_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def one_value(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1


CHANGES = [
    stepped(torch.optim.SGD),
    stepped(torch.optim.AdamW),
    stepped(lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    swapped_by_data,
    replaced_data,
    one_value,
    lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_have_changed_since_the_boundary_are_found(
    change: Callable[[nn.Module], object],
) -> None:
    model = model_of()
    boundary = StepBoundary(list(model.parameters()))
    assert boundary.holds
    model(torch.ones(2, 6)).sum().backward()
    assert boundary.holds, "gradients are not parameters"
    change(model)
    assert not boundary.holds
    boundary.mark()
    assert boundary.holds


def test_parameters_of_any_kind_can_be_watched() -> None:
    tensors = [torch.zeros(3, 4).t(), torch.zeros(()), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0)]
    boundary = StepBoundary(tensors)
    assert boundary.holds and StepBoundary([]).holds
    tensors[1].fill_(float("nan"))
    boundary.mark()
    assert not boundary.holds, "what is not a number cannot be compared, nor is it worth publishing"


def publish(watch: IdleWatch, *changed: bool) -> None:
    for round_, has_changed in enumerate(changed):
        watch.published(round_ % FRAGMENTS, has_changed)


def test_a_loop_that_never_trains_is_warned_after_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    watch = IdleWatch(FRAGMENTS)
    publish(watch, False, False)
    assert not caplog.text
    publish(watch, *[False] * (3 * EMPTY_TURNS * FRAGMENTS))
    assert caplog.text.count("no parameter has changed since training began") == len(caplog.records) == 1


def test_a_loop_that_trains_no_more_is_warned_after_many(caplog: pytest.LogCaptureFixture) -> None:
    """A notebook whose cell that makes the model is run again, and not the one that attaches it."""
    watch, many = IdleWatch(FRAGMENTS), EMPTY_TURNS * FRAGMENTS
    publish(watch, True, *[False] * (many - 1), True, *[False] * (many - 1))
    assert not caplog.text, "it trained in between"
    publish(watch, *[False] * (3 * many))
    warning = f"no parameter has changed for {many} rounds, so nothing is published"
    assert caplog.text.count(warning) == len(caplog.records) == 1
