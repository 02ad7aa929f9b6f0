"""The inner optimizers' state as a checkpoint holds it: tensors, plain values, and numbers of their
groups."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain, count
from math import isfinite
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_DECIDING = ("amsgrad", "beta1", "centered", "momentum")
"""Options of torch.optim and of Adafactor that decide what an optimizer keeps for a parameter, by whether
they are zero, false or None. An optimizer whose state lacks something that it expects ends training."""

_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers write into groups. The script makes them anew."""

log = logging.getLogger("gossamer.checkpoint")

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes of tensors that can be saved, and their names in safetensors."""


@dataclass(frozen=True, slots=True)
class Inner:
    """What inner optimizers have learnt. Parameters and groups are numbered through all optimizers."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """Plain values of parameters."""
    learnt: Sequence[Mapping[str, float]]
    """Numbers of each group."""


def state_keepers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer] | None:
    """The optimizers that hold the state. For a wrapper that passes the inner one's state off as its own,
    such as accelerate's, that is the inner one. An optimizer that merely refers to another of `optimizers`,
    as in a GAN, holds its own.

    None if both the wrapper and the inner one hold state, as with SAM: half of it would do harm.
    """
    keepers: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        around = [optimizer]
        try:
            while held := _held(around[-1], but=(*around, *optimizers)):
                if not all(_gives_out(around[-1], one) for one in held):
                    return None
                around.append(held[0])
        except Exception:  # a custom optimizer that was never meant to be saved
            return None
        keepers.append(around[-1])
    return keepers


def _held(
    optimizer: torch.optim.Optimizer, but: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The other optimizers that one refers to, directly or in a list."""
    values = vars(optimizer).values()
    held = chain.from_iterable(value if isinstance(value, list | tuple) else (value,) for value in values)
    others = [value for value in held if isinstance(value, torch.optim.Optimizer)]
    return [other for other in others if all(other is not one for one in but)]


