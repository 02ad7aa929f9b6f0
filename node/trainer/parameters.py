"""A model's parameters as a swarm shares them: which are allowed, and whether the model still uses them."""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gossamer.models.task import named_tensors
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

# --- Parameters that FSDP2 or tensor parallelism has sharded over the ranks: DTensors.


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 and tensor parallelism create."""
    known = sys.modules.get("torch.distributed.tensor")  # slow to import; a script with a DTensor has done it
    return known is not None and isinstance(tensor, known.DTensor)


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters, which are those trained, back into a model that FSDP2 shards.

    A forward pass without a backward pass, as in an evaluation, leaves whole copies of some in their place,
    and the next pass would compute with these.
    """
    known = sys.modules.get("torch.distributed.fsdp")  # as for `is_sharded`
    if known is None:
        return
    for module in model.modules():
        if isinstance(module, known.FSDPModule):
            module.reshard()


def deal_out(whole: Tensor | None, sharded: Tensor) -> None:
    """Set a DTensor to the full tensor of the first rank; `whole` is None on the others."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    local = sharded.to_local()
    source = torch.empty(sharded.shape, dtype=local.dtype, device=local.device)
    if whole is not None:
        source.copy_(whole)
    dealt = distribute_tensor(source, sharded.device_mesh, sharded.placements)
    assert isinstance(dealt, DTensor)
    local.copy_(dealt.to_local())


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes that parameters may have. Progress is measured against a float32 image of Phi, so that between the
swarm and a bf16 model only what bf16 itself cannot hold is lost."""


CHECK_S = 0.005
"""A check for changed parameters that takes longer is not made each time. That is some thousand of them."""


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by name, frozen ones too. Raises ConfigError if it is not a model, or trains
    none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module, or several in an nn.ModuleList"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError("FullyShardedDataParallel (FSDP1) flattens parameters: use fully_shard (FSDP2)")
    parameters = dict(named_tensors(model, frozen=True))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError("the model has no parameters that require a gradient: there is nothing to train")
    return parameters


