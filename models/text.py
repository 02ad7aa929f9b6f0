"""The task `text`: a byte-level GPT on this node's own text files.

Bytes need no tokenizer to agree on, and any text will do, so this task runs on every machine at once. What
nodes agree on is in `TextOptions`. The data paths are each node's own, and never leave it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.corpus import Corpus, load_corpus
from gossamer.models.gpt import GPT, PRESETS, GPTConfig, decode_characters, generate_bytes, mixed
from gossamer.models.llama_format import llama_files
from gossamer.models.muon import Muon
from gossamer.models.task import Batch, DataStream, Task, evaluating, named_tensors

# --- Which windows of a long byte array a node trains on, and which it evaluates on.
#
# Training: the array is cut into segments. In every epoch a node goes once through all of them (except a few
# that do not fill a batch), in its own order, and takes one window at a random offset within each. So nodes
# spread over the whole text, no region is missed for long, and no coordination is needed. Each epoch has its
# own generator, so that any batch can be reached directly: a resumed node does not replay what it has seen.
#
# Where the swarm goes through the same text together, the samples that it draws are the windows that follow
# each other in it.

SEGMENT_BYTES = 4096

Window = tuple[Tensor, Tensor]
"""inputs_BL and targets_BL, int64; the targets are one position ahead."""


def training_windows(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, stream: DataStream
) -> Iterator[Window]:
    """Yield batches of `batch_size` windows without end; `text` is uint8 with at least `context + 1`
    bytes."""
    if stream.samples is not None:
        while True:
            rows = np.fromiter(islice(stream.samples, batch_size), np.int64)
            yield _gather(text, rows * context, context)
    last = text.size - context - 1
    # If the text is too short for one segment per row, segments are shorter, windows overlap and, at worst, a
    # batch has the same window twice.
    segment = max(1, min(SEGMENT_BYTES, (last + 1) // batch_size))
    segments = -(-(last + 1) // segment)
    per_epoch = max(1, segments // batch_size)
    epoch, begin = divmod(stream.skip_batches, per_epoch)
    while True:
        generator = stream.generator(epoch)
        order = np.resize(generator.permutation(segments), per_epoch * batch_size)
        starts = np.minimum(order * segment + generator.integers(0, segment, order.size), last)
        for rows in starts.reshape(per_epoch, batch_size)[begin:]:
            yield _gather(text, rows, context)
        epoch, begin = epoch + 1, 0


def held_out_windows(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, batches: int
) -> Iterator[Window]:
    """Yield at most `batches` batches of windows, evenly spaced over `text`; always the same ones."""
    last = text.size - context - 1
    count = min(batches * batch_size, last + 1)
    starts = np.linspace(0, last, count).astype(np.int64)
    for begin in range(0, count, batch_size):
        yield _gather(text, starts[begin : begin + batch_size], context)


def _gather(text: npt.NDArray[np.uint8], starts_B: npt.NDArray[np.int64], context: int) -> Window:
    windows = text[starts_B[:, None] + np.arange(context + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


OPTIMIZERS = ("muon", "adamw")

MUON_LR = 3.0
"""Ratio of Muon's learning rate to AdamW's. Measured on tiny: 1 is worse than AdamW alone, and 6 is worse
than 3."""

LR_SCALE_MIN = 0.1
"""Where the cosine schedule ends."""


# Batch size and learning rate. tiny is measured: on the default corpus, 1e-3 beats 1.5e-3 and more, a batch
# of 8 beats 4 and 12 for the same tokens, and no warm-up is needed. The others are scaled by size.
_TUNED = {"tiny": (8, 1e-3), "small": (16, 1e-3), "medium": (16, 6e-4), "124m": (16, 3e-4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What all nodes of a swarm agree on. For `batch_size`, `context` and `lr`, 0 means the preset's
    value."""

    preset: str = "tiny"
    """The model's shape, a key of `gossamer.models.gpt.PRESETS`."""
    batch_size: int = 0
    """Windows in one inner step."""
    context: int = 0
    """Bytes in one window."""
    optimizer: str = "muon"
    """The inner optimizer: muon (for the matrices inside the network, with AdamW for the rest) or adamw."""
    lr: float = 0.0
    """Peak learning rate of AdamW; Muon's is three times that."""
    weight_decay: float = 0.1
    """On matrices only."""
    horizon_tokens: int = 0
    """The learning rate falls to a tenth, by a cosine, over this many swarm tokens; 0 keeps it constant."""
    eval_batches: int = 16
    """Batches in one evaluation."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise TaskError(f"there is no preset {self.preset!r}; choose from {', '.join(PRESETS)}")
        if self.optimizer not in OPTIMIZERS:
            raise TaskError(f"there is no optimizer {self.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
        for field, least, most in (
            ("batch_size", 0, 65_536),
            ("context", 0, 1 << 20),
            ("lr", 0, 10),
            ("weight_decay", 0, 10),
            ("horizon_tokens", 0, 1 << 62),
            ("eval_batches", 1, 65_536),
        ):
            value = getattr(self, field)
            if not least <= value <= most:
                raise TaskError(f"option {field!r} is {value}: choose one from {least} to {most}")

    def resolved(self) -> TextOptions:
        """These options, with the preset's values in place of zeros."""
        batch_size, lr = _TUNED[self.preset]
        return dataclasses.replace(
            self,
            batch_size=self.batch_size or batch_size,
            context=self.context or PRESETS[self.preset].context,
            lr=self.lr or lr,
        )


