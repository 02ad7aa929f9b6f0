"""What only this node knows, kept across restarts: residuals, momenta, the inner optimizers' state, progress.

Phi is the swarm's; a checkpoint holds everything else that training needs. It is one file: the tensors' bytes
one after another, then a trailer in msgpack that says what they are, and a checksum, since a flipped bit in a
momentum would make the node diverge at every start.

**Writing.** The training loop never waits for the disk. At each inner step it copies some of the state, some
third of a millisecond's worth, and a thread writes that to a temporary file, which is renamed when it is
whole. What belongs together is copied at one step: a residual with its momentum and its round, and all that
an optimizer keeps of one parameter (a variance without the momentum that came with it would make the next
process take a huge step). Different tensors may be some steps apart, which does no harm.

**Reading.** A residual is used only if it belongs to the last delta that we published of its fragment: what
an older one holds has been sent since. An inner optimizer resumes its state if that is a tree of tensors and
plain values, and if it still trains the same parameters with the same options; otherwise it begins afresh,
and its learning rate is warmed up. A file that is damaged, or of another model, is left alone.
"""

import inspect
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol

import msgpack
import numpy as np
import torch
from torch import Tensor

from gossamer.node.files import remove_unfinished, replacing
from gossamer.protocol.payloads import Fragment

VERSION = 7

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
SHARE_TENSORS = 512
"""A step copies 2 MiB or some 64th of the state, whichever is more, and about 512 tensors at most, since each
costs some 15 us."""

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

GIVE_UP_S = 2.0
"""How long to wait for the thread of a checkpoint that is given up: a disk may hang."""

HUGE_BYTES = 4 * 1024 * 1024
"""From this size on, Linux gives NumPy huge pages. Copying there takes a third of the time."""

READ_BYTES = 1024 * 1024
TAIL_BYTES = 12
"""The file ends with the trailer's length, 8 bytes, and the CRC-32 of all before it, 4 bytes; big endian."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS + INTEGERS}
"""The dtypes of tensors that can be saved."""

Optimizers = Sequence[torch.optim.Optimizer]

Leaf = Callable[[str, Any], Any]
"""(key, value): what to put in the place of a value that stands under this key."""

log = logging.getLogger("gossamer.checkpoint")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this node has come over all its runs."""

    steps: int = 0
    """Inner steps, which is also the number of batches drawn."""
    tokens: int = 0


class FragmentState(Protocol):
    """A fragment of the outer loop, as far as it is saved."""

    fragment: Fragment
    last_published: int
    rate: float
    """The outer learning rate of its last delta."""
    saved: dict[str, list[Tensor]]
    """By kind, a tensor for each of the fragment's slots."""


class OuterState(Protocol):
    """The outer loop (`outer.OuterLoop`), as far as it is saved."""

    names: dict[Tensor, str]

    @property
    def fragments(self) -> Sequence[FragmentState]: ...


# --- What is copied.


@dataclass(slots=True)
class _Share:
    """What one step has copied."""

    pieces: list[Tensor] = field(default_factory=list)
    """On the CPU."""
    arrived: list[torch.cuda.Event] = field(default_factory=list)
    """Reached by the GPUs once the copies are there."""
    trailer: dict[str, Any] | None = None
    """Set in the last share."""


def _groups(outer: OuterState, optimizers: Optimizers, trailer: dict[str, Any]) -> Iterator[list[Tensor]]:
    """Tensors that belong together. The trailer says what they are, and the place of the first of them in
    the file, which is the number of those before it. Raises what a custom optimizer may."""
    entries = trailer["tensors"]
    for fragment in outer.fragments:
        for i, slot in enumerate(fragment.fragment.slots):
            kinds = list(fragment.saved)
            last = [fragment.last_published, fragment.rate]
            here = [slot.spec.name, slot.start, kinds, *last, len(entries)]
            trailer["outer"].append(here)
            yield [kept[i] for kept in fragment.saved.values()]
    for optimizer in optimizers:
        whole = optimizer.state_dict()
        # A wrapper may save another optimizer's state than the one it holds, or more than that.
        if not whole.keys() <= {"state", "param_groups"} or len(whole["state"]) != len(optimizer.state):
            raise TypeError("it saves more than a state and groups")
    for optimizer, group, parameter, name in _parameters(optimizers, outer.names):
        tree, tensors = _taken_apart(optimizer.state.get(parameter, {}))
        kind, learnt = _kind(optimizer, group, parameter), _learnt(optimizer, group)
        trailer["inner"][name] = [kind, learnt, tree, len(entries)]
        yield tensors


