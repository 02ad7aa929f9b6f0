"""A mixture of experts on the same text: every second feed-forward layer of the GPT is many small ones.

A router picks the experts of each byte (Fedus et al., "Switch Transformers", arXiv 2101.03961; Jiang et al.,
"Mixtral of Experts", 2401.04088). Every expert's matrices are tensors of their own, as in Mixtral's
checkpoints. So an expert to which no byte of a window went has a delta of zeros in it.
"""

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.learning.world import Scale
from gossamer.models.gpt import GPT, GPTConfig, SwiGLU
from gossamer.models.task import Batch
from gossamer.models.text import ByteTextTask, TextOptions

BALANCE = 0.01
"""The weight of the router's own loss, which keeps the experts evenly busy; as in both papers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsScale(Scale):
    """How much is trained, and by how many experts a layer."""

    experts: int = 32
    chosen: int = 1
    """How many of them see a byte."""
    hidden: int = 48
    """The inner width of each."""

    def build_task(self) -> ByteTextTask:
        return ExpertsTask(self)


class Mixture(nn.Module):
    """A router and its experts, for the feed-forward layer of one block."""

    def __init__(self, config: GPTConfig, scale: ExpertsScale) -> None:
        super().__init__()
        self.chosen = scale.chosen
        self.router = nn.utils.skip_init(nn.Linear, config.width, scale.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(scale.experts))
        self.imbalance: Tensor | float = 0.0
        """Of the last bytes: 1 if all experts were equally busy, up to their number otherwise."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D): the sum of the chosen experts, weighted by the router."""
        x_ND = x_BLD.flatten(0, 1)
        share_NE = self.router(x_ND).softmax(1)
        weight_NC, expert_NC = share_NE.topk(self.chosen, 1)
        order = expert_NC.flatten().argsort(stable=True)
        counts = torch.bincount(expert_NC.flatten(), minlength=len(self.experts))
        parts = x_ND[order // self.chosen].split(counts.tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
        y = y * weight_NC.flatten()[order].unsqueeze(1)
        self.imbalance = len(self.experts) * (counts / counts.sum() * share_NE.mean(0)).sum()
        return torch.zeros_like(x_ND).index_add(0, order // self.chosen, y).view_as(x_BLD)


class ExpertsTask(ByteTextTask):
    """Next-byte prediction by a GPT of experts."""

    def __init__(self, scale: ExpertsScale) -> None:
        super().__init__(TextOptions(**scale.options()))  # type: ignore[arg-type]
        self._scale = scale

    def build_model(self, seed: int) -> GPT:
        model, random = super().build_model(seed), np.random.default_rng([seed, 1])
        config = replace(self.config, hidden=self._scale.hidden)
        for block in list(model.model.layers)[1::2]:
            block.mlp = Mixture(config, self._scale)
            for name, parameter in block.mlp.named_parameters():
                std = 0.02 / sqrt(2 * config.layers) if "down_proj" in name else 0.02
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(std * random.standard_normal(parameter.shape)))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """With the router's own loss while it trains."""
        loss = super().loss(model, batch)
        if not torch.is_grad_enabled():
            return loss
        return loss + BALANCE * sum(m.imbalance for m in model.modules() if isinstance(m, Mixture))