def _gives_out(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    """Whether the state that `outer` would save is that of `inner`, and not its own."""
    if [*map(id, _parameters(outer))] != [*map(id, _parameters(inner))]:
        return False
    ours, theirs = outer.state_dict()["state"], inner.state_dict()["state"]
    return ours.keys() == theirs.keys() and all(ours[index] is theirs[index] for index in ours)


def inner_state(optimizers: Sequence[torch.optim.Optimizer]) -> Inner | None:
    """The state of `state_keepers` as named tensors and plain values.

    None for a state that holds anything else, since half of it would do harm. LBFGS keeps lists, SGD with
    momentum keeps sparse tensors for sparse gradients, FSDP2 on one rank keeps sharded tensors, 8-bit
    optimizers keep quantised ones, and some keep state that belongs to no parameter, keys that are not text,
    or more in their `state_dict` beside the state and the groups.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    learnt: list[dict[str, float]] = []
    start = 0
    for optimizer in optimizers:
        try:
            whole = optimizer.state_dict()
            saved, has_more = whole.get("state"), not whole.keys() <= {"state", "param_groups"}
            numbers = _learnt(optimizer)
        except Exception:  # a custom optimizer that was never meant to be saved
            return None
        if not isinstance(saved, dict) or has_more or numbers is None:
            return None
        learnt += numbers
        for index, state in saved.items():
            if not (isinstance(index, int) and isinstance(state, dict)):
                return None
            for key, value in state.items():
                if not (isinstance(key, str) and key.isprintable()):
                    return None
                if type(value) is Tensor and _can_be_saved(value):
                    tensors[f"inner/{start + index}/{key}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    plain[f"{start + index}/{key}"] = value
                else:
                    return None
        start += len(_parameters(optimizer))
    return Inner(tensors, plain, learnt)


def is_sound(tensors: Mapping[str, Tensor], learnt: Sequence[Mapping[str, float]]) -> bool:
    """Whether an inner state is finite; `tensors` may hold other tensors too.

    A state that diverged would make the model diverge again, at any learning rate.
    """
    inner = (tensor for name, tensor in tensors.items() if name.startswith("inner/"))
    numbers = (number for numbers in learnt for number in numbers.values())
    return all(map(_is_finite, inner)) and all(map(isfinite, numbers))


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. One-byte dtypes count as finite: torch cannot check all of them."""
    return tensor.itemsize == 1 or bool(tensor.isfinite().all())


def _learnt(optimizer: torch.optim.Optimizer) -> list[dict[str, float]] | None:
    """Numbers that an optimizer has learnt and keeps in its groups, as Prodigy's `d`, ScheduleFree's `k` and
    the `step` of many.

    These are defaults of the optimizer that are not arguments of its constructor, and that have changed; and
    what is in a group without being a default, as a count that the first step puts there. Booleans are
    switches, which are for the script to set. Without these numbers, the tensors that go with them do harm:
    Prodigy would learn nothing more, and a bias correction would take old momenta for new ones. None if the
    optimizer keeps anything else there.
    """
    own = _own(optimizer)
    learnt: list[dict[str, float]] = []
    for group in optimizer.param_groups:
        numbers: dict[str, float] = {}
        added = group.keys() - optimizer.defaults.keys() - _OF_SCHEDULES
        for key in own.intersection(group) | added:
            value = group[key]
            if isinstance(value, Tensor):
                return None
            if isinstance(value, bool) or value == optimizer.defaults.get(key):
                continue
            if isinstance(value, Real) and (key in own or isfinite(value)):  # a script's option may be inf
                numbers[key] = int(value) if isinstance(value, Integral) else float(value)  # NumPy's, too
            elif key in own:
                return None
        learnt.append(numbers)
    return learnt


def take_up_learnt(
    optimizers: Sequence[torch.optim.Optimizer], learnt: Sequence[Mapping[str, float]]
) -> None:
    """Put the numbers of `inner_state` back into the groups. What a script has put into a group by itself
    stays as it is now."""
    groups = [(optimizer.defaults, group) for optimizer in optimizers for group in optimizer.param_groups]
    for (defaults, group), numbers in zip(groups, learnt, strict=False):
        group.update({key: value for key, value in numbers.items() if key in defaults or key not in group})


def _own(optimizer: torch.optim.Optimizer) -> set[str]:
    """The keys of an optimizer's defaults that no constructor of its classes names.

    Empty if none names the learning rate: a wrapper's defaults are those of another optimizer, and what a
    constructor of any arguments (`**kwargs`) takes is not known.
    """
    own = set(optimizer.defaults)
    for kind in type(optimizer).__mro__:
        if kind is torch.optim.Optimizer:
            break
        made = vars(kind).get("__init__")
        for argument in signature(made).parameters.values() if made else ():
            own.discard(argument.name)
    return set() if "lr" in own else own


def _can_be_saved(tensor: Tensor) -> bool:
    """Whether a checkpoint can hold it: its dtype is known, and all its elements lie in memory."""
    return tensor.dtype in DTYPES and tensor.layout is torch.strided and not tensor.is_meta


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kinds(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """What a state belongs to: each optimizer's class and its parameters' shapes."""
    return [
        [type(optimizer).__name__, [list(parameter.shape) for parameter in _parameters(optimizer)]]
        for optimizer in optimizers
    ]


def names(optimizers: Sequence[torch.optim.Optimizer], known: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of each group's parameters; parameters that are not the model's are numbered."""
    others = count()
    return [
        [known[p] if p in known else f"#{next(others)}" for p in group["params"]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def options(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[str]]:
    """Which of `_DECIDING` are on for each parameter."""
    return [
        [name for name in _DECIDING if group.get(name)]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for _ in group["params"]
    ]


def dtypes(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Each parameter's dtype."""
    return [str(parameter.dtype) for optimizer in optimizers for parameter in _parameters(optimizer)]


def restore_inner(
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: dict[str, Tensor],
    plain: dict[str, Any],
    places: Sequence[int],
    trained_as: Sequence[str] = (),
) -> bool:
    """Load what `inner_state` returned, taking it out of `tensors`, with the groups that the optimizers have
    now.

    `places` are the places that today's parameters had then. `trained_as` are their `dtypes` then, if known:
    the state of a parameter whose dtype has not changed keeps its own dtype. Returns whether all optimizers
    accepted it.
    """
    saved = _taken_out(tensors, plain)
    if not saved.keys() <= set(places):
        raise ValueError("state of more parameters than there are")
    start = 0
    for optimizer in optimizers:
        parameters = _parameters(optimizer)
        end = start + len(parameters)
        own = {index: saved[place] for index, place in enumerate(places[start:end]) if place in saved}
        if not _load(optimizer, own, parameters, trained_as[start:end]):
            return False
        start = end
    return True


def _taken_out(tensors: dict[str, Tensor], plain: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """What `inner_state` returned, by parameter; its tensors are removed from `tensors`."""
    saved: dict[int, dict[str, Any]] = {}
    for name in [name for name in tensors if name.startswith("inner/")]:
        _, index, key = name.split("/", 2)
        # A copy: a view would keep the whole file mapped, and a failing disk would end training.
        saved.setdefault(int(index), {})[key] = tensors.pop(name).clone()
    for name, value in plain.items():
        index, key = name.split("/", 1)
        saved.setdefault(int(index), {})[key] = value
    return saved


def _load(
    optimizer: torch.optim.Optimizer,
    state: dict[int, dict[str, Any]],
    parameters: Sequence[Tensor],
    trained_as: Sequence[str],
) -> bool:
    """Give an optimizer its parameters' state, by place; returns whether it accepted it."""
    groups = list(optimizer.param_groups)
    try:
        _lay_out(state, parameters)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        _undo_casts(optimizer, state, parameters, trained_as)
    except Exception as error:  # a custom optimizer: the same would happen at every start
        log.warning(
            "%s does not take its saved state (%s: %s): it starts afresh",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        return False
    finally:
        # `load_state_dict` replaced the groups by copies: a schedule that holds the old ones would have no
        # effect. The list itself stays, since wrappers around an optimizer share it.
        optimizer.param_groups[:] = groups
    return True


def _undo_casts(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[int, Mapping[str, Any]],
    parameters: Sequence[Tensor],
    trained_as: Sequence[str],
) -> None:
    """Undo what `load_state_dict` does: it casts tensors to their parameter's dtype, such as float32 momenta
    to bf16, and spoils strings."""
    for index, values in saved.items():
        parameter = parameters[index]
        loaded = optimizer.state.get(parameter, {})
        is_as_it_was = index < len(trained_as) and trained_as[index] == str(parameter.dtype)
        for key, value in values.items():
            if isinstance(value, str) and key in loaded:
                loaded[key] = value
            elif isinstance(value, Tensor) and isinstance(now := loaded.get(key), Tensor):
                if is_as_it_was and now.dtype != value.dtype:
                    loaded[key] = value.to(now.device)


def _lay_out(state: dict[int, dict[str, Any]], parameters: Sequence[Tensor]) -> None:
    """Give state tensors the memory layout of their parameters, which they had before.

    Fused optimizers process both in memory order, and the file is row-major.
    """
    for index, values in state.items():
        parameter = parameters[index]
        if parameter.is_contiguous():
            continue
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # One at a time, to save memory: nothing else holds them any more.
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                values[key] = laid_out.copy_(value)
