"""`transformers.Trainer` in a swarm: a callback makes the process a node while it trains.

::

    swarm = GossamerCallback(manifest="swarm.toml", join=["host:7700"])
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[swarm])
    trainer.train()

A callback sees neither batches nor losses, so a hook on the model's forward pass counts them. It cannot
evaluate either: `EvaluatesAverage` is a part of the trainer.
"""

import copy
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

from gossamer.models import in_one_line
from gossamer.models.task import local_tensors, named_tensors
from gossamer.node.adapters.base import Membership
from gossamer.node.exports.export import FROZEN, NAMES
from gossamer.node.files import write_atomically
from gossamer.node.home import Home
from gossamer.node.trainer.data import Schedule
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import ConfigError, StorageError

# --- What a Hugging Face model needs besides its weights, kept in the node's folder for `gossamer export`.
#
# ``pretrained/`` holds config.json, generation_config.json and the tokenizer's or processor's files, as
# `from_pretrained` wants them beside the weights; frozen.json names what the model has besides the swarm's.
# Of adapters (PEFT), it holds their own configuration, and names.json says what PEFT's files call them.

log = logging.getLogger("gossamer.peer")


def keep_pretrained(home: Home, model: nn.Module, processor: Any = None) -> None:
    """Write a model's configuration, and its tokenizer or processor if there is one. Each file appears whole.

    Of a PEFT model it is the active adapter's configuration. Does nothing for a model that has no `config`
    with a `save_pretrained`. A failure is only logged, since training does not need these files.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    manifest = home.manifest()
    shared = {spec.name for spec in manifest.layout.tensors} if manifest else set()
    try:
        plain: Any = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
        peft: Any = sys.modules.get("peft")
        parts: list[Any] = [processor]
        notes: dict[str, Any] = {}
        if peft is not None and isinstance(plain, peft.PeftModel):
            configuration: Any = copy.deepcopy(plain.peft_config[plain.active_adapter])
            configuration.inference_mode = True  # as PEFT itself saves it
            saved = peft.get_peft_model_state_dict(plain, save_embedding_layers=False)
            ours = {parameter.data_ptr(): name for name, parameter in named_tensors(plain)}
            notes[NAMES] = {ours[t.data_ptr()]: name for name, t in saved.items() if t.data_ptr() in ours}
            notes[FROZEN] = [name for name, tensor in saved.items() if tensor.data_ptr() not in ours]
        else:
            configuration = copy.deepcopy(plain.config)
            # As the model's own `save_pretrained` would. FSDP2 renames its class.
            configuration.architectures = [type(plain).__name__.removeprefix("FSDP")]
            parts.append(getattr(model, "generation_config", None))
            notes[FROZEN] = list(local_tensors(model, shared))
        with TemporaryDirectory(dir=home.root, prefix=".pretrained-") as aside:
            for part in (configuration, *parts):
                if hasattr(part, "save_pretrained"):
                    part.save_pretrained(aside)
            for name, note in notes.items():
                Path(aside, name).write_text(json.dumps(note))
            for file in sorted(path for path in Path(aside).rglob("*") if path.is_file()):
                target = home.pretrained_path / file.relative_to(aside)
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(target, file.read_bytes())
    except Exception as error:  # custom configurations and tokenizers may raise anything
        log.warning(
            "cannot keep the model's configuration in %s: %s", home.pretrained_path, in_one_line(error)
        )


try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError(f"{error}: the adapter needs it; run: pip install 'gossamer[hf]'") from None


class GossamerCallback(Membership, TrainerCallback):
    """Trains a `Trainer`'s model in a swarm. The arguments are `Membership`'s and those of `Peer.attach`.

    It attaches when training begins, with the optimizer that the trainer has made by then. It leaves when
    training ends, with the swarm's own model in `trainer.model` (see `finish`), unless the trainer loads its
    best checkpoint over it. The trainer stops when the node has to, and when `stop_round` is published. Under
    torchrun, all ranks are one node. `Peer.metrics` appear in the trainer's logs, under ``gossamer/``.

    `tokens` is called with the keyword arguments of the model's forward pass. `schedule` replaces the lambdas
    in the trainer's own scheduler, which must be a `LambdaLR`; the default, linear, is one.
    """

    _hook: RemovableHandle | None = None
    """None after the last training."""
    _has_warned = False
    _ranks = 1
    _is_share = False
    """Whether the counted losses are shares of the step's loss, and not means over their own
    micro-batches."""
    _logged_loss = float("nan")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Become a node. Raises what `Peer.attach` does."""
        model, optimizer, rates = kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"]
        _check(args)
        if self._schedule is not None and not isinstance(rates, LambdaLR):
            raise ConfigError(
                f"schedule= cannot steer a {type(rates).__name__}; choose lr_scheduler_type='constant'"
            )
        self._ranks = args.world_size if args.average_tokens_across_devices else 1
        plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if callable(begin := getattr(plain, "train", None)):
            begin()  # ScheduleFree would move the model with the state that `attach` restores
        peer = self._attach(model, [plain])
        if self._schedule is not None:
            _steer(rates, peer, self._schedule)
        if peer.folder is not None:
            keep_pretrained(Home(peer.folder), model, kwargs.get("processing_class"))
        self._hook = model.register_forward_hook(_Hook(self._saw), with_kwargs=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell the peer of an optimizer step, before the trainer logs, evaluates or saves."""
        batches, _, loss = self._since
        if not batches and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the trainer does not call the model itself in train mode, so nothing can be counted: each"
                " step counts as one token, and weighs next to nothing beside those of other nodes. Let"
                " compute_loss call model(...)"
            )
        if self._step(loss * self._ranks if self._is_share else loss / max(1, batches)):
            control.should_training_stop = True
        return self._left_if_over(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Leave if something else, such as an evaluation, has stopped training since the last step."""
        return self._left_if_over(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add `Peer.metrics` to what is logged, for later callbacks and for `state.log_history`."""
        logs = kwargs["logs"]
        self._logged_loss = logs.get("loss", self._logged_loss)
        metrics = self._metrics()
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave, if nothing has announced before that training would end."""
        if args.load_best_model_at_end:
            self._abandon()  # what the model holds now is not progress of the open window
        else:
            self._leave()

    def _left_if_over(self, control: TrainerControl) -> TrainerControl:
        """Leave before the trainer evaluates and saves for the last time, or loads its best checkpoint."""
        if control.should_training_stop:
            self._leave()
        return control

    def _forget(self) -> None:
        """Let the model go, also where an error or Ctrl-C has ended its training."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _saw(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Count a forward pass, if it is one of training."""
        if not (model.training and torch.is_grad_enabled()):
            return
        loss = _loss_of(outputs)
        # A model that knows the number of items in the whole step divides its sum by that.
        self._is_share = loss is not None and kwargs.get("num_items_in_batch") is not None
        self._count(kwargs or args, self._logged_loss if loss is None else loss)


class EvaluatesAverage:
    """A trainer that evaluates the averaged model beside the live one, with the callback above::

        class AveragingTrainer(EvaluatesAverage, Trainer): ...

    Each metric of an evaluation has a second one beside it, as ``eval_loss_average`` has ``eval_loss``: the
    same loop over the same data. All callbacks, early stopping and ``metric_for_best_model`` see them.
    Checkpoints hold the live model: use ``gossamer export`` for the average. An evaluation takes twice as
    long. A node that has just joined may lack the average at first: these metrics are NaN then, and the log
    says why.
    """

    callback_handler: Any

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the live model, and then, unless these are predictions, the averaged one."""
        loop = super().evaluation_loop  # type: ignore[misc]
        output = loop(dataloader, description, *args, **kwargs)
        found = [one.peer for one in self.callback_handler.callbacks if isinstance(one, GossamerCallback)]
        if description == "Evaluation" and found and found[0] is not None:
            try:
                with found[0].average():
                    metrics = loop(dataloader, description, *args, **kwargs).metrics
            except StorageError as error:
                log.warning("the averaged model is not evaluated: %s", error)
                metrics = dict.fromkeys(output.metrics, float("nan"))  # a trainer may insist on one
            output.metrics.update(
                {f"{key}_average": value for key, value in metrics.items() if not key.endswith("_time")}
            )
        return output


Saw = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""(model, args, kwargs, outputs): called after a forward pass."""


class _Hook:
    """The hook on a model's forward pass. A copy that is made or pickled along with the model counts nothing.

    A model is pickled while it trains by `torch.save(model)`, and for spawned workers of a DataLoader whose
    collator holds it.
    """

    def __init__(self, saw: Saw | None) -> None:
        self._saw = saw

    # Not compiled with the model: the sums would be constants of the graph, which would be recompiled for
    # each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if self._saw is not None:
            self._saw(model, args, kwargs, outputs)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[None]]:
        return _Hook, (None,)


def _check(args: TrainingArguments) -> None:
    """Raise ConfigError if the trainer's processes do not act as one trainer of the parameters they hold."""
    if args.deepspeed:
        raise ConfigError("DeepSpeed keeps the parameters to itself; train with DistributedDataParallel")
    if args.n_gpu > 1:
        raise ConfigError(
            f"without torchrun, the trainer spreads each batch over {args.n_gpu} GPUs by DataParallel, which"
            " cannot be counted: start it with torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != args.world_size:
        raise ConfigError(
            f"torchrun started {dist.get_world_size()} ranks, and each trains on its own; without GPUs,"
            " TrainingArguments(use_cpu=True) makes them one"
        )


def _loss_of(outputs: Any) -> Tensor | None:
    """The loss in a model's outputs; None if the trainer computes it from something else."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, Sequence) else outputs
    return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None


def _steer(rates: LambdaLR, peer: Peer, schedule: Schedule) -> None:
    """Make a scheduler follow the swarm's tokens, from the first step on."""
    rates.lr_lambdas = [lambda _: peer.lr_scale(schedule)] * len(rates.base_lrs)
    for group, peak in zip(rates.optimizer.param_groups, rates.base_lrs, strict=True):
        group["lr"] = peak * peer.lr_scale(schedule)
