"""What `test_transformers` trains. It is a module of its own since importing `Trainer` takes seconds, in
every process that collects tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from gossamer.node.adapters.transformers import EvaluatesAverage, GossamerCallback

LENGTH = 8


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class LowRank(nn.Module):
    """What low-rank adaptation adds to a layer's output, here on top of it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width))
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden @ self.down.T @ self.up.T


class Averaging(EvaluatesAverage, Trainer):
    """As the documentation has it."""


class GoesAround(Trainer):
    """Calls the base and the head itself, as trainers do that compute the loss in chunks."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        hidden = model.model(**{name: inputs[name] for name in ("input_ids", "attention_mask")})[0]
        logits = model.lm_head(hidden)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def unstarted() -> tuple[TrainerState, TrainerControl]:
    """What a callback is given before the first step."""
    return TrainerState(), TrainerControl()


class Rates(TrainerCallback):
    """Records the learning rate of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of one length with less and less padding: 2, 3, 4, ... tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(LENGTH) + index) % 16
        mask = (torch.arange(LENGTH) < 2 + index % 7).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer_of(
    folder: Path,
    swarm: GossamerCallback,
    *,
    model: Any = None,
    callbacks: Any = (),
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    plan = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        **options,
    }
    trainer = kind(
        model or small_llama(),
        TrainingArguments(**plan),
        train_dataset=Rows(10),
        eval_dataset=Rows(2),
        callbacks=[*callbacks, swarm],
    )
    # The oldest supported releases have no option to take the rows in order.
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer
