"""The interface between Gossamer and what it trains.

A task joins a model with its data, its loss and its evaluation. The trainer calls nothing else, so these few
methods are enough to put any PyTorch model on a swarm. Every task keeps these invariants:

* what nodes must agree on (the model, the averaging, the schedule) follows from the task's options
  and a seed alone, never from the machine;
* data is local: `batches` may read anything on this node;
* a task never touches the network, and leaves torch's global random state as it was.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.muon import Optimizers

Batch = Any
"""One batch of training data; only its own task looks inside."""

_DISTRIBUTED = nn.parallel.DistributedDataParallel, nn.DataParallel

_WRAPPERS = {"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What torch.compile, Fabric, FSDP and activation checkpointing put into names, also those of parts of a
model. Only a whole component matches, since other components may end so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStream:
    """Which part of the data a node draws, and from where on.

    Two streams with the same `seed` and `node_id` give the same batches in the same order, on the
    same data; streams of different nodes are independent.
    """

    seed: int
    """The run's data seed, 0 <= seed < 2**63; usually the same for all nodes."""
    node_id: bytes
    """Tells nodes apart; any bytes."""
    skip_batches: int = 0
    """Batches already drawn: a resumed node goes on where it stopped."""
    samples: Iterator[int] | None = None
    """Which of the samples of `Task.shared_data` to train on, one after another, without end. None where the
    swarm does not go through the same data together: then the stream is a node's own."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise TaskError(f"seed is {self.seed}: choose one in 0 <= seed < 2**63")
        if self.skip_batches < 0:
            raise TaskError(f"skip_batches is {self.skip_batches}: it cannot be negative")

    def derived_seed(self, purpose: str = "") -> int:
        """A 63-bit seed from SHA-256 over `seed`, `node_id` and `purpose`; independent of `skip_batches`."""
        text = self.seed.to_bytes(8, "big") + len(self.node_id).to_bytes(8, "big") + self.node_id
        return int.from_bytes(hashlib.sha256(text + purpose.encode()).digest()[:8], "big") >> 1

    def generator(self, epoch: int = 0) -> np.random.Generator:
        """A fresh NumPy generator for one pass over the data, so that any pass can be reached directly.

        A task that does not count passes gives `skip_batches` as `epoch`; otherwise each restart would draw
        the same samples again.
        """
        return np.random.default_rng((self.derived_seed(), epoch))


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a task that has none."""


class Task(abc.ABC):
    """What a swarm trains. Subclass it, or use one from `gossamer.models.registry`.

    A subclass in a custom file is loaded by `gossamer.models.task_file`, and its constructor is called with
    its options and this node's data, as `__init__` here.
    """

    Options: ClassVar[Any] = NoOptions
    """What all nodes agree on besides the model's code: a frozen dataclass whose fields are str, int, float
    or bool and have defaults. It may refuse values with a `ValueError` in `__post_init__`."""

    def __init__(self, options: Any = None, data: Sequence[Path] = ()) -> None:
        """`data`: this node's own files and folders, as `gossamer node --data` names them."""
        self.options: Any = self.Options() if options is None else options
        self.data = tuple(data)

    def data_in_words(self) -> str:
        """What this node trains on, for its log; called once a first batch has been drawn."""
        given = getattr(self, "data", None)
        if not isinstance(given, tuple):  # a subclass with its own `__init__` may keep something else there
            return "data of the task's own choice"
        return ", ".join(map(str, given)) or "the task's own data (no --data given)"

    @abc.abstractmethod
    def build_model(self, seed: int) -> nn.Module:
        """A new model on the CPU, in train mode and float32; the same parameters for the same seed.

        Must not disturb torch's global generator: draw from your own generator, or wrap the construction in
        `torch.random.fork_rng()` and seed inside. (For a task in a custom file, `task_file` does so.)
        """

    @abc.abstractmethod
    def build_optimizer(self, model: nn.Module) -> Optimizers:
        """The inner optimizer, at its peak learning rate; called once the model is on its device.

        May return several, each for its own share of the parameters; each inner step steps all, in this
        order.
        """

    @abc.abstractmethod
    def batches(self, stream: DataStream) -> Iterator[Batch]:
        """Yield training batches without end, starting after `stream.skip_batches` of them.

        (A task in a custom file may end after a pass over the data, and is then called for the next pass.
        After a restart it may start a new pass, with ``stream.generator(stream.skip_batches)``.)

        Raises:
            TaskError: this node's data is missing or unusable; at the latest on the first `next`.
        """

    def shared_data(self) -> tuple[int, str]:
        """How many samples this node's data has, and its SHA-256 in hex, or "": what nodes must have in
        common so that the swarm goes through the data together (see `DataStream.samples`).

        0 if this task cannot draw single samples, which is the default.
        """
        return 0, ""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss to minimise: a scalar, in mean nats per token. Moves the batch to the model's device."""

    @abc.abstractmethod
    def tokens(self, batch: Batch) -> int:
        """How many tokens (or samples, if there are no tokens) one step on this batch counts for."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The held-out loss, in mean nats per token, on the same data at every call.

        Must compute no gradient, and leave train or eval mode as it was (`evaluating` does both).
        """

    def averaging(self, model: nn.Module, name: str, parameter: Tensor) -> str:
        """How the swarm averages this parameter's deltas: 'rda' or 'mean'.

        The default is 'rda' (radial-directional averaging) for weight matrices and higher ranks, and 'mean'
        for vectors, scalars and embeddings, including a head tied to an embedding: rows of an embedding learn
        from different tokens, so that one length for the whole tensor means little. `name` and `parameter`
        come from `named_tensors(model)`.
        """
        return default_averaging(model, parameter)

    def lr_scale(self, swarm_tokens: int) -> float:
        """Factor on the inner learning rate, given the tokens that the whole swarm has trained on so far.

        It does not depend on this node's own steps, so that a joiner is at the right place at once.
        """
        return 1.0

    def sample(
        self, model: nn.Module, prompt: str, length: int, *, temperature: float, seed: int
    ) -> Iterator[str]:
        """The model's continuation of the prompt, as text in pieces as they come.

        Args:
            length: characters to yield, not counting the prompt.
            temperature: 0 takes the likeliest token, 1 samples as learnt.
            seed: the same seed gives the same text.

        Raises:
            TaskError: at the call, if this task does not generate text or an argument is impossible.
        """
        raise TaskError(f"{type(self).__name__} does not generate text; choose a language-modelling task")

    def pretrained_files(self) -> dict[str, bytes]:
        """The files in a Hugging Face folder of the model beside its weights, by name.

        The weights are written under the names of `named_tensors`; `config.json` has to describe a model
        whose parameters have these names. If `local_tensors` finds any more, no folder is written, since it
        would not be the whole model.

        Raises:
            TaskError: `transformers` has no model like this one.
        """
        raise TaskError(f"{type(self).__name__} has no Hugging Face form; export to a .safetensors file")


