"""Tries a task out before a swarm is founded on it: is the model the same each time, does a step work?

Every check here is of something that fails late, or not at all, and then trains the wrong thing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import Batch, DataStream, Task, local_tensors, named_tensors

STREAM = DataStream(seed=0, node_id=b"trial")

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
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise TaskError(
                f"build_model made {name!r} {parameter.dtype} on {parameter.device}: build the model in"
                " float32 on the CPU, and use autocast in loss"
            )
        if parameter is second[name] or parameter.data_ptr() == second[name].data_ptr():
            raise TaskError(
                f"build_model returns the same model each time, or parts of it ({name!r}): build a new one"
            )
    # Frozen parameters and buffers are not shared: if they differed, nodes would train different functions.
    for tensors, others in ((first, second), (local_tensors(model, first), local_tensors(again, first))):
        for name, tensor in tensors.items():
            if not _are_same_bits(tensor, others[name]):
                raise TaskError(
                    f"build_model gives different values for {name!r} each time it is called with the same"
                    " seed: draw them from torch's generator, or from one that you seed, or load them from a"
                    " file"
                )
    return again


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits, so that NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def try_step(task: Task, model: nn.Module, batch: Batch) -> None:
    """Take one inner step, and evaluate; `model` is changed by it.

    Raises TaskError for the first thing that does not work.
    """
    tensors = named_tensors(model)
    optimizer = InnerOptimizer(task.build_optimizer(model))
    given = {id(p) for part in optimizer.parts for group in part.param_groups for p in group["params"]}
    if given.isdisjoint(id(parameter) for _, parameter in tensors):
        raise TaskError(
            "build_optimizer returned an optimizer for other parameters: give it model.parameters()"
        )
    _check_same("build_optimizer", model, tensors)
    tokens: object = task.tokens(batch)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= 2**40:
        raise TaskError(f"tokens returned {tokens!r:.60}: return a whole number from 1 to 2**40")
    loss: object = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise TaskError(f"loss returned {loss!r:.60}: return a scalar tensor with a gradient, the mean loss")
    if not torch.isfinite(loss):
        raise TaskError(f"the loss of the first batch is {loss.item()}: it should be finite")
    loss.backward()
    _check_same("loss", model, tensors)
    if all(parameter.grad is None for _, parameter in tensors):
        raise TaskError("no parameter has a gradient after the backward pass: does the loss use the model?")
    optimizer.step()
    before = [parameter.detach().clone() for _, parameter in tensors]
    held_out = task.evaluate(model)
    _check_same("evaluate", model, tensors)
    for (name, parameter), was in zip(tensors, before, strict=True):
        if not torch.allclose(parameter, was, *_ROUNDING, equal_nan=True):
            raise TaskError(f"evaluate changes {name!r}: a node would publish that as what it has learnt")
    if not math.isfinite(held_out):
        raise TaskError(f"the held-out loss after one step is {held_out}: it should be finite")


def _check_same(method: str, model: nn.Module, tensors: list[tuple[str, nn.Parameter]]) -> None:
    """Raise TaskError if a method of a task has replaced the model's parameters."""
    now = dict(named_tensors(model, frozen=True))  # a trained parameter may be frozen for a while
    for name, parameter in tensors:
        if now.get(name) is not parameter:
            raise TaskError(f"{method} replaces {name!r}: change the parameter's values in place instead")
