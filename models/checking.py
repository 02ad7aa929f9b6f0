"""A wrapper around a custom task, for init and the trainer: whatever goes wrong in the task is said in one
line.

An exception inside one of its methods becomes a `TaskError` that names the method, the file and the line.
What a method returns is checked, so that a mistake is reported where it is made and not three calls later.
`--debug` shows the traceback. Four things that are easily forgotten are done for the task: torch's generator
is seeded for `build_model` and restored, a model in eval mode is put into train mode, `evaluate` runs in eval
mode without gradient, and when `batches` ends, another pass begins.
"""

from __future__ import annotations

import contextlib
import math
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gossamer.models.errors import TaskError, in_one_line
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import Batch, DataStream, Task, evaluating, local_tensors, named_tensors

TOKENS_MAX = 2**40
"""The most tokens in one step: as many as a delta's record can hold for a whole window."""


@contextlib.contextmanager
def explained(file: Path, doing: str) -> Iterator[None]:
    """Inside, any exception becomes a TaskError that says where in the file's folder it was raised.

    A TaskError passes unchanged: its message is one line already.
    """
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {in_one_line(error)}" if str(error) else type(error).__name__
        raise TaskError(f"{_where(file, error)}, {doing}: {what}") from error


def explaining(task: Task, doing: str) -> contextlib.AbstractContextManager[None]:
    """`explained` for a guarded task. Does nothing for a task that comes with Gossamer: its faults are
    ours."""
    return explained(task.file, doing) if isinstance(task, Guarded) else contextlib.nullcontext()


