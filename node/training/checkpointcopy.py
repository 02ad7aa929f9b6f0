"""One checkpoint on its way to disk: copied share by share in the training loop, written by a thread.

The file is safetensors, written by hand: the library wants all tensors in memory at once.
"""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from gossamer.node.storage.wholefile import SameFolder, open_aside, remove_unfinished
from gossamer.node.training.checkpoint import Progress, State
from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.workthread import Submit, at_once

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
