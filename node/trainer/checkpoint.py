"""The inner optimizers' state as a checkpoint holds it: tensors, plain values, and numbers of their
groups.
"""

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import accumulate, chain, count
from math import inf, isfinite
from numbers import Integral, Real
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.node.files import SameFolder, open_aside, remove_unfinished
from gossamer.node.trainer.fragments import OuterState
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.watchdogs import held_back

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


# --- A thread for what the trainer does beside its loop, such as writing a checkpoint.

WAIT_POLL_S = 0.001

Submit = Callable[..., "Work"]
"""``(function, *arguments)``: has the function called, and returns the `Work` that tells when it is done."""


class Work:
    """A call that has been submitted."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            # An object that submits one of its own methods usually keeps this `Work`. Finished work must not
            # refer back to the object: the cycle would be freed only by the garbage collector, which hardly
            # ever runs in a steady loop.
            function, arguments = self._function, self._arguments
            del self._function, self._arguments
            function(*arguments)
        except BaseException as error:  # `result` raises it; the thread goes on
            self._error = error
        finally:
            self.is_done = True

    def wait(self) -> None:
        while not self.is_done:
            time.sleep(WAIT_POLL_S)

    def result(self) -> None:
        """Wait for the call, and raise its error, if any."""
        self.wait()
        error, self._error = self._error, None  # raised once only, as its traceback refers to this
        if error is not None:
            try:
                raise error
            finally:
                del error


class WorkThread:
    """Does one piece of work after another.

    It has no lock that the training thread takes: a script's signal handler may make the peer leave, and so
    wait for this thread, while the training thread is anywhere in here. An executor has several locks, and
    takes no work once the main thread has ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_to_end = False

    def submit(self, function: Callable[..., None], *arguments: object) -> Work:
        """Have a call done by the thread, or at once if there can be no thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads just now, or the interpreter is exiting
                return at_once(function, *arguments)
            self._thread = thread
        work = Work(function, *arguments)
        self._waiting.put(work)
        if self._is_to_end:  # `end` was called meanwhile, and the thread may be gone
            self._do_what_waits()
        return work

    def end(self) -> None:
        """End the thread once all submitted work is done."""
        self._is_to_end = True
        self._waiting.put(None)

    def _do_what_waits(self) -> None:
        with suppress(Empty):
            while True:
                if (work := self._waiting.get_nowait()) is not None:
                    work.run()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work.run()


def at_once(function: Callable[..., None], *arguments: object) -> Work:
    """Make a call at once; `Work.result` raises its error, if any."""
    work = Work(function, *arguments)
    work.run()
    return work


# --- What only this node knows, kept across restarts: residuals, momenta, inner optimizer, data position.
#
# Phi is the swarm's; a checkpoint holds everything else that training needs. It is one safetensors file,
# written while training goes on (see `checkpointwriter`) and again when the node leaves, and read at the next
# start (see `checkpointreader`). It carries a checksum, since a flipped bit in a momentum would make the node
# diverge at every start.

VERSION = "2"
CHECKSUM = "crc32"


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor of a checkpoint."""

    name: str
    tensor: Tensor
    fragment: int | None = None
    """For a residual or a momentum: its fragment."""
    parameter: int | None = None
    """For an inner state: its parameter."""


