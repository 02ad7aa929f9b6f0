"""What `test_lightning` trains. It is a module of its own since importing Lightning takes seconds, in every
process that collects tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.node.adapters.lightning import GossamerCallback
from tests.node.adapters.fake_peer import Fakes


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.losses: list[float] = []
        """The loss of each micro-batch."""
        self.raises: BaseException | None = None
        """What to raise in the third micro-batch, if anything."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layer(inputs) - targets).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.raises is not None and batch_idx == 2:
            raise self.raises
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class TwoOptimizers(Regression):
    """Steps by hand: the first optimizer on every batch, the second on every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=1e-2) for parameter in self.parameters()]


class WithScheduler(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class Normed(Regression):
    """Keeps a copy of its parameters after the latest step in the swarm."""

    def __init__(self, fakes: Fakes, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.fakes = norm, fakes
        self.trained: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layer(self.norm(inputs)) - targets).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.fakes.peer.ends:
            self.trained = [parameter.detach().clone() for parameter in self.parameters()]


class Validated(Regression):
    """Records, of each validation, whether the parameters are the averaged model, which is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged: list[bool] = []
        self.fails = False

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.averaged.append(not any(parameter.any() for parameter in self.parameters()))
        self.log("val_loss", self.loss(batch))
        if self.fails and len(self.averaged) == 3:
            raise RuntimeError("as asked")


class Saves(pl.Callback):
    """Stands before all others, and would save what is in the module when a validation ends."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.saved.append(pl_module.layer.weight.detach().clone())


class PassesOver(Regression):
    """Has no loss in the second of three batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


def samples(batch_size: int, swarm: GossamerCallback | None = None) -> DataLoader[Any]:
    """10 samples; drawn as `swarm` says, if it is given."""
    inputs = torch.arange(30.0).view(10, 3) / 30
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=batch_size, sampler=swarm and swarm.shard(dataset))


def fit(
    folder: Path,
    module: Any,
    swarm: GossamerCallback,
    before: Any = (),
    *,
    shards: bool = False,
    **options: Any,
) -> Any:
    """Train on 10 samples, in batches of 4, 4 and 2; validate, if the module can, on all of them at once."""
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=[*before, swarm],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    train = samples(4, swarm if shards else None)
    trainer.fit(module, train, samples(10) if isinstance(module, Validated) else None)
    return trainer
