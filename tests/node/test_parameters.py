"""`parameters`: models that no swarm can hold, models that change under their peer, and step boundaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.bootstrap.manifests import describe
from gossamer.models.task import named_tensors
from gossamer.node.trainer import parameters
from gossamer.node.trainer.parameters import (
    Binding,
    StepBoundary,
    check_fits,
    checked_optimizers,
    parameters_of,
)
from gossamer.protocol import limits
from gossamer.protocol.errors import ConfigError


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def holding(values: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.extra = nn.Parameter(values)
    return model


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return two_layers()


class FullyShardedDataParallel(nn.Linear):
    """By its name, for the real one wants a process group."""

    def __init__(self) -> None:
        super().__init__(4, 4)


def overlapping() -> nn.Module:
    """As parts of a flat buffer whose offsets somebody has got wrong."""
    flat = torch.ones(10)
    model = holding(flat[:6])
    model.other = nn.Parameter(flat[5:])
    return model


class Wrapping(torch.Tensor):
    """What holds its values in another tensor."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(arg.values if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


def untied() -> nn.Module:
    """As somebody ties weights who has not read how: two parameters, one memory."""
    model = two_layers()
    model[0].weight = nn.Parameter(model[0].weight.data)
    model.head = nn.Linear(4, 4)
    model.head.weight = nn.Parameter(model[0].weight.data)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(4, 4, device="meta"), r"'weight' has no values yet: run one batch"),
        (lambda: nn.LazyLinear(4), r"'weight' has no values yet"),
        (
            lambda: nn.Linear(4, 4, dtype=torch.complex64),
            r"'weight' is torch\.complex64; only .* can be trained",
        ),
        (lambda: holding(torch.zeros(0, 3)), r"'extra' has no elements, its shape is \[0, 3\]: freeze it"),
        (lambda: holding(torch.ones(1).expand(8)), r"'extra' is expanded, .*: clone\(\) it"),
        (lambda: holding(torch.ones(2, 9)[:, :1].expand(2, 8)), r"'extra' is expanded, .*: clone\(\) it"),
        (lambda: holding(torch.ones(5).unfold(0, 3, 1)), r"'extra' is expanded, .*: clone\(\) it"),
        (lambda: holding(torch.zeros((1,) * 9)), r"'extra': shape .* is impossible: at most 8 dimensions"),
        (lambda: holding(torch.full((2,), 64.0)), r"'extra': .* outside \+-64"),
        (untied, r"'0\.weight' and 'head\.weight' are two parameters with the same memory: tie them"),
        (
            lambda: holding(torch.eye(3).to_sparse()),
            "'extra' is sparse or nested; only dense tensors can be trained",
        ),
        (
            lambda: holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
            "'extra' is sparse or nested; only dense tensors can be trained",
        ),
        (overlapping, "'extra' and 'other' are two parameters with the same memory"),
        (lambda: holding(Wrapping(torch.ones(2))), "'extra' is a Wrapping, whose values only that class"),
        (
            made_in_inference_mode,
            r"'0\.weight' was made in torch\.inference_mode\(\), .*: make it outside",
        ),
        (lambda: two_layers().requires_grad_(False), "there is nothing to train"),
        (lambda: nn.ModuleList([FullyShardedDataParallel()]), "flattens parameters: use fully_shard"),
        (
            lambda: nn.ParameterList([torch.ones(1) for _ in range(limits.TENSORS_MAX + 1)]),
            "trains 20001 tensors, but a manifest lists 20000 at most: stack small",
        ),
        (lambda: [two_layers()], r"the model is a list: give a torch\.nn\.Module, or several in"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:The PyTorch API of nested tensors")
def test_what_no_swarm_can_hold_is_said_before_there_is_one(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(make(), name="t")


def test_a_sharded_model_is_described_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real DTensor wants a process group."""
    model = two_layers()
    for module in (parameters, manifests):
        monkeypatch.setattr(module, "is_sharded", lambda tensor: tensor is model[1].weight)
    with pytest.raises(ConfigError, match=r"'1\.weight' is sharded: describe the model before it is"):
        describe(model, name="t")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_too_many() -> None:
    """It has no shape that could be said."""
    described = describe(two_layers(), name="t")
    model = two_layers().append(nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"trains tensor '2\.weight', which the manifest does not list"):
        check_fits(parameters_of(model), described)


def resize(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(8, 4)


def move(model: nn.Sequential) -> None:
    model.to("meta")


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def infer(model: nn.Sequential) -> None:
    with torch.inference_mode():
        model[0].weight.data = torch.zeros(4, 4)


def tie(model: nn.Sequential) -> None:
    model[0].bias.data = model[0].weight.data[0]


def overlap(model: nn.Sequential) -> None:
    model[0].bias.data = model[0].weight.data[1]


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1))


def expand(model: nn.Sequential) -> None:
    model[0].weight.data = torch.ones(1).expand(4, 4)


def remove(model: nn.Sequential) -> None:
    del model[0]


def unfreeze(model: nn.Sequential) -> None:
    model[1].requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (resize, r"'0\.weight' was moved, resized or replaced"),
        (move, r"'0\.weight' was moved, resized or replaced"),
        (assign, r"'0\.weight' was moved, resized or replaced.*without assign=True"),
        (infer, r"'0\.weight' was made in torch\.inference_mode"),
        (tie, r"'0\.bias' and '0\.weight' are two parameters with the same memory: tie them"),
        (overlap, r"'0\.weight' and '0\.bias' are two parameters with the same memory"),
        (expand, r"'0\.weight' is expanded, so that elements share memory: clone\(\) it"),
        (add, r"'2\.weight' now requires a gradient, but is not in the manifest"),
        (remove, r"'0\.weight' was moved, resized or replaced"),
        (nn.Module.double, r"'0\.weight' was moved, resized or replaced, or has another dtype"),
        (unfreeze, r"'1\.weight' now requires a gradient.*describe the model with all"),
    ],
)
def test_a_model_that_changes_under_its_peer(change: Callable[[nn.Sequential], None], message: str) -> None:
    model = two_layers()
    model[1].requires_grad_(False)
    binding = Binding(model, describe(model, name="t"))
    binding.check()
    change(model)
    with pytest.raises(ConfigError, match=message):
        binding.check(always=True)


def test_what_may_change_under_a_peer() -> None:
    model = two_layers()
    binding = Binding(model, describe(model, name="t"))
    model[0].requires_grad_(False)
    model.load_state_dict(two_layers().state_dict())
    model[0].weight.data = torch.zeros(4, 4)
    model.eval()
    binding.check(always=True)


def test_a_model_that_has_not_changed_is_checked_without_looking_up_its_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    binding = Binding(model, describe(model, name="t"))
    binding.check(always=True)
    lookups: list[nn.Module] = []
    monkeypatch.setattr(
        parameters, "named_tensors", lambda model, frozen: lookups.append(model) or named_tensors(model)
    )
    binding.check(always=True)
    assert not lookups, "they take longest, and thousands of them would hold up a step"
    model[999].weight.data = torch.zeros(2, 2)
    binding.check(always=True)
    assert lookups == [model]


def test_what_the_manifest_lists_may_be_frozen_for_a_while() -> None:
    model = two_layers()
    manifest = describe(model, name="t")
    model[0].requires_grad_(False)
    check_fits(parameters_of(model), manifest)
    binding = Binding(model, manifest)
    model[0].requires_grad_(True)
    binding.check(always=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda _: None, "the optimizer is a NoneType: give a torch.optim.Optimizer"),
        (lambda model: model.parameters(), "the optimizer is a Parameter"),
        (lambda _: "sgd", "the optimizer is a str"),
        (
            lambda _: torch.optim.SGD(two_layers().parameters(), lr=0.1),
            r"has none of the model's trainable .*; give \[\] if the backward pass steps without it",
        ),
    ],
)
def test_optimizers_that_train_nothing_of_the_model(given: Callable[[nn.Module], Any], message: str) -> None:
    model = two_layers()
    with pytest.raises(ConfigError, match=message):
        checked_optimizers(given(model), parameters_of(model))


def test_one_optimizer_several_or_none() -> None:
    model = two_layers()
    one, two = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    assert checked_optimizers(one, parameters_of(model)) == (one,)
    assert checked_optimizers([one, two], parameters_of(model)) == (one, two)
    assert checked_optimizers([], parameters_of(model)) == (), "who steps by hand has nothing to keep"


# -- step boundaries


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
    model = two_layers()
    boundary = StepBoundary(list(model.parameters()))
    assert boundary.holds
    model(torch.ones(2, 4)).sum().backward()
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
