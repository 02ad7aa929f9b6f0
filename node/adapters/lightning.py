"""`lightning.pytorch.Trainer` in a swarm: a callback makes the process a node while it fits.

::

    swarm = GossamerCallback(manifest="swarm.toml", join=["host:7700"])
    Trainer(max_epochs=-1, callbacks=[swarm]).fit(module, loader)
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gossamer.node.adapters.base import Membership
from gossamer.protocol.errors import ConfigError, StorageError

log = logging.getLogger("gossamer.peer")

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
except ImportError as error:
    raise ConfigError(f"{error}: the adapter needs it; run: pip install 'gossamer[lightning]'") from None


class GossamerCallback(Membership, Callback):
    """Trains a `LightningModule` in a swarm. The arguments are `Membership`'s and those of `Peer.attach`.

    It attaches when training begins, with all optimizers that `configure_optimizers` made. It leaves when
    training ends, with the swarm's own model in the module (see `finish`). The trainer stops when the node
    has to, and when `stop_round` is published, but not before its `min_steps` and `min_epochs`. With several
    devices (strategy "ddp"), all ranks are one node. `Peer.metrics` are logged under ``gossamer/``.

    It leaves before any other callback hears that training ends, wherever it stands in the list: a callback
    that averages the weights may then write the averages into the module, over the swarm's own model.

    `tokens` is called with the batch. `schedule` sets the learning rate before each step, as a factor on the
    rate that each parameter group began with; the module must then have no scheduler of its own.

    With `evaluate_average`, validations while it fits are of the averaged model *instead of* the live one, as
    with Lightning's own `WeightAveraging`; so are early stopping and what a checkpoint is named after.
    Checkpoints hold the live model: use ``gossamer export`` for the average. A node that has just joined may
    lack the average at first: it logs that, and validates the live model.
    """

    def __init__(self, *, evaluate_average: bool = False, **options: Any) -> None:
        """Raises TypeError as `Membership` does."""
        super().__init__(**options)
        self._evaluates_average = evaluate_average
        self._average = ExitStack()
        """Puts the live model back."""

    _steps = 0
    """Optimizer steps, as the trainer last counted them."""
    _loss: float | Tensor = float("nan")
    """Mean loss of the last step that had one."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Put a helper at the front of the callbacks, so that it hears first that training ends. This
        callback itself keeps its place: what earlier callbacks do to the module when training begins, or with
        every batch, is done when it looks."""
        if stage == "fit":
            others = [callback for callback in trainer.callbacks if not isinstance(callback, _LeavesFirst)]
            trainer.callbacks = [_LeavesFirst(self._leave, self._average.close), *others]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Become a node. Raises what `Peer.attach` does."""
        if self._schedule is not None and trainer.lr_scheduler_configs:
            raise ConfigError(
                "the module has a learning-rate scheduler: leave it out, or leave out schedule="
            )
        self._steps = trainer.global_step
        self._loss = float("nan")
        self._attach(pl_module, trainer.optimizers)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Set the learning rate, if a schedule is given."""
        if self._schedule is None or self.peer is None:
            return
        scale = self.peer.lr_scale(self._schedule)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch, and tell the peer if the optimizer has stepped on it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            loss = None
        elif pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # undoes the trainer's division
        if loss is not None or not pl_module.automatic_optimization:  # else the module has skipped the batch
            self._count(batch, float("nan") if loss is None else loss)
        if trainer.global_step == self._steps or self._has_left:
            return
        self._steps = trainer.global_step
        if self._since.batches:
            self._loss = self._since.loss / self._since.batches
        if self._step(self._loss):
            trainer.should_stop = True
        pl_module.log_dict({name: float(value) for name, value in self._metrics().items()})

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the averaged model in the place of the live one, if that is wanted."""
        is_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if self._evaluates_average and is_training and self.peer is not None:
            try:
                self._average.enter_context(self.peer.average())
            except StorageError as error:
                log.warning("the live model is validated: %s", error)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave, with the swarm's own model."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave as a `with` would: in good order if it was an interrupt or SIGTERM."""
        self._average.close()
        self.__exit__(type(exception), exception, exception.__traceback__)


class _LeavesFirst(Callback):
    """Stands first among a trainer's callbacks, leaves the swarm when training ends, and has the live model
    back when a validation ends.

    Callbacks that average the weights then write the averages into the module, and these are not progress of
    the open window. Others save the module.
    """

    def __init__(self, leave: Callable[[], None], use_live: Callable[[], None]) -> None:
        self._leave = leave
        self._use_live = use_live

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave if this epoch has no steps and only collects the averages' batch norm statistics: training is
        over."""
        averaging = [one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging)]
        if any(trainer.current_epoch == one.swa_end + 1 for one in averaging):
            self._leave()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the live model back, if the average is in its place."""
        self._use_live()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave, with the swarm's own model."""
        self._leave()