def _parameters(
    optimizers: Optimizers, known: Mapping[Tensor, str]
) -> Iterator[tuple[Any, dict[str, Any], Tensor, str]]:
    """Each parameter with its optimizer, its group and its name. Those that are not the model's are
    numbered."""
    others = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                others += parameter not in known
                yield optimizer, group, parameter, known.get(parameter, f"#{others}")


@cache
def _options(classes: tuple[type, ...]) -> frozenset[str]:
    """The options that the constructors of an optimizer's classes name. All else in its groups, it has put
    there itself."""
    constructors = (vars(one).get("__init__") for one in classes if one is not object)
    return frozenset(name for made in constructors if made for name in inspect.signature(made).parameters)


def _kind(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> list[Any]:
    """What must be the same for a parameter's state to fit again. If it lacked what an option that is on
    (momentum, amsgrad) needs, it would end training."""
    options = (_options(type(optimizer).__mro__) - {"lr"}) & group.keys()
    on = sorted(key for key in options if group[key] and isinstance(group[key], int | float))
    return [type(optimizer).__name__, list(parameter.shape), str(parameter.dtype), on]


def _learnt(optimizer: Any, group: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that an optimizer learns and keeps in a group: Prodigy's `d`, ScheduleFree's `k`, the `step` of
    many. Without them, the tensors that go with them do harm.

    Booleans are switches, which are the script's to set, as are rates that torch's schedulers write there
    (`initial_lr`, `max_lr`). Raises TypeError for tensors, and for a wrapper, whose options are not known.
    """
    own = {key: group[key] for key in group.keys() - _options(type(optimizer).__mro__) - {"params"}}
    if "lr" in own or any(isinstance(value, Tensor | list) for value in own.values()):
        raise TypeError("it keeps more than numbers in its groups")
    return {
        key: value
        for key, value in own.items()
        if type(value) in (int, float) and not key.endswith(("_lr", "_momentum"))
    }


def _mapped(tree: Any, leaf: Leaf, key: str = "") -> Any:
    """A tree of dicts and lists with every other value replaced."""
    if isinstance(tree, list):
        return [_mapped(one, leaf, key) for one in tree]
    if isinstance(tree, dict):
        return {name: _mapped(one, leaf, name) for name, one in tree.items()}
    return leaf(key, tree)


def _taken_apart(state: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
    """A parameter's state with each tensor replaced by its place in a list, and that list.

    Raises TypeError for what is neither a tensor nor a plain value: sharded tensors, sparse ones, objects.
    """
    tensors: list[Tensor] = []

    def leaf(key: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"{key} is neither a tensor nor a plain value")
        tensors.append(value)
        return msgpack.ExtType(0, (len(tensors) - 1).to_bytes(4))

    return _mapped(dict(state), leaf), tensors


# --- Writing.


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    if not tensor.is_cpu or tensor.nbytes < HUGE_BYTES:
        # From a GPU to pinned memory, queued behind its earlier work: nothing waits for it.
        return tensor.to("cpu", non_blocking=True, copy=True)
    room = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _as_bytes(tensor: Tensor) -> Any:
    """A buffer with the bytes of a tensor on the CPU, row-major; a copy if it does not lie so."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, shares: Iterable[_Share], *, durable: bool) -> None:
    """Write a checkpoint, which is there whole or not at all. Raises OSError, and what `shares` raises."""
    remove_unfinished(path.parent.glob(".*-*"), path.name.__eq__)  # of trainers that were killed
    with replacing(path, durable=durable) as file:
        crc = 0
        for share in shares:
            for event in share.arrived:
                event.synchronize()
            end = b""
            if share.trailer is not None:
                end = msgpack.packb(share.trailer)
                end += len(end).to_bytes(8)
            for data in (*map(_as_bytes, share.pieces), end):
                crc = zlib.crc32(data, crc)
                file.write(data)
        file.write(crc.to_bytes(4))


class _Writing:
    """A thread that writes one checkpoint.

    It has no lock that the training thread takes: a script's signal handler may make the peer leave while the
    training thread is anywhere in here.
    """

    def __init__(self, path: Path, shares: Iterator[_Share]) -> None:
        self._path = path
        self._shares = shares
        self._queue: SimpleQueue[_Share | None] = SimpleQueue()
        self.is_ready = True
        """Whether all shares so far are written, or the thread has ended."""
        self.has_ended = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def copy_share(self) -> None:
        """In the training thread, copy the next share, and have it written."""
        share = next(self._shares)
        self.is_ready = False
        self._queue.put(share)

    def give_up(self) -> None:
        """End, and leave the file as it was."""
        self._queue.put(None)
        self._thread.join(GIVE_UP_S)

    def _run(self) -> None:
        try:
            _write(self._path, self._copied(), durable=True)
        except Exception as error:
            self.error = error
        self.has_ended = self.is_ready = True

    def _copied(self) -> Iterator[_Share]:
        is_last = False
        while not is_last:
            share = self._queue.get()
            if share is None:
                raise InterruptedError("given up")
            is_last = share.trailer is not None
            yield share
            del share  # as large as training can spare
            self.is_ready = not is_last


class CheckpointWriter:
    """Keeps a node's checkpoint up to date. It belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing: _Writing | None = None
        self._progress = Progress()
        self._due_at = -inf
        self._logged: set[str] = set()

    def step(self, outer: OuterState, optimizers: Optimizers, progress: Progress) -> None:
        """After an inner step: begin a checkpoint if one is due, and copy the next share of it."""
        self._progress = progress
        if self._writing is None and time.monotonic() >= self._due_at:
            self._writing = self._begun(outer, optimizers)
        writing = self._writing
        if writing is None or not writing.is_ready:
            return
        if writing.has_ended:
            self._writing = None
            self._note(writing.error)
            return
        try:
            writing.copy_share()
        except BaseException:  # also Ctrl-C: what was copied for that share is not in the file
            self.close()
            raise

    def save(self, outer: OuterState, optimizers: Optimizers, progress: Progress) -> None:
        """Write a whole checkpoint now, in place of one under way. A failure is only logged.

        It is not synced to the disk, since the process is about to end and has seconds for it: after a power
        cut right then the node finds a damaged file, and begins afresh. It uses no thread: a script that
        never left its peer leaves as the interpreter exits.
        """
        self.close()
        self._progress = progress
        try:
            _write(self._path, self._shares(outer, optimizers, 0), durable=False)
        except Exception as error:  # also of a device that failed, which has ended training
            self._note(error)
        else:
            self._note(None)

    def close(self) -> None:
        """Give up the checkpoint under way, if any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.give_up()

    def _begun(self, outer: OuterState, optimizers: Optimizers) -> _Writing:
        numels = [slot.numel for state in outer.fragments for slot in state.fragment.slots]
        # A residual, a momentum, and about as much in the inner optimizer: 16 bytes a parameter.
        size, tensors = 16 * sum(numels), 5 * len(numels)
        cost_s = size / BYTES_PER_S + tensors / TENSORS_PER_S
        self._due_at = time.monotonic() + min(max(INTERVAL_MIN_S, cost_s), INTERVAL_MAX_S)
        return _Writing(self._path, self._shares(outer, optimizers, max(SHARE_BYTES, size // SHARES)))

    def _shares(self, outer: OuterState, optimizers: Optimizers, limit: float) -> Iterator[_Share]:
        """Copy all of the state, at least `limit` bytes in each share but the last."""
        trailer: dict[str, Any] = {"version": VERSION, "tensors": [], "outer": [], "inner": {}}
        share, size = _Share(), 0
        try:
            for tensors in _groups(outer, optimizers, trailer):
                trailer["tensors"] += [
                    [str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors
                ]
                share.pieces += [_copy(one.detach()) for one in tensors]
                for device in {one.device for one in tensors if one.is_cuda}:
                    event = torch.cuda.Event(blocking=True)  # so that the waiting thread does not spin
                    event.record(torch.cuda.current_stream(device))
                    share.arrived.append(event)
                size += sum(one.nbytes for one in tensors)
                if size >= limit or len(share.pieces) >= SHARE_TENSORS:
                    yield share
                    share, size = _Share(), 0
        except (TypeError, AttributeError, ValueError, LookupError, NotImplementedError):
            trailer["inner"] = None  # a custom optimizer, perhaps never meant to be saved
            self._warn("the inner optimizer's state cannot be saved: after a restart it starts afresh")
        trailer["progress"] = [self._progress.steps, self._progress.tokens]
        share.trailer = trailer
        yield share

    def _note(self, error: Exception | None) -> None:
        if error is not None:
            problem = getattr(error, "strerror", None) or repr(error)
            self._warn(f"cannot save the trainer's state to {self._path}: {problem}")

    def _warn(self, text: str) -> None:
        """Log a warning, but not again every few seconds, while a disk is full."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


# --- Reading.


class _Saved:
    """A checkpoint that is whole, open for reading."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises OSError, or ValueError if it is damaged, or not a checkpoint of this release."""
        self._file = file
        left = os.fstat(file.fileno()).st_size - 4
        crc = 0
        while left > 0 and (data := file.read(min(left, READ_BYTES))):
            crc, left = zlib.crc32(data, crc), left - len(data)
        if left != 0 or crc.to_bytes(4) != file.read(4):
            raise ValueError("it is damaged")
        end = file.seek(-TAIL_BYTES, os.SEEK_END)
        start = file.seek(end - int.from_bytes(file.read(8)))
        trailer = msgpack.unpackb(file.read(end - start), strict_map_key=False)
        if trailer["version"] != VERSION:
            raise ValueError("another release wrote it")
        self.progress = Progress(*map(int, trailer["progress"]))
        self.outer: list[Any] = trailer["outer"]
        self.inner: dict[str, Any] | None = trailer["inner"]
        self._entries: list[tuple[torch.dtype, list[int]]] = [
            (DTYPES[dtype], shape) for dtype, shape in trailer["tensors"]
        ]
        self._offsets = [0]
        for dtype, shape in self._entries:
            self._offsets.append(self._offsets[-1] + dtype.itemsize * prod(shape))
        if self._offsets[-1] != start:
            raise ValueError("its tensors are of another size")

    def holds(self, index: int, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether this is what the file holds there."""
        return index < len(self._entries) and self._entries[index] == (dtype, list(shape))

    def tensor(self, index: int) -> Tensor:
        """A tensor, on the CPU. Raises OSError."""
        dtype, shape = self._entries[index]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._file.seek(self._offsets[index])
        self._file.readinto(_as_bytes(tensor))  # type: ignore[attr-defined]
        return tensor


def restore(path: Path, outer: OuterState, optimizers: Optimizers) -> tuple[Progress, bool] | None:
    """Restore a checkpoint. The fragments' `last_published` must already say what others have of us.

    Returns how far the node had come, and whether the inner optimizers resumed. Returns None, with nothing
    changed, if there is no checkpoint or it does not fit the model.
    """
    try:
        with open(path, "rb") as file:
            saved = _Saved(file)
            _take_up_outer(saved, outer)
            try:
                problem = _take_up_inner(saved, outer, optimizers)
            except Exception as error:  # such as a custom optimizer's own
                problem = f"the inner optimizer does not take its saved state ({error!r})"
    except FileNotFoundError:
        return None
    except Exception as error:  # such as a file that something else has written
        log.warning("cannot use %s (%s): residuals, inner optimizer and data start afresh", path, error)
        return None
    if problem and any(learnt or tree for _, learnt, tree, _ in (saved.inner or {}).values()):
        log.warning("%s: it starts afresh", problem)
    is_fresh = saved.progress.steps == 0  # as any optimizer before the first step
    return saved.progress, not (problem or is_fresh or saved.inner is None)


def _take_up_outer(saved: _Saved, outer: OuterState) -> None:
    """Restore momenta, and the residuals that belong to our last deltas. Raises ValueError, with nothing
    changed, if it is from another model or outer optimizer."""
    slots = [(state, i, slot) for state in outer.fragments for i, slot in enumerate(state.fragment.slots)]
    if [(slot.spec.name, slot.start) for _, _, slot in slots] != [tuple(one[:2]) for one in saved.outer]:
        raise ValueError("it is from another model")
    found = []
    for (state, i, _), (_, _, kinds, round_, rate, place) in zip(slots, saved.outer, strict=True):
        if kinds != list(state.saved):
            raise ValueError("it is of another outer optimizer")
        for index, (kind, kept) in enumerate(state.saved.items(), place):
            if not saved.holds(index, kept[i].dtype, kept[i].shape):
                raise ValueError("it is from another model")
            if kind != "residual" or round_ == state.last_published:
                found.append((kept[i], index))
        if round_ == state.last_published:
            state.rate = rate
    for tensor, index in found:
        tensor.copy_(saved.tensor(index))


def _take_up_inner(saved: _Saved, outer: OuterState, optimizers: Optimizers) -> str:
    """Restore the inner optimizers' state. Returns why it cannot be used, with nothing changed, or ""."""
    if saved.inner is None:
        return ""
    parameters = list(_parameters(optimizers, outer.names))
    kinds = {name: _kind(optimizer, group, parameter) for optimizer, group, parameter, name in parameters}
    if kinds != {name: kind for name, (kind, *_) in saved.inner.items()}:
        return "the inner optimizer has other parameters or options than its saved state"
    states = []
    for _, group, parameter, name in parameters:
        _, _, tree, first = saved.inner[name]
        states.append(_mapped(tree, _put_together(saved, first, parameter, group)))
    if not all(map(_is_finite, states)):  # it would diverge again, at any rate
        return "the inner optimizer's saved state is not finite"
    for (optimizer, group, parameter, name), state in zip(parameters, states, strict=True):
        if state:
            optimizer.state[parameter] = state
        group.update(saved.inner[name][1])
    return ""


def _put_together(saved: _Saved, first: int, parameter: Tensor, group: Mapping[str, Any]) -> Leaf:
    """Puts a tensor where `_taken_apart` left its place, and where the optimizer wants it: on the parameter's
    device, except for torch's count of steps, and in the parameter's order in memory, since fused optimizers
    process both in that."""
    counts_on_device = group.get("fused") or group.get("capturable")

    def leaf(key: str, value: Any) -> Any:
        if not isinstance(value, msgpack.ExtType):
            return value
        tensor = saved.tensor(first + int.from_bytes(value.data))
        if key == "step" and not counts_on_device:
            return tensor
        if tensor.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
        return tensor.to(parameter.device)

    return leaf


def _is_finite(state: Any) -> bool:
    """Whether all numbers are finite. One-byte dtypes count as finite: torch cannot check all of them."""
    tensors: list[Any] = []
    _mapped(state, lambda _, value: tensors.append(value))
    return all(bool(one.isfinite().all()) for one in tensors if isinstance(one, Tensor) and one.itemsize > 1)
