"""Tries a task out before a swarm is founded on it: is the model the same each time, does a step work?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from gossamer.models.errors import TaskError
from gossamer.models.guarded import explaining
from gossamer.models.inner_optimizer import InnerOptimizer
from gossamer.models.task import Batch, DataStream, Task, local_tensors, named_tensors

_STREAM = DataStream(seed=0, node_id=b"trial")

_ROUNDING = (1e-3, 1e-6)
"""Relative and absolute tolerance: an evaluation may swap parameters for averages and back, with rounding."""


def build_again(task: Task, seed: int, model: nn.Module) -> nn.Module:
    """Build a second model from the same seed.

    Raises TaskError if it is not bit for bit like `model`, or shares parameters with it.
    """
    again = task.build_model(seed)
    first, second = dict(named_tensors(model)), dict(named_tensors(again))
    if first.keys() != second.keys():
        name = min(first.keys() ^ second.keys())
        raise TaskError(f"build_model returns different parameters each time: only one of two has {name!r}")
    for name, parameter in first.items():
        if parameter is second[name] or _are_one_memory(parameter, second[name]):
            raise TaskError(
                f"build_model returns the same model each time, or parts of it ({name!r}): build a new one"
            )
        if not torch.equal(parameter, second[name]):
            raise TaskError(
                f"build_model gives different values for {name!r} each time it is called with the same seed:"
                " draw them from torch's generator, or from one that you seed"
            )
    _check_local(local_tensors(model, first), local_tensors(again, first))
    return again


def _check_local(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """Raise TaskError if frozen parameters or buffers differ: nodes would train different functions."""
    for name, tensor in first.items():
        if name in second and not _are_same_bits(tensor, second[name]):
            raise TaskError(
                f"build_model gives different values for {name!r} each time it is called with the same seed,"
                " and what is not trained is not shared: draw them from torch's generator, or from one that"
                " you seed, or load them from a file"
            )


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals NaN. Tensors without plain bytes (some quantised weights) pass."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        views = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return torch.equal(*views)
    except (RuntimeError, NotImplementedError):
        return True


def _are_one_memory(one: nn.Parameter, other: nn.Parameter) -> bool:
    return one.numel() > 0 and one.layout is torch.strided and one.data_ptr() == other.data_ptr()


def first_batch(task: Task) -> Batch:
    """The first batch of this machine's data. Raises TaskError."""
    return next(task.batches(_STREAM))


def try_step(task: Task, model: nn.Module, batch: Batch) -> None:
    """Take one inner step, and evaluate; `model` is changed by it.

    Raises:
        TaskError: the first thing that does not work.
    """
    tensors = named_tensors(model)
    optimizer = InnerOptimizer(task.build_optimizer(model))
    _check_same("build_optimizer", model, tensors)
    task.tokens(batch)
    loss = task.loss(model, batch)
    if not torch.isfinite(loss):
        raise TaskError(f"the loss of the first batch is {loss.item()}: it should be finite")
    with explaining(task, "in the backward pass"):
        loss.backward()
    _check_same("loss", model, tensors)
    if all(parameter.grad is None for _, parameter in tensors):
        raise TaskError("no parameter has a gradient after the backward pass: does the loss use the model?")
    _check_finite("gradient", [(name, p.grad) for name, p in tensors if p.grad is not None])
    with explaining(task, "in the optimizer's step"):
        optimizer.step()
    _check_finite("value after one step", tensors)
    task.lr_scale(0)
    before = [parameter.detach().clone() for _, parameter in tensors]
    held_out = task.evaluate(model)
    _check_same("evaluate", model, tensors)
    for (name, parameter), was in zip(tensors, before, strict=True):
        if not torch.allclose(parameter, was, *_ROUNDING):
            raise TaskError(f"evaluate changes {name!r}: a node would publish that as what it has learnt")
    if not math.isfinite(held_out):
        raise TaskError(f"the held-out loss after one step is {held_out}: it should be finite")


def _check_same(method: str, model: nn.Module, tensors: list[tuple[str, nn.Parameter]]) -> None:
    """Raise TaskError if a method of a task has replaced the model's parameters."""
    now = dict(named_tensors(model, frozen=True))  # a trained parameter may be frozen for a while
    for name, parameter in tensors:
        if now.get(name) is not parameter:
            raise TaskError(f"{method} replaces {name!r}: change the parameter's values in place instead")


def _check_finite(
    what: str, tensors: list[tuple[str, torch.Tensor]] | list[tuple[str, nn.Parameter]]
) -> None:
    for name, tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if not torch.isfinite(values).all():
            raise TaskError(f"the {what} of {name!r} is not finite")
