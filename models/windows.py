"""Which windows of a long byte array a node trains on, and which it evaluates on.

Training: the array is cut into segments. In every epoch a node goes once through all of them (except a few
that do not fill a batch), in its own order, and takes one window at a random offset within each. So nodes
spread over the whole text, no region is missed for long, and no coordination is needed. Each epoch has its
own generator, so that any batch can be reached directly: a resumed node does not replay what it has seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.models.task import DataStream

SEGMENT_BYTES = 4096

Window = tuple[Tensor, Tensor]
"""inputs_BL and targets_BL, int64; the targets are one position ahead."""


def training_windows(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, stream: DataStream
) -> Iterator[Window]:
    """Yield batches of `batch_size` windows without end; `text` is uint8 with at least `context + 1`
    bytes."""
    last = text.size - context - 1
    # If the text is too short for one segment per row, segments are shorter, windows overlap and, at worst, a
    # batch has the same window twice.
    segment = max(1, min(SEGMENT_BYTES, (last + 1) // batch_size))
    segments = -(-(last + 1) // segment)
    per_epoch = max(1, segments // batch_size)
    epoch, begin = divmod(stream.skip_batches, per_epoch)
    while True:
        generator = stream.generator(epoch)
        order = np.resize(generator.permutation(segments), per_epoch * batch_size)
        starts = np.minimum(order * segment + generator.integers(0, segment, order.size), last)
        for rows in starts.reshape(per_epoch, batch_size)[begin:]:
            yield _gather(text, rows, context)
        epoch, begin = epoch + 1, 0


def held_out_windows(
    text: npt.NDArray[np.uint8], *, batch_size: int, context: int, batches: int
) -> Iterator[Window]:
    """Yield at most `batches` batches of windows, evenly spaced over `text`; always the same ones."""
    last = text.size - context - 1
    count = min(batches * batch_size, last + 1)
    starts = np.linspace(0, last, count).astype(np.int64)
    for begin in range(0, count, batch_size):
        yield _gather(text, starts[begin : begin + batch_size], context)


def _gather(text: npt.NDArray[np.uint8], starts_B: npt.NDArray[np.int64], context: int) -> Window:
    windows = text[starts_B[:, None] + np.arange(context + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
