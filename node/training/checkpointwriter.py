"""Writes a checkpoint while training goes on.

At each inner step a share of the state is copied to memory that is kept for it, and a thread writes that
share to a temporary file, which is renamed when it is complete. So no step is held up by a whole checkpoint,
there is no second copy of the state, and few pages are touched for the first time, which is most of the cost
of copying a state. The file is safetensors, written by hand for the same reason: the library wants all
tensors in memory at once.
"""

import logging
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from gossamer.node.storage.wholefile import SameFolder, open_aside, remove_unfinished
from gossamer.node.training.checkpoint import Progress, State
from gossamer.node.training.interrupts import held_back
from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.workthread import Submit, WorkThread, at_once
from gossamer.protocol.errors import DivergedError

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
"""A state is copied over at most 64 inner steps, with at least 2 MiB at each: a third of a millisecond."""

SHARE_TENSORS = 512
"""The most tensors in a share, however small: each costs some 15 us."""

WIDEST_BYTES = 8
"""Shares are a multiple of the widest number, so that no number is cut."""

BYTES_PER_S = 4 * 1024 * 1024
"""How much is written on average. A MiB costs a third of a millisecond, so this takes about a thousandth of a
core's time."""

TENSORS_PER_S = 200
"""How many tensors are written on average, however small. Each costs some 20 to 40 us, so this takes less
than a hundredth of a core's time; half of that holds up training."""

SYNCED_AT_THE_END_BYTES = 64 * 1024 * 1024
"""A larger checkpoint is not synced as the process ends, since the process is in a hurry then: a power cut
within seconds of its end may lose that checkpoint."""

INTERVAL_MIN_S = 5.0
INTERVAL_MAX_S = 300.0
"""The longest time between checkpoints: a crash loses no more of the inner optimizer's state than this,
however large the state is."""

log = logging.getLogger("gossamer.checkpoint")


class CheckpointWriter:
    """Keeps a node's checkpoint up to date. It belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._home = SameFolder(path.parent)
        self._thread = WorkThread("checkpoint")
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._growth = 1
        """By what factor the last checkpoint's shares had to grow."""
        self._under_way: _Writing | None = None
        self._begun_at = -inf
        self._interval = INTERVAL_MIN_S
        self._said = ""
        """The logged reason why the last checkpoint could not be written."""
        self._said_of_inner = False
        """Whether it has been logged that the inner optimizer's state cannot be saved."""

    def is_due(self) -> bool:
        """Whether a checkpoint should be begun now: never while one is under way."""
        return self._under_way is None and time.monotonic() - self._begun_at > self._interval

    def begin(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin a checkpoint."""
        with held_back():  # a watchdog's error would be taken for one of the optimizer's
            self._begin(outer, optimizers, self._thread.submit)

    def _begin(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], submit: Submit) -> None:
        state = State.of(outer, optimizers)
        if optimizers and not state.has_inner and not self._said_of_inner:
            log.warning("the inner optimizer's state cannot be saved: after a restart it starts afresh")
            self._said_of_inner = True
        share = -(-max(SHARE_BYTES, state.size // SHARES) // WIDEST_BYTES) * WIDEST_BYTES * self._growth
        if self._room.numel() != share:
            self._room = _room(share, state)
        self._begun_at = time.monotonic()
        cost_s = state.size / BYTES_PER_S + len(state.tensors) / TENSORS_PER_S
        self._interval = min(max(INTERVAL_MIN_S, cost_s), INTERVAL_MAX_S)
        self._under_way = _Writing(self._path, self._home, state, outer, self._room, self._growth, submit)

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

    def save(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], progress: Progress) -> None:
        """Write a whole checkpoint now, in place of one under way; returns when the file is there.

        It does not use the thread: a script that never left its peer leaves as the interpreter exits, when
        threads take no more work.
        """
        self._give_up()
        with held_back():
            self._begin(outer, optimizers, at_once)
        while self._under_way is not None:
            self.advance(progress, wait=True)

    def save_if_sound(
        self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], progress: Progress
    ) -> None:
        """As `save`, but after an error, which must stay the one to be seen: a failure here is only logged.

        Raises DivergedError, and saves nothing, if parameters are out of range.
        """
        try:
            outer.check()
            self.save(outer, optimizers, progress)
        except DivergedError:
            raise
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


class _Copied(NamedTuple):
    """A piece of a tensor, as bytes."""

    name: str
    bytes: Tensor
    offset: int
    """Place in the file in bytes, counted from the first tensor."""
    is_first: bool


class _Writing:
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
        outer: OuterLoop,
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
        self._room = _room(2 * self._room.numel(), self._state)

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
        self, share: "Sequence[_Copied]", arrived: Sequence[tuple[torch.device, torch.cuda.Event]]
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


def _room(size: int, state: State) -> Tensor:
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
