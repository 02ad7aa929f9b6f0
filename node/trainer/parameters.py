"""A model's parameters as a swarm shares them: which are allowed, whether the model still uses them, and
whether they are as at the last step boundary."""

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

SAMPLES = 64
"""How many parameters are sampled. What changes a model changes many of them."""


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
    spans: list[tuple[int, int, int, str]] = []
    """Each tensor's device (-1 for the CPU), its first address, the one behind its last element; its name."""
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise ConfigError(f"tensor {name!r} has no values yet: run one batch, or materialise the model")
        if tensor.is_inference():
            raise ConfigError(
                f"tensor {name!r} was made in torch.inference_mode(), so nothing can train it: make it"
                " outside"
            )
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ConfigError(f"tensor {name!r} is {tensor.dtype}; only {names} can be trained")
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
        steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        if _reach(tensor) < tensor.numel() or 0 in steps:  # also the windows of `unfold`
            raise ConfigError(f"tensor {name!r} is expanded, so that elements share memory: clone() it")
        begin = tensor.data_ptr()
        spans.append((tensor.get_device(), begin, begin + _reach(tensor) * tensor.itemsize, name))
    for (device, _, end, name), (other_device, begin, _, other) in pairwise(sorted(spans)):
        if device == other_device and begin < end:
            raise ConfigError(
                f"tensors {name!r} and {other!r} are two parameters with the same memory: tie them, so that"
                " both are one Parameter, or clone() one"
            )


def _reach(tensor: Tensor) -> int:
    """How many elements a tensor's memory spans, from its first to its last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


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
        if not is_sharded(tensors[name]):
            continue
        size, ranks = tensors[name].device_mesh.size(), dist.get_world_size()  # type: ignore[attr-defined]
        if size != ranks:
            raise ConfigError(
                f"tensor {name!r} is sharded over {size} of the {ranks} ranks, which are one node: give"
                " fully_shard a mesh of all of them; a mesh of two dimensions shards over the second, and"
                " averages over the first"
            )
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
        self._model = model
        self._shared = {spec.name: own[spec.name] for spec in manifest.layout.tensors}
        self._kinds = {name: _kind(tensor) for name, tensor in self._shared.items()}
        # A sharded model has whole parameters in place of the sharded ones while it computes.
        self._is_checked = not any(map(is_sharded, self._shared.values()))
        self._sound: object = None
        """What `_state` was when `_check` last found nothing wrong."""
        self._next_check = -math.inf

    def check(self, *, always: bool = False) -> None:
        """Raise ConfigError if the model trains other parameters by now.

        With thousands of parameters this takes long. Unless `always` is given, it then takes a hundredth of
        the time at most.
        """
        if self._is_checked and (time.monotonic() >= self._next_check or always):
            begun = time.thread_time()
            self._check()
            took = time.thread_time() - begun
            self._next_check = time.monotonic() + (100 * took if took > CHECK_S else 0.0)

    def _check(self) -> None:
        """Do what `check` says.

        If a model's parameters are replaced, the swarm is left with tensors that nobody trains. A parameter
        that is unfrozen without being in the manifest is trained by this node alone.
        """
        state = self._state()
        if state == self._sound:
            return
        own = dict(named_tensors(self._model, frozen=True))
        for name, parameter in self._shared.items():
            if own.get(name) is not parameter or _kind(parameter) != self._kinds[name]:
                raise ConfigError(
                    f"the model's tensor {name!r} was moved, resized or replaced, or has another dtype, since"
                    " it was attached: do that before attaching (and load_state_dict without assign=True), or"
                    " leave and attach again"
                )
        check_shareable(self._shared)
        for name, parameter in own.items():
            if parameter.requires_grad and name not in self._shared:
                raise ConfigError(
                    f"tensor {name!r} now requires a gradient, but is not in the manifest, so the swarm does"
                    " not share it: describe the model with all that will ever be trained"
                )
        self._sound = state

    def _state(self) -> list[object]:
        """All that a check depends on, without the names, which take longest to find."""
        used: list[nn.Parameter | None] = []
        modules: list[nn.Module | None] = [self._model]
        while modules:
            if (module := modules.pop()) is not None:
                modules += module._modules.values()
                used += module._parameters.values()
        shared = self._shared.values()
        return [
            list(map(id, used)),
            [p is not None and p.requires_grad for p in used],
            # A list for each, as thousands of tuples would keep the garbage collector busy.
            *([place(p) for p in shared] for place in (Tensor.data_ptr, Tensor.stride)),
            *([getattr(p, field) for p in shared] for field in ("shape", "dtype", "device")),
        ]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.device, tensor.dtype


class StepBoundary:
    """Whether parameters are as they were at the last step boundary.

    torch counts changes in place, except those by `.data` (Lightning's averaged weights come and go in that
    way) and by fused optimizers. So one value of some parameters is remembered, too. On a GPU it stays there:
    marking a boundary waits for nothing, and takes some tens of microseconds.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._views: list[Tensor] = []
        """One value of each sampled tensor."""
        self._marked: tuple[list[int], list[int], list[Tensor]] = [], [], []
        self.mark()

    def mark(self) -> None:
        """The parameters are now as at a step boundary."""
        places = [tensor.data_ptr() for tensor in self._tensors]
        if places != self._marked[0]:
            self._views = [
                tensor.detach()[tuple(size // 2 for size in tensor.shape)].view(1)
                for tensor in self._tensors[:: max(1, len(self._tensors) // SAMPLES)]
                if tensor.numel()
            ]
        self._marked = places, [tensor._version for tensor in self._tensors], self._sampled()

    @property
    def holds(self) -> bool:
        """Whether they still are."""
        places, versions, values = self._marked
        return (
            places == [tensor.data_ptr() for tensor in self._tensors]
            and versions == [tensor._version for tensor in self._tensors]
            and all(map(torch.equal, values, self._sampled()))
        )

    def _sampled(self) -> list[Tensor]:
        """The values, one tensor for each device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for view in self._views:
            by_device.setdefault(view.device, []).append(view)
        return [torch.cat(views) for views in by_device.values()]
