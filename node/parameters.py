"""A model's parameters as a swarm shares them: what they may be, and whether training still uses them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gossamer.models.task import named_tensors
from gossamer.node.ranks import is_sharded
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What parameters may be. Progress is measured against a float32 image of Phi, so that nothing is lost
between the swarm and a bf16 model but what bf16 itself cannot hold."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's trainable parameters by name. Raises ConfigError if it is no model."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module, or several in an nn.ModuleList"
        )
    return dict(named_tensors(model))


def check_shareable(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for the first parameter that no swarm can hold, naming it and what to do."""
    at: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise ConfigError(f"tensor {name!r} has no values yet: run one batch, or materialise the model")
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigError(f"tensor {name!r} is {tensor.dtype}; what can be trained is {names}")
        if not tensor.numel():
            raise ConfigError(
                f"tensor {name!r} has no elements, its shape is {list(tensor.shape)}: freeze it with"
                " requires_grad_(False)"
            )
        if is_sharded(tensor):
            continue
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(f"tensor {name!r} is expanded, so that elements share memory: clone() it")
        other = at.setdefault((tensor.device, tensor.data_ptr()), name)
        if other != name:
            raise ConfigError(
                f"tensors {other!r} and {name!r} are two parameters with the same memory: tie them, so that"
                " both are one Parameter, or clone() one"
            )


def check_fits(tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Raise ConfigError if a model's parameters are not the manifest's, naming the first that differs."""
    check_shareable(tensors)
    for spec in manifest.layout.tensors:
        if spec.name not in tensors:
            raise ConfigError(
                f"the model has no trainable tensor {spec.name!r} of shape {list(spec.shape)}, which the"
                f" manifest lists{_near(spec.name, tensors)}"
            )
        shape = tuple(tensors[spec.name].shape)
        if shape != spec.shape:
            raise ConfigError(
                f"tensor {spec.name!r} has shape {list(shape)}; the manifest says {list(spec.shape)}"
            )
    known = {spec.name for spec in manifest.layout.tensors}
    extra = next((name for name in tensors if name not in known), None)
    if extra is not None:
        shape = tuple(tensors[extra].shape)
        raise ConfigError(
            f"the model trains tensor {extra!r} of shape {list(shape)}, which the manifest does not list"
        )


def _near(name: str, tensors: Mapping[str, Tensor]) -> str:
    """A hint for a model that is wrapped where the manifest's is not, or the other way round."""
    if not tensors:
        return "; it has none at all: are all its parameters frozen?"
    near = next((own for own in tensors if own.endswith(f".{name}") or name.endswith(f".{own}")), None)
    return f"; it has {near!r}: give the model as it was described" if near else ""


def checked_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> tuple[torch.optim.Optimizer, ...]:
    """The inner optimizers. Raises ConfigError if they are none, or not of this model."""
    optimizers = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"the optimizer is a {type(one).__name__}: give a torch.optim.Optimizer, or a list of several"
            )
    own = set(map(id, tensors.values()))
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    if optimizers and tensors and own.isdisjoint(trained):
        raise ConfigError(
            "the optimizer has none of the model's trainable parameters: make it of model.parameters(), after"
            " wrapping, sharding or moving the model"
        )
    return optimizers


class Binding:
    """The parameters that a model had when its peer was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bound = {name: (p, p.shape, p.device) for name, p in named_tensors(model)}
        # A sharded model shows its parameters whole while it computes.
        self._is_checked = not any(is_sharded(p) for p, _, _ in self._bound.values())

    def check(self) -> None:
        """Raise ConfigError if the model trains others by now.

        Whatever replaces a model's parameters leaves the swarm with tensors that nobody trains, and what is
        unfrozen later is trained by this node alone.
        """
        if not self._is_checked:
            return
        own = dict(named_tensors(self._model, frozen=True))
        for name, (parameter, shape, device) in self._bound.items():
            if own.get(name) is not parameter or parameter.shape != shape or parameter.device != device:
                raise ConfigError(
                    f"the model's tensor {name!r} was moved, resized or replaced after it attached: do that"
                    " before (and load_state_dict without assign=True), or leave and attach again"
                )
        for name, parameter in own.items():
            if parameter.requires_grad and name not in self._bound:
                raise ConfigError(
                    f"tensor {name!r} requires a gradient now, and did not when the model attached, so that"
                    " the swarm does not share it: describe and attach with all that will be trained, and"
                    " freeze afterwards"
                )