class State:
    """What a checkpoint holds, and where in its file: a header, then the tensors one after another.

    See https://huggingface.co/docs/safetensors.
    """

    def __init__(self, tensors: Sequence[Saved], metadata: Mapping[str, str]) -> None:
        # The widest dtypes first: then every tensor is aligned to its item size, as readers prefer.
        self.tensors = sorted(tensors, key=lambda saved: -saved.tensor.itemsize)
        self.groups = _groups(tensors, self.tensors)
        """Indices of tensors whose elements are copied together, the widest first: an inner optimizer's
        tensors for one parameter. Groups of the same parameter or fragment follow each other."""
        self._metadata = dict(metadata)
        ends = accumulate((saved.tensor.nbytes for saved in self.tensors), initial=0)
        self._offsets = list(ends)

    @classmethod
    def of(cls, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer]) -> "State":
        """The current state. It refers to the live tensors, which go on changing."""
        keepers = state_keepers(optimizers)
        inner = inner_state(keepers) if keepers else None
        tensors = [
            Saved(name, tensor, parameter=_parameter(name))
            for name, tensor in (inner.tensors.items() if inner else ())
        ]
        for index, state in enumerate(outer.fragments):
            for i, slot in enumerate(state.fragment.slots):
                for kind, kept in state.saved.items():
                    tensors.append(Saved(f"{kind}/{slot.spec.name}", kept[i], index))
        metadata = {"version": VERSION}
        if inner and keepers:
            metadata["inner"] = json.dumps(inner.values)
            metadata["optimizers"] = json.dumps(kinds(keepers))
            metadata["names"] = json.dumps(names(keepers, outer.names))
            metadata["options"] = json.dumps(options(keepers))
            metadata["dtypes"] = json.dumps(dtypes(keepers))
            if any(inner.learnt):
                metadata["learnt"] = json.dumps(inner.learnt)
        return cls(tensors, metadata)

    @property
    def has_inner(self) -> bool:
        """Whether the inner optimizers' state is in it."""
        return "inner" in self._metadata

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self._offsets[-1]

    def offset(self, index: int, elements: int) -> int:
        """Byte offset of an element of a tensor, counted from the first tensor."""
        return self._offsets[index] + elements * self.tensors[index].tensor.itemsize

    def header(self, progress: Progress, rounds: Sequence[int], checksums: Mapping[str, int]) -> bytes:
        """The header, JSON. `rounds` are the rounds to which the fragments' residuals belong, `checksums` the
        CRC-32 of each tensor's bytes."""
        metadata = self._with(progress, rounds)
        return self._header({**metadata, CHECKSUM: checksum(checksums, metadata)})

    def header_bytes(self, rounds: int) -> int:
        """The largest size of the header, with this number of rounds."""
        longest = self._with(Progress(2**63, 2**63), [2**63] * rounds)
        return len(self._header({**longest, CHECKSUM: checksum({}, {})}))

    def _with(self, progress: Progress, rounds: Sequence[int]) -> dict[str, str]:
        said = {
            "steps": str(progress.steps),
            "tokens": str(progress.tokens),
            "rounds": json.dumps(list(rounds)),
        }
        return said | self._metadata

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        return f'{{"__metadata__": {json.dumps(metadata)}, {self._entries}}}'.encode()

    @cached_property
    def _entries(self) -> str:
        """The header's entries for the tensors. Each is encoded by itself: one long call would hold up
        training."""
        return ", ".join(
            f"{json.dumps(saved.name)}: "
            + json.dumps(
                {
                    "dtype": DTYPES[saved.tensor.dtype],
                    "shape": list(saved.tensor.shape),
                    "data_offsets": [start, start + saved.tensor.nbytes],
                }
            )
            for saved, start in zip(self.tensors, self._offsets, strict=False)
        )


def _parameter(name: str) -> int:
    """The index of the parameter that an inner tensor belongs to, counted through all optimizers."""
    return int(name.split("/", 2)[1])


def _groups(tensors: Sequence[Saved], in_file: Sequence[Saved]) -> list[list[int]]:
    """Which tensors of a file to copy together, as indices into `in_file`; in the order of `tensors`."""
    places = {saved.name: place for place, saved in enumerate(in_file)}
    groups: dict[object, list[int]] = {}
    for saved in tensors:
        alike = (saved.parameter, saved.tensor.numel())
        groups.setdefault(saved.name if saved.parameter is None else alike, []).append(places[saved.name])
    return [sorted(group) for group in groups.values()]


