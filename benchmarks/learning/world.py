"""The world that every method trains in: the same model, data, inner optimizer, tokens and evaluation.

A method is a generator: it trains, and yields a `Point` whenever it can be measured. Workers take their steps
one after another in this process, so nothing depends on the machine's speed or load.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer.models.corpus import Corpus, load_corpus
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import Batch, DataStream, named_tensors
from gossamer.models.text import ByteTextTask, TextOptions
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history import average


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is trained. `context` and `batch_size` are those of one inner step of one worker."""

    workers: int = 4
    windows: int = 100
    steps: int = 20
    """Inner steps per window."""
    preset: str = "tiny"
    context: int = 64
    batch_size: int = 4
    optimizer: str = "adamw"
    """The inner optimizer, an option of the task `text`."""
    lr: float = 1e-3
    """Learning rate of the inner AdamW."""
    decays: bool = False
    """Whether the inner learning rate falls along a cosine to a tenth; otherwise it is constant."""
    eval_windows: int = 512
    points: int = 20
    """Points on a curve."""
    bfloat16: bool = False
    """Whether matrix products take bfloat16 operands and models are compiled: twice as fast, with a C++
    compiler at hand. Parameters, optimizers and sums stay in float32."""

    @property
    def inner_steps(self) -> int:
        """Inner steps of all workers together, the same for all methods."""
        return self.workers * self.windows * self.steps

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of one worker."""
        return self.batch_size * self.context

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.inner_steps * self.step_tokens

    def options(self) -> dict[str, str | int | float]:
        """Options for the task `text`."""
        return {
            "preset": self.preset,
            "context": self.context,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "horizon_tokens": self.tokens if self.decays else 0,
            "eval_batches": max(1, self.eval_windows // self.batch_size),
        }

    def build_task(self) -> ByteTextTask:
        """What is trained."""
        return ByteTextTask(TextOptions(**self.options()))  # type: ignore[arg-type]


class Point(NamedTuple):
    """The state of a run at one point of its curve."""

    tokens: int
    """Tokens that all workers together have trained on."""
    published: float
    """Bytes of each node's own contributions, averaged over nodes, each counted once."""
    sent: float
    """Bytes that a node sends so that every node has those it needs."""
    loss: float
    """The loss on held-out text, in nats per byte."""
    averaged: float = inf
    """That of the averaged model; infinite if there is none."""


class Averaged:
    """The averaged model, as nodes define it, of a model in fixed point."""

    def __init__(self, phi: Ints) -> None:
        """`phi`: the first parameters, int32[n]."""
        self._round, self._phi = 0, phi.copy()
        self._sums = average.Sums(np.zeros_like(phi), np.zeros_like(phi))

    def add(self, round_: int, phi: Ints) -> None:
        """Take in the model after a round; all come, in order."""
        self._sums = average.carried(self._sums, self._round, round_)
        if round_ in average.points(round_ - 1, round_):
            np.add(self._sums.current, phi, out=self._sums.current)
        self._round, self._phi = round_, phi

    def mean(self) -> Ints:
        """The averaged model, int32[n]."""
        return average.mean(self._phi, self._sums, self._round)


@dataclass(slots=True)
class Worker:
    """One worker's model, inner optimizer and data."""

    number: int
    model: nn.Module
    optimizer: InnerOptimizer
    batches: Iterator[Batch]

    @property
    def tensors(self) -> list[Tensor]:
        return [parameter for _, parameter in named_tensors(self.model)]


@cache
def _corpus(context: int) -> Corpus:
    """The default corpus, read once."""
    return load_corpus((), context)


class World:
    """All that is the same for every method."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale, self.seed = scale, seed
        self.task = scale.build_task()
        self.task.corpus = _corpus(scale.context)
        self.steps = 0
        """Inner steps taken so far, by all workers."""
        torch.set_float32_matmul_precision("medium" if scale.bfloat16 else "highest")
        self._judge = self._build()
        self._due = 0

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._judge.parameters())

    @property
    def tokens(self) -> int:
        return self.steps * self.scale.step_tokens

    @property
    def is_over(self) -> bool:
        return self.steps >= self.scale.inner_steps

    def worker(self, number: int, life: int = 0) -> Worker:
        """A worker with new parameters and a new optimizer; each `life` of it draws different data."""
        model = self._build()
        stream = DataStream(seed=self.seed, node_id=bytes([number, life]) * 16)
        optimizer = InnerOptimizer(self.task.build_optimizer(model))
        return Worker(number, model, optimizer, self.task.batches(stream))

    def _build(self) -> nn.Module:
        model = self.task.build_model(self.seed)
        if self.scale.bfloat16:
            model.compile(dynamic=False)
        return model

    def _attention(self) -> AbstractContextManager[None]:
        """Choose the attention kernel: with bfloat16 operands PyTorch's own choice is ten times slower."""
        return sdpa_kernel(SDPBackend.MATH) if self.scale.bfloat16 else nullcontext()

    def workers(self) -> list[Worker]:
        return [self.worker(number) for number in range(self.scale.workers)]

    def step(self, worker: Worker, *more: Batch, warm_up: float = 1.0) -> Tensor:
        """Make one inner step on the worker's next batch and the batches `more`; returns the loss.

        `warm_up` is a factor on the learning rate.
        """
        batches = [next(worker.batches), *more]
        joined = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        worker.optimizer.scale_lr(self.task.lr_scale(self.tokens) * warm_up)
        with self._attention():
            loss = self.task.loss(worker.model, joined)
        worker.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        worker.optimizer.step()
        self.steps += len(batches)
        return loss.detach()

    def window(self, workers: Iterable[Worker]) -> None:
        """Make the inner steps of one window for every worker, one worker after another."""
        for worker in workers:
            for _ in range(self.scale.steps):
                self.step(worker)

    def is_due(self) -> bool:
        """Whether the curve needs another point by now; true once per point."""
        if self.steps < self._due:
            return False
        self._due = self.steps - self.steps % self._interval + self._interval
        return True

    @property
    def _interval(self) -> int:
        return max(1, self.scale.inner_steps // self.scale.points)

    @torch.no_grad()
    def evaluate(self, tensors: Iterable[Tensor]) -> float:
        """Held-out loss of these parameters."""
        for (_, parameter), value in zip(named_tensors(self._judge), tensors, strict=True):
            parameter.copy_(value)
        with self._attention():
            return self.task.evaluate(self._judge)

    def point(
        self,
        tensors: Iterable[Tensor],
        published: float,
        sent: float,
        averaged: Iterable[Tensor] | None = None,
    ) -> Point:
        means = inf if averaged is None else self.evaluate(averaged)
        return Point(self.tokens, published, sent, self.evaluate(tensors), means)


def mean_of(workers: list[Worker]) -> list[Tensor]:
    """The workers' parameters, averaged tensor by tensor."""
    return [torch.stack(same).mean(0) for same in zip(*(w.tensors for w in workers), strict=True)]


def ring_bytes(payload: float, workers: int) -> float:
    """The bytes that a node sends in one ring all-reduce of `payload` bytes."""
    return 2 * (workers - 1) / workers * payload