def check_shareable(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for the first parameter that no swarm can hold; the message says what to do."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise ConfigError(f"tensor {name!r} has no values yet: run one batch, or materialise the model")
        _check_kind(name, tensor)
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ConfigError(f"tensor {name!r} is sparse or nested; only dense tensors can be trained")
        if not tensor.numel():
            raise ConfigError(
                f"tensor {name!r} has no elements, its shape is {list(tensor.shape)}: freeze it with"
                " requires_grad_(False)"
            )
        if is_sharded(tensor):
            continue
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ConfigError(
                f"tensor {name!r} is a {type(tensor).__name__}, whose values only that class can read; only"
                " ordinary tensors can be trained"
            )
        _check_unexpanded(name, tensor)
        whole[name] = tensor
    _check_apart(whole)


def _check_on_all_ranks(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a sharded tensor that is not spread over all ranks of the node."""
    mesh, ranks = tensor.device_mesh, dist.get_world_size()  # type: ignore[attr-defined]
    if mesh.size() != ranks:
        raise ConfigError(
            f"tensor {name!r} is sharded over {mesh.size()} of the {ranks} ranks, which are one node: give"
            " fully_shard a mesh of all of them; a mesh of two dimensions shards over the second, and"
            " averages over the first"
        )


def _check_unexpanded(name: str, tensor: Tensor) -> None:
    """Raise ConfigError if elements share memory, as after `expand` and in the windows of `unfold`."""
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if _reach(tensor) < tensor.numel() or 0 in steps:
        raise ConfigError(f"tensor {name!r} is expanded, so that elements share memory: clone() it")


def _reach(tensor: Tensor) -> int:
    """How many elements a tensor's memory spans, from its first to its last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if the memory of two tensors overlaps, from first to last element."""
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items())
    for (device, _, end, name), (other_device, begin, _, other) in pairwise(spans):
        if device == other_device and begin < end:
            raise ConfigError(
                f"tensors {name!r} and {other!r} are two parameters with the same memory: tie them, so that"
                " both are one Parameter, or clone() one"
            )


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """A tensor's device (-1 for the CPU), its first address, and the address behind its last element."""
    begin = tensor.data_ptr()
    return tensor.get_device(), begin, begin + _reach(tensor) * tensor.itemsize


def _check_kind(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a kind of tensor that cannot be trained."""
    if tensor.is_inference():
        raise ConfigError(
            f"tensor {name!r} was made in torch.inference_mode(), so nothing can train it: make it outside"
        )
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"tensor {name!r} is {tensor.dtype}; only {names} can be trained")


def check_fits(tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Raise ConfigError if a model's parameters are not the manifest's, naming the first that differs.

    The manifest says what is shared. A shared parameter may be frozen for now; all others must be frozen.
    """
    specs = {spec.name: spec for spec in manifest.layout.tensors}
    check_shareable({name: tensors[name] for name in specs if name in tensors})
    for name, spec in specs.items():
        if name not in tensors:
            raise ConfigError(
                f"the model has no tensor {name!r} of shape {list(spec.shape)}, which the manifest lists:"
                " give the model as it was described"
            )
        if tuple(tensors[name].shape) != spec.shape:
            raise ConfigError(
                f"tensor {name!r} has shape {list(tensors[name].shape)}; the manifest says {list(spec.shape)}"
            )
        if is_sharded(tensors[name]):
            _check_on_all_ranks(name, tensors[name])
    for name, tensor in tensors.items():
        if name not in specs and tensor.requires_grad:
            # A lazy layer's parameter has no shape before its first batch.
            shape = "" if isinstance(tensor, UninitializedParameter) else f" of shape {list(tensor.shape)}"
            raise ConfigError(f"the model trains tensor {name!r}{shape}, which the manifest does not list")


def checked_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> tuple[torch.optim.Optimizer, ...]:
    """The inner optimizers. Raises ConfigError if one is not an optimizer, or if none trains this model."""
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
            "the optimizer has none of the model's trainable parameters: create it from model.parameters(),"
            " after wrapping, sharding or moving the model; give [] if the backward pass steps without it"
        )
    return optimizers


class Binding:
    """The parameters that a model shared when its peer was created."""

    def __init__(self, model: nn.Module, manifest: Manifest) -> None:
        """Raises ConfigError if the model does not fit the manifest."""
        own = dict(named_tensors(model, frozen=True))
        check_fits(own, manifest)
        shared = {spec.name: own[spec.name] for spec in manifest.layout.tensors}
        self._model = model
        self._shared = {name: (p, p.shape, p.device) for name, p in shared.items()}
        # A sharded model has whole parameters in place of the sharded ones while it computes.
        self._is_checked = not any(map(is_sharded, shared.values()))
        self._places: list[object] = []
        """Where the parameters lay when they were last found to share no memory."""
        self._next_check = -math.inf

    def check(self, *, always: bool = False) -> None:
        """Raise ConfigError if the model trains other parameters by now.

        With thousands of parameters this takes long. Unless `always` is given, it then takes a hundredth of
        the time at most.
        """
        now = time.monotonic()
        if self._is_checked and (now >= self._next_check or always):
            begun = time.thread_time()
            self._check()
            took = time.thread_time() - begun
            if took > CHECK_S:
                self._next_check = now + 100 * took

    def _check(self) -> None:
        """Do what `check` says.

        If a model's parameters are replaced, the swarm is left with tensors that nobody trains. A parameter
        that is unfrozen without being in the manifest is trained by this node alone.
        """
        own = dict(named_tensors(self._model, frozen=True))
        for name, (parameter, shape, device) in self._shared.items():
            if own.get(name) is not parameter or parameter.shape != shape or parameter.device != device:
                raise ConfigError(
                    f"the model's tensor {name!r} was moved, resized or replaced while attached: do that"
                    " before attaching (and load_state_dict without assign=True), or leave and attach again"
                )
            _check_kind(name, parameter)
        places: list[object] = [(p.data_ptr(), p.stride(), p.dtype) for p, _, _ in self._shared.values()]
        if places != self._places:
            for name, (parameter, _, _) in self._shared.items():
                _check_unexpanded(name, parameter)
            _check_apart({name: parameter for name, (parameter, _, _) in self._shared.items()})
            self._places = places
        for name, parameter in own.items():
            if parameter.requires_grad and name not in self._shared:
                raise ConfigError(
                    f"tensor {name!r} now requires a gradient, but is not in the manifest, so the swarm does"
                    " not share it: describe the model with all that will ever be trained"
                )