def checksum(found: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """A checkpoint's checksum, from those of its tensors. It guards against bad disks, not against people."""
    whole = json.dumps([sorted(found.items()), sorted(metadata.items())])
    return f"{zlib.crc32(whole.encode()):08x}"


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes. The tensors are on the CPU."""
    views = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: zlib.crc32(view.numpy().data) for name, view in views.items()}


# --- One checkpoint on its way to disk: copied share by share in the training loop, written by a thread.
#
# The file is safetensors, written by hand: the library wants all tensors in memory at once.

SHARE_TENSORS = 512
"""The most tensors in a share, however small: each costs some 15 us."""

WIDEST_BYTES = 8
"""Shares are a multiple of the widest number, so that no number is cut."""

SYNCED_AT_THE_END_BYTES = 64 * 1024 * 1024
"""A larger checkpoint is not synced as the process ends, since the process is in a hurry then: a power cut
within seconds of its end may lose that checkpoint."""


class _Copied(NamedTuple):
    """A piece of a tensor, as bytes."""

    name: str
    bytes: Tensor
    offset: int
    """Place in the file in bytes, counted from the first tensor."""
    is_first: bool


class CheckpointCopy:
    """One checkpoint under way.

    A fragment's residual and momentum are saved as of one time, with the round that they belong to. If the
    fragment is published before all of it has been copied, it is copied again; if its whole next window was
    not enough either, in shares of twice the size. The inner optimizer's values for one element are also of
    one time: a variance without the momentum that came with it would make the next process take a huge step.
    Different elements may be some steps apart, which does no harm.
    """

    def __init__(
        self,
        path: Path,
        home: SameFolder,
        state: State,
        outer: OuterState,
        room: Tensor,
        growth: int,
        submit: Submit,
    ) -> None:
        """`room` holds one share, `growth` times the usual size; `submit` runs what waits for the disk."""
        self._path = path
        self._home = home
        self._state = state
        self._outer = outer
        self._room = room
        self.growth = growth
        self.has_grown = False
        self._submit = submit
        self._gpus = {saved.tensor.device for saved in state.tensors if saved.tensor.is_cuda}
        self._rounds = [0] * len(outer.fragments)
        self._checksums = {saved.name: 0 for saved in state.tensors}
        """CRC-32 of what has been written of each tensor so far."""
        self._data_at = 0
        """Where the tensors begin in the file."""
        self._group = 0
        self._done = 0
        """How many elements have been copied of each tensor of the group `_group`."""
        self._began = 0
        """The first group of the fragment that `_group` belongs to."""
        self._times_again = 0
        """How often the copy of that fragment has been begun again."""
        self._file: BinaryIO | None = None
        self._aside = ""
        self._written = submit(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether the last share is written."""
        return self._written.is_done

    def advance(self, progress: Progress) -> bool:
        """Copy the next share; returns whether the file is there. Raises OSError."""
        self._written.result()
        if self._group == len(self._state.groups):
            if not self._file:
                return True
            self._written = self._submit(self._finish, progress)
            return False
        self._begin_again_if_published()
        share: list[_Copied] = []
        room = self._room
        while self._group < len(self._state.groups) and len(share) < SHARE_TENSORS * self.growth:
            pieces = self._copy(room)
            if not pieces:
                break
            share += pieces
            taken = sum(piece.bytes.numel() for piece in pieces)
            room = room[-(-taken // WIDEST_BYTES) * WIDEST_BYTES :]
        self._written = self._submit(self._write, share, [(gpu, _mark(gpu)) for gpu in self._gpus])
        return False

    def wait_ready(self) -> None:
        """Wait until `is_ready`."""
        self._written.wait()

    def give_up(self) -> None:
        """Remove the temporary file, once `is_ready`."""
        if self._file:
            with suppress(OSError):  # closing tries to write the rest again
                self._file.close()
            with suppress(OSError):
                os.unlink(self._aside)

    def _begin_again_if_published(self) -> None:
        fragment = self._fragment(self._group)
        if fragment is None or fragment != self._fragment(self._began):
            return  # nothing of this fragment has been copied
        if self._rounds[fragment] != self._outer.fragments[fragment].last_published:
            self._group, self._done = self._began, 0
            self._times_again += 1
            if self._times_again > 1:  # a whole window was not enough
                self._grow()

    def _grow(self) -> None:
        """Use larger shares: each holds up training for longer, but a single one needs no second try."""
        self.growth, self.has_grown = 2 * self.growth, True
        self._room = room_of(2 * self._room.numel(), self._state)

    def _copy(self, room: Tensor) -> list[_Copied]:
        """Copy as many of the next group's elements as `room` can take; nothing if it can take none."""
        group = self._state.groups[self._group]
        tensors = [self._state.tensors[index].tensor.detach() for index in group]
        start, numel = self._done, tensors[0].numel()
        end = min(numel, start + room.numel() // sum(tensor.itemsize for tensor in tensors))
        if end == start < numel:
            return []
        if not start:
            self._note_round()
        pieces: list[_Copied] = []
        for index, tensor in zip(group, tensors, strict=True):
            copied = room[: (end - start) * tensor.itemsize]
            # The copy is queued behind the GPU's earlier work: neither the GPU nor the loop waits.
            copied.view(tensor.dtype).copy_(_elements(tensor, start, end), non_blocking=tensor.is_cuda)
            name, offset = self._state.tensors[index].name, self._state.offset(index, start)
            pieces.append(_Copied(name, copied, offset, is_first=not start))
            room = room[copied.numel() :]
        self._done = end
        if end == numel:
            self._group, self._done = self._group + 1, 0
        return pieces

    def _note_round(self) -> None:
        fragment = self._fragment(self._group)
        before = self._fragment(self._group - 1) if self._group else None
        if fragment is not None and fragment != before:
            if self._began != self._group:
                self._began, self._times_again = self._group, 0
            self._rounds[fragment] = self._outer.fragments[fragment].last_published

    def _fragment(self, group: int) -> int | None:
        return self._state.tensors[self._state.groups[group][0]].fragment

    # -- in the thread

    def _open(self) -> None:
        # The header's length is not known yet: the room that it does not need is filled with spaces.
        self._data_at = 8 + self._state.header_bytes(len(self._rounds))
        self._home.check()
        # Temporary files of trainers that were killed.
        remove_unfinished(self._path.parent.glob(".*-*"), self._path.name.__eq__)
        fd, self._aside = open_aside(self._path)
        self._file = os.fdopen(fd, "wb")

    def _write(
        self, share: Sequence[_Copied], arrived: Sequence[tuple[torch.device, torch.cuda.Event]]
    ) -> None:
        assert self._file
        for gpu, event in arrived:
            with torch.cuda.device(gpu):  # not the first one, which would take memory there
                event.synchronize()
        at = -1
        for name, piece, offset, is_first in share:
            if offset != at:
                self._file.seek(self._data_at + offset)
            at = offset + piece.numel()
            data = piece.numpy().data
            self._file.write(data)
            self._checksums[name] = zlib.crc32(data, 0 if is_first else self._checksums[name])

    def _finish(self, progress: Progress) -> None:
        assert self._file
        header = self._state.header(progress, self._rounds, self._checksums)
        size = self._data_at - 8
        self._file.seek(0)
        self._file.write(size.to_bytes(8, "little") + header.ljust(size))
        if self._submit is not at_once or self._state.size <= SYNCED_AT_THE_END_BYTES:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self._path)
        self._file = None


def room_of(size: int, state: State) -> Tensor:
    """Memory of `size` bytes, pinned if a GPU is to copy to it."""
    if any(saved.tensor.is_cuda for saved in state.tensors):
        with suppress(RuntimeError):  # no more memory can be pinned: then each copy is waited for
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _mark(device: torch.device) -> torch.cuda.Event:
    """An event that a GPU reaches once all work queued up to now is done."""
    event = torch.cuda.Event(blocking=True)  # so that the waiting thread does not spin
    event.record(torch.cuda.current_stream(device))
    return event


def _elements(tensor: Tensor, start: int, end: int) -> Tensor:
    """A tensor's elements from `start` to `end`, row-major. If that takes a copy, it is of little more."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:end]
    row = tensor[0].numel()
    first, last = start // row, (end - 1) // row
    start, end = start - first * row, end - first * row
    if first == last:
        return _elements(tensor[first], start, end)
    return tensor[first : last + 1].reshape(-1)[start:end]


# --- Restores a checkpoint at the start.
#
# A fragment's residual is used only if it belongs to the last delta that we published of that fragment: what
# an
# older residual holds has been sent since. A checkpoint that is damaged, or belongs to something else, is
# left
# alone. Everything then begins afresh, and the node logs it.

_NOT_AS_WRITTEN = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors from reading JSON, or from using its content, when the file holds something else."""

_OTHER = "the inner optimizer has different {} than its saved state"


@held_back()  # a watchdog's error would be taken for one of the file's, or of the optimizer's
def restore(
    path: Path, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, bool] | None:
    """Restore a checkpoint. The fragments' `last_published` must already say what others have of us.

    Returns how far the node had come, and whether the inner optimizers resumed: some cannot be saved, and
    optimizers that differ from the saved ones begin afresh. Returns None, with nothing changed, if there is
    no checkpoint or it does not fit the model.
    """
    try:
        tensors, metadata = _read(path)
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            raise ValueError("it is from another model")
        has_inner = _take_up_inner(outer, optimizers, tensors, metadata)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, *_NOT_AS_WRITTEN) as error:
        log.warning("cannot use %s (%s): residuals, inner optimizer and data start afresh", path, error)
        return None
    for state, saved in zip(outer.fragments, rounds, strict=True):
        for i, slot in enumerate(state.fragment.slots):
            for kind, kept in state.saved.items():
                if kind != "residual" or saved == state.last_published:
                    kept[i].copy_(tensors[f"{kind}/{slot.spec.name}"])
    return progress, has_inner and progress.steps > 0  # before the first step, an optimizer is fresh


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A whole checkpoint's tensors and metadata. Raises OSError, SafetensorError, KeyError or ValueError."""
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = dict(file.metadata() or {})
        if metadata.get("version") != VERSION:
            raise ValueError("another release wrote it")
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if metadata.pop(CHECKSUM) != checksum(checksums_of(tensors), metadata):
        raise ValueError("it is damaged")
    return tensors, metadata


def _fits(outer: OuterState, tensors: Mapping[str, Tensor]) -> bool:
    return all(
        tensors[f"{kind}/{slot.spec.name}"].shape == kept[i].shape
        for state in outer.fragments
        for i, slot in enumerate(state.fragment.slots)
        for kind, kept in state.saved.items()
    )


def _take_up_inner(
    outer: OuterState,
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: dict[str, Tensor],
    metadata: Mapping[str, str],
) -> bool:
    """Restore the inner optimizers' state, if it fits them; returns whether it does.

    *Places* are the positions that the parameters had among those of the optimizers when they were saved.
    """
    keepers = state_keepers(optimizers)
    if not keepers or "optimizers" not in metadata:
        return False
    names_now = names(keepers, outer.names)
    names_then: list[list[str]] = json.loads(metadata["names"]) if "names" in metadata else names_now
    plain: dict[str, Any] = json.loads(metadata["inner"])
    keys = _keys(tensors, plain)
    learnt: list[dict[str, float]] = json.loads(metadata.get("learnt", "[]"))
    places = _places(list(chain(*names_then)), list(chain(*names_now)))
    if places is None:
        return _begins_afresh(_OTHER.format("parameters"))
    difference = _difference(keepers, places, metadata, around=optimizers)
    if difference is not None:
        has_state = bool(keys or learnt)  # without any, nothing is lost, and there is nothing to log
        return has_state and _begins_afresh(_OTHER.format(difference))
    groups = [group for keeper in keepers for group in keeper.param_groups]
    are_grouped_alike = [*map(sorted, names_then)] == [*map(sorted, names_now)]
    if learnt and not (len(learnt) == len(groups) and are_grouped_alike):
        return _begins_afresh(_OTHER.format("groups"))
    if _is_torn(keepers, places, keys):
        return _begins_afresh("the inner optimizer's saved state is torn")
    if not is_sound(tensors, learnt):
        return _begins_afresh("the inner optimizer's saved state is not finite")
    dtypes: list[str] = json.loads(metadata.get("dtypes", "[]"))
    trained_as = [dtypes[place] for place in places if place < len(dtypes)]
    if not restore_inner(keepers, tensors, plain, places, trained_as):
        return False
    take_up_learnt(keepers, learnt)
    return True


def _difference(
    keepers: Sequence[torch.optim.Optimizer],
    places: Sequence[int],
    metadata: Mapping[str, str],
    *,
    around: Sequence[torch.optim.Optimizer],
) -> str | None:
    """In what the optimizers differ from the saved ones, whose parameters stood at these places; None if in
    nothing."""
    kept, now = _each(json.loads(metadata["optimizers"])), [_each(kinds(keepers))]
    if "names" not in metadata:  # earlier releases wrote down the wrappers around the optimizers
        now.append(_each(kinds(around)))
    if len(kept) != len(places) or [kept[place] for place in places] not in now:
        return "classes or shapes"
    if "options" in metadata:
        decided: list[list[str]] = json.loads(metadata["options"])
        if [decided[place] for place in places] != options(keepers):
            return "options"
    return None


def _begins_afresh(why: str) -> Literal[False]:
    """Log why the inner optimizers do not resume; returns False, for that."""
    log.warning("%s: it starts afresh", why)
    return False


def _places(then: Sequence[str], now: Sequence[str]) -> list[int] | None:
    """Where each of `now` stood in `then`; None if the names differ. Equal names are taken in order."""
    stood, stand = (sorted(range(len(names)), key=names.__getitem__) for names in (then, now))
    if [then[place] for place in stood] != [now[place] for place in stand]:
        return None
    moved = dict(zip(stand, stood, strict=True))
    return [moved[place] for place in range(len(now))]


def _each(optimizers: Sequence[Sequence[Any]]) -> list[tuple[str, list[int]]]:
    """For each parameter, the class of its optimizer and its shape."""
    return [(kind, shape) for kind, shapes in optimizers for shape in shapes]


def _keys(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[int, set[str]]:
    """The keys of each parameter's saved state, by the place that the parameter had then."""
    keys: dict[int, set[str]] = {}
    for name in (*(name[len("inner/") :] for name in tensors if name.startswith("inner/")), *plain):
        index, key = name.split("/", 1)
        keys.setdefault(int(index), set()).add(key)
    return keys


def _is_torn(
    optimizers: Sequence[torch.optim.Optimizer], places: Sequence[int], keys: Mapping[int, set[str]]
) -> bool:
    """Whether the state was saved in the middle of a first step, as earlier releases could: it would end
    training at every start.

    In such a state, of two parameters in one group with equally many dimensions, one has only some of the
    other's keys. Some optimizers keep other keys for larger parameters, but not fewer.
    """
    place = iter(places)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        alike: dict[int, set[frozenset[str]]] = {}
        for parameter in group["params"]:
            if found := keys.get(next(place)):
                alike.setdefault(parameter.dim(), set()).add(frozenset(found))
        if any(one < other for kept in alike.values() for one in kept for other in kept):
            return True
    return False


# --- Writes checkpoints while training goes on.
#
# At each inner step a share of the state is copied to memory that is kept for it, and a thread writes that
# share to a temporary file, which is renamed when it is complete. So no step is held up by a whole
# checkpoint,
# there is no second copy of the state, and few pages are touched for the first time, which is most of the
# cost
# of copying a state.

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
"""A state is copied over at most 64 inner steps, with at least 2 MiB at each: a third of a millisecond."""

BYTES_PER_S = 4 * 1024 * 1024
"""How much is written on average. A MiB costs a third of a millisecond, so this takes about a thousandth of a
core's time."""

TENSORS_PER_S = 200
"""How many tensors are written on average, however small. Each costs some 20 to 40 us, so this takes less
than a hundredth of a core's time; half of that holds up training."""

INTERVAL_MIN_S = 5.0
INTERVAL_MAX_S = 300.0
"""The longest time between checkpoints: a crash loses no more of the inner optimizer's state than this,
however large the state is."""


class CheckpointWriter:
    """Keeps a node's checkpoint up to date. It belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._home = SameFolder(path.parent)
        self._thread = WorkThread("checkpoint")
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._growth = 1
        """By what factor the last checkpoint's shares had to grow."""
        self._under_way: CheckpointCopy | None = None
        self._begun_at = -inf
        self._interval = INTERVAL_MIN_S
        self._said = ""
        """The logged reason why the last checkpoint could not be written."""
        self._said_of_inner = False
        """Whether it has been logged that the inner optimizer's state cannot be saved."""

    def is_due(self) -> bool:
        """Whether a checkpoint should be begun now: never while one is under way."""
        return self._under_way is None and time.monotonic() - self._begun_at > self._interval

    def begin(self, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin a checkpoint."""
        with held_back():  # a watchdog's error would be taken for one of the optimizer's
            self._begin(outer, optimizers, self._thread.submit)

    def _begin(self, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer], submit: Submit) -> None:
        state = State.of(outer, optimizers)
        if optimizers and not state.has_inner and not self._said_of_inner:
            log.warning("the inner optimizer's state cannot be saved: after a restart it starts afresh")
            self._said_of_inner = True
        share = -(-max(SHARE_BYTES, state.size // SHARES) // WIDEST_BYTES) * WIDEST_BYTES * self._growth
        if self._room.numel() != share:
            self._room = room_of(share, state)
        self._begun_at = time.monotonic()
        cost_s = state.size / BYTES_PER_S + len(state.tensors) / TENSORS_PER_S
        self._interval = min(max(INTERVAL_MIN_S, cost_s), INTERVAL_MAX_S)
        self._under_way = CheckpointCopy(
            self._path, self._home, state, outer, self._room, self._growth, submit
        )

    def advance(self, progress: Progress, *, wait: bool = False) -> None:
        """Copy the next share of the checkpoint under way. Waits for the disk only if told to."""
        writing = self._under_way
        if writing is None or not (wait or writing.is_ready):
            return
        with held_back():  # a share that is copied and never written would leave a hole
            try:
                if writing.advance(progress):
                    self._under_way = None
                    self._said = ""
                    # If shares need not have grown this time, try smaller ones next: perhaps the disk had
                    # hung.
                    self._growth = writing.growth if writing.has_grown else max(1, writing.growth // 2)
            except OSError as error:  # not around all of this: a watchdog's TimeoutError is one, too
                self._say_cannot(error.strerror or str(error))
                self._give_up()
            except BaseException:  # such as no memory on a GPU, after which a loop may go on
                self._give_up()
                raise

    def save(
        self, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer], progress: Progress
    ) -> None:
        """Write a whole checkpoint now, in place of one under way; returns once it is there.

        It does not use the thread: a script that never left its peer leaves as the interpreter exits, when
        threads take no more work.
        """
        self._give_up()
        with held_back():
            self._begin(outer, optimizers, at_once)
        while self._under_way is not None:
            self.advance(progress, wait=True)

    def save_if_sound(
        self, outer: OuterState, optimizers: Sequence[torch.optim.Optimizer], progress: Progress
    ) -> None:
        """As `save`, but after an error, which must stay the one to be seen: a failure is only logged."""
        try:
            self.save(outer, optimizers, progress)
        except Exception as error:  # such as a failed device, which has ended training
            self._say_cannot(str(error))

    def close(self) -> None:
        """Give up the checkpoint under way, if any, and end the thread."""
        self._give_up()
        self._thread.end()

    def _say_cannot(self, problem: str) -> None:
        if problem != self._said:  # not again every few seconds while a disk is full
            log.warning("cannot save the trainer's state to %s: %s", self._path, problem)
        self._said = problem

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way.wait_ready()  # a disk may hang: Ctrl-C ends this
            with held_back():  # half given up, it would fail at the next step
                self._under_way.give_up()
                self._under_way = None