def default_averaging(model: nn.Module, parameter: Tensor) -> str:
    """The default averaging rule of a model's parameter; `Task.averaging` says which and why."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    is_vector = parameter.ndim < 2
    return "mean" if is_vector or any(m.weight is parameter for m in embeddings) else "rda"


def _unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel, DataParallel, torch.compile and Lightning's Fabric have wrapped."""
    while True:
        if isinstance(model, _DISTRIBUTED):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # importing its class would take a second
            (model,) = model.children()
        elif type(model).__name__ == "_FabricModule":
            model = model.get_submodule("_forward_module")
        else:
            return model


def _plain_names(model: nn.Module, names: Collection[str]) -> list[str]:
    """Names within a model without what wrappers of the model's parts have put there.

    DistributedDataParallel's component, "module", may also be a model's own: it is dropped below one only.
    """
    inner = {
        f"{path}.module".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, _DISTRIBUTED)
    }
    plain = []
    for name in names:
        *path, last = name.split(".")
        kept = [
            part
            for place, part in enumerate(path, 1)
            if part not in _WRAPPERS and ".".join(path[:place]) not in inner
        ]
        plain.append(".".join([*kept, last]))
    return plain


def named_tensors(model: nn.Module, *, frozen: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters by name, in the order of registration; tied weights once, by their first name.

    A swarm does not share buffers and frozen parameters; `frozen` lists the latter too. What `torch.compile`,
    DistributedDataParallel, Fabric and FSDP put into names is removed, so that nodes with wrapped and plain
    models agree.
    """
    model = _unwrapped(model)
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad or frozen]
    names = _plain_names(model, [name for name, _ in found])
    plain = {name: parameter for name, (_, parameter) in zip(names, found, strict=True)}
    return list(plain.items()) if len(plain) == len(found) else found


def local_tensors(model: nn.Module, shared: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a model that a swarm does not share, by name: each node has its own.

    These are frozen parameters, and floating-point buffers that the model's state_dict holds. Anything else
    that a model needs, it computes when it is built.
    """
    model = _unwrapped(model)
    local: dict[str, Tensor] = {n: p for n, p in named_tensors(model, frozen=True) if not p.requires_grad}
    kept = set(_plain_names(model, list(model.state_dict())))  # Fabric's has plain names already
    buffers = dict(model.named_buffers())
    named = zip(_plain_names(model, list(buffers)), buffers.values(), strict=True)
    local |= {name: buffer for name, buffer in named if buffer.is_floating_point() and name in kept}
    return {name: tensor for name, tensor in local.items() if name not in shared}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient inside the `with`; afterwards every submodule is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