def _where(file: Path, error: BaseException) -> str:
    """``file.py:31`` for the innermost line in the file's folder; the file's name alone if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(file, error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(file.parent) and "site-packages" not in path.parts:
            return f"{_shown(file, frame.filename)}:{frame.lineno}"
    return file.name


def _shown(file: Path, name: str) -> str:
    path = Path(name)
    return str(path.relative_to(file.parent)) if path.is_relative_to(file.parent) else name


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


@dataclass(frozen=True, eq=False)
class Guarded(Task):
    """The task in `file`, guarded. Its methods raise TaskError, and nothing else."""

    inner: Task
    file: Path

    def build_model(self, seed: int) -> nn.Module:
        with self._explained("build_model"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.inner.build_model(seed)
        if not isinstance(model, nn.Module):
            self._wrong("build_model", f"returned {_kind_of(model)}: return a torch.nn.Module")
        tensors = named_tensors(model)
        if not tensors:
            self._wrong("build_model", "made a model without parameters that require a gradient")
        for name, parameter in tensors:
            if isinstance(parameter, UninitializedParameter):
                self._wrong(
                    "build_model", f"left {name!r} without a shape: run one batch through lazy layers"
                )
            if parameter.device.type != "cpu":
                self._wrong("build_model", f"put {name!r} on {parameter.device}: build the model on the CPU")
            if parameter.dtype != torch.float32:
                self._wrong(
                    "build_model",
                    f"made {name!r} {parameter.dtype}: build the model in float32, and use autocast in loss",
                )
        if not model.training:  # transformers returns models so: no dropout, and batch norm stands still
            model.train()
        return model

    def build_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
        with self._explained("build_optimizer"):
            built = self.inner.build_optimizer(model)
        parts = tuple(built) if isinstance(built, Sequence) else (built,)
        if not parts or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
            self._wrong(
                "build_optimizer", f"returned {_kind_of(built)}: return a torch.optim.Optimizer, or several"
            )
        groups = [group for part in parts for group in part.param_groups]
        given = [id(parameter) for group in groups for parameter in group["params"]]
        if {id(parameter) for parameter in model.parameters()}.isdisjoint(given):
            self._wrong(
                "build_optimizer", "returned an optimizer for other parameters: give it model.parameters()"
            )
        if len(given) > len(set(given)):
            self._wrong("build_optimizer", "gave one parameter to two optimizers: both would move it")
        if not all(isinstance(group.get("lr"), int | float | Tensor) for group in groups):
            self._wrong("build_optimizer", "returned an optimizer without a learning rate 'lr'")
        return parts

    def batches(self, stream: DataStream) -> Iterator[Batch]:
        """Yield batches without end: one pass of the task after another, each with its own seed."""
        begun = stream.skip_batches
        number = 0
        while True:
            empty = True
            for batch in self._guarded("batches", partial(self.inner.batches, stream)):
                empty = False
                yield batch
            if empty and not stream.skip_batches:
                self._wrong("batches", "yielded nothing: is there data (--data)?")
            number += 1
            seed = stream.derived_seed(f"pass {number} from batch {begun}")
            stream = replace(stream, seed=seed, skip_batches=0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self._explained("loss"):
            loss = self.inner.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            self._wrong("loss", f"returned {_kind_of(loss)}: return a scalar tensor, the batch's mean loss")
        if torch.is_grad_enabled() and not loss.requires_grad:
            self._wrong(
                "loss", "returned a tensor without gradient: do not use detach, item or no_grad in it"
            )
        return loss

    def tokens(self, batch: Batch) -> int:
        with self._explained("tokens"):
            tokens: object = self.inner.tokens(batch)
        try:
            count = 0 if isinstance(tokens, bool) else operator.index(tokens)  # type: ignore[arg-type]
        except TypeError:
            count = 0
        if not 1 <= count <= TOKENS_MAX:
            self._wrong("tokens", f"returned {_kind_of(tokens)}: return a whole number from 1 to 2**40")
        return count

    def evaluate(self, model: nn.Module) -> float:
        with self._explained("evaluate"), evaluating(model):
            value: object = self.inner.evaluate(model)
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
            self._wrong("evaluate", f"returned {_kind_of(value)}: return the held-out loss, a number")

    def averaging(self, model: nn.Module, name: str, parameter: Tensor) -> str:
        with self._explained("averaging"):
            rule = self.inner.averaging(model, name, parameter)
        if rule not in ("rda", "mean"):
            self._wrong("averaging", f"returned {rule!r} for {name!r}: return 'rda' or 'mean'")
        return rule

    def data_in_words(self) -> str:
        with self._explained("data_in_words"):
            return str(self.inner.data_in_words())

    def lr_scale(self, swarm_tokens: int) -> float:
        with self._explained("lr_scale"):
            scale = self.inner.lr_scale(swarm_tokens)
        try:
            factor = float(scale)  # also NumPy's and torch's numbers
        except (TypeError, ValueError, RuntimeError):
            factor = math.nan
        if not (math.isfinite(factor) and factor >= 0):
            self._wrong("lr_scale", f"returned {_kind_of(scale)}: return a factor of 0 or more")
        return factor

    def sample(
        self, model: nn.Module, prompt: str, length: int, *, temperature: float, seed: int
    ) -> Iterator[str]:
        return self._guarded(
            "sample",
            partial(self.inner.sample, model, prompt, length, temperature=temperature, seed=seed),
        )

    def pretrained_files(self) -> dict[str, bytes]:
        with self._explained("pretrained_files"):
            files: object = self.inner.pretrained_files()
        if not isinstance(files, dict) or not all(
            isinstance(name, str) and isinstance(data, bytes) for name, data in files.items()
        ):
            self._wrong("pretrained_files", f"returned {_kind_of(files)}: return a dict of names and bytes")
        if "config.json" not in files:
            self._wrong("pretrained_files", "returned no config.json")
        return files

    def _explained(self, method: str) -> contextlib.AbstractContextManager[None]:
        return explained(self.file, f"in {method}")

    def _guarded(self, method: str, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Call `begin` at once, and yield the items that it returns."""
        with self._explained(method):
            begun: Iterable[Any] | None = begin()
        if begun is None:
            self._wrong(method, "returned None: yield its items, or return an iterator")
        with self._explained(method):
            items = iter(begun)
        return self._each(method, items)

    def _each(self, method: str, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._explained(method):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def _wrong(self, method: str, what: str) -> NoReturn:
        raise TaskError(f"{self.file.name}: {type(self.inner).__name__}.{method} {what}")


# --- Tries a task out before a swarm is founded on it: is the model the same each time, does a step work?

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
