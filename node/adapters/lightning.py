"""`lightning.pytorch.Trainer` in a swarm: a callback makes the process a node while it fits.

::

    swarm = GossamerCallback(manifest="swarm.toml", join=["host:7700"])
    Trainer(max_epochs=-1, callbacks=[swarm]).fit(module, loader)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.node.adapters.membership import Membership
from gossamer.protocol.errors import ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ConfigError(f"{error}: the adapter needs it; run: pip install 'gossamer[lightning]'") from None


class GossamerCallback(Membership, Callback):
    """Trains a `LightningModule` in a swarm. The arguments are `Membership`'s and those of `Peer.attach`.

    It attaches when training begins, with all that `configure_optimizers` has made, and leaves when training
    ends, with the swarm's own model in the module (see `finish`). The trainer stops when the node has to, and
    when `stop_round` is published, but no sooner than its `min_steps` and `min_epochs`. With several devices
    (strategy "ddp"), all ranks are one node. `Peer.metrics` are logged under ``gossamer/``.

    `tokens` is given the batch. `schedule` sets the learning rate before each step, by the rate that each
    parameter group began with; the module must have no scheduler of its own then.
    """

    _steps = 0
    """Steps of the optimizers, as the trainer counted them last."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Become a node. Raises what `Peer.attach` does."""
        if self._schedule is not None and trainer.lr_scheduler_configs:
            raise ConfigError(
                "the module has a learning-rate scheduler: leave it out, or leave out schedule="
            )
        self._steps = trainer.global_step
        self._attach(pl_module, trainer.optimizers)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Set the learning rate, where the swarm's tokens say which."""
        if self._schedule is None or self.peer is None:
            return
        scale = self.peer.lr_scale(self._schedule)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch: where the optimizer has stepped on it, after a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if pl_module.automatic_optimization and isinstance(loss, Tensor):
            loss = loss * trainer.accumulate_grad_batches  # which the trainer has divided it by
        self._count(batch, loss if isinstance(loss, Tensor) else float("nan"))
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if self._step(self._since.loss / self._since.batches):
            trainer.should_stop = True
        pl_module.log_dict({name: float(value) for name, value in self._metrics().items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave, with the swarm's own model."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave as a `with` would: in good order if it was an interrupt or SIGTERM."""
        self.__exit__(type(exception), exception, exception.__traceback__)