class ByteTextTask(Task):
    """Next-byte prediction. A batch is `(inputs_BL, targets_BL)`, int64 on the CPU; a token is a byte."""

    Options = TextOptions
    options: TextOptions

    def __init__(self, options: TextOptions | None = None, data: Sequence[Path] = ()) -> None:
        """`data`: this node's files and folders; empty for the source of Python's standard library."""
        super().__init__((options or TextOptions()).resolved(), data)
        self.config: GPTConfig = dataclasses.replace(
            PRESETS[self.options.preset], context=self.options.context
        )

    @functools.cached_property
    def corpus(self) -> Corpus:
        """This node's text, read when first needed and kept.

        Raises:
            TaskError: see `load_corpus`.
        """
        return load_corpus(self.data, self.options.context)

    def data_in_words(self) -> str:
        where = (
            super().data_in_words() if self.data else "the source of Python's standard library (no --data)"
        )
        train, held_out = self.corpus
        return f"{where}: {train.size:,} bytes, and {held_out.size:,} held out"

    def build_model(self, seed: int) -> GPT:
        return GPT(self.config, seed)

    def build_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
        """AdamW with betas 0.9 and 0.95, fused where PyTorch supports it; with muon, Muon comes first."""
        parameters = [parameter for _, parameter in named_tensors(model)]
        embedding = model.get_parameter("model.embed_tokens.weight")
        inner = [p for p in parameters if p.ndim >= 2 and p is not embedding]
        vectors = [p for p in parameters if p.ndim < 2]
        decay, lr = self.options.weight_decay, self.options.lr
        with_muon = self.options.optimizer == "muon"
        groups: list[dict[str, Any]] = [
            {"params": [embedding] if with_muon else [embedding, *inner]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=decay, fused=fused)
        return (Muon(inner, lr=MUON_LR * lr, weight_decay=decay), adamw) if with_muon else (adamw,)

    def averaging(self, model: nn.Module, name: str, parameter: Tensor) -> str:
        """'mean' for all tensors with Muon at a constant rate: Muon's deltas have less in common than
        AdamW's, and `rda` would make their steps too long. A learning rate that falls shortens them in the
        end."""
        if self.options.optimizer == "muon" and not self.options.horizon_tokens:
            return "mean"
        return super().averaging(model, name, parameter)

    def shared_data(self) -> tuple[int, str]:
        """The windows that follow each other in the training text, and the text."""
        text = self.corpus.train
        return (text.size - 1) // self.options.context, hashlib.sha256(text.data).hexdigest()

    def batches(self, stream: DataStream) -> Iterator[Batch]:
        return training_windows(
            self.corpus.train,
            batch_size=self.options.batch_size,
            context=self.options.context,
            stream=stream,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        device = next(model.parameters()).device
        inputs_BL, targets_BL = (part.to(device, non_blocking=True) for part in batch)
        with mixed(device):
            logits_BLV: Tensor = model(inputs_BL)
            return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())

    def tokens(self, batch: Batch) -> int:
        targets_BL: Tensor = batch[1]
        return targets_BL.numel()

    def evaluate(self, model: nn.Module) -> float:
        """The loss on `eval_batches` batches of windows, spread evenly over this node's held-out text."""
        total, tokens = 0.0, 0
        with evaluating(model):
            for batch in held_out_windows(
                self.corpus.held_out,
                batch_size=self.options.batch_size,
                context=self.options.context,
                batches=self.options.eval_batches,
            ):
                count = self.tokens(batch)
                total += float(self.loss(model, batch)) * count
                tokens += count
        return total / tokens

    def lr_scale(self, swarm_tokens: int) -> float:
        if not self.options.horizon_tokens:
            return 1.0
        progress = min(max(swarm_tokens / self.options.horizon_tokens, 0.0), 1.0)
        return LR_SCALE_MIN + (1.0 - LR_SCALE_MIN) * (1.0 + math.cos(math.pi * progress)) / 2

    def sample(
        self, model: nn.Module, prompt: str, length: int, *, temperature: float, seed: int
    ) -> Iterator[str]:
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise TaskError(f"temperature is {temperature}: choose 0 or more")
        data = generate_bytes(
            model,
            prompt.encode("utf-8", "replace"),
            context=self.options.context,
            temperature=temperature,
            seed=seed,
        )
        return decode_characters(data, length)

    def pretrained_files(self) -> dict[str, bytes]:
        return llama_files(self.config)
