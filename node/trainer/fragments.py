"""The state of a model's fragments in the outer loop, and the parts in which the loop processes them.

A part is one large tensor, cut into pieces that fit the CPU's cache, or a bucket of small tensors. All memory
is made, and its pages are touched, before training begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.node.trainer.encoders import piece_numel
from gossamer.node.trainer.payload_writer import Bucket, together
from gossamer.protocol.payloads import Fragment, Layout


class Losses:
    """The sum of the losses of each window. A loss on a device stays there until its window closes.

    Each addition on a device is a call, so a step adds to a single number, however many windows there are.
    That number is added to all sums whenever a window closes.
    """

    def __init__(self, windows: int) -> None:
        self._sums: list[float | Tensor] = [0.0] * windows
        self._since: float | Tensor = 0.0
        """Sum over the steps since a window last closed."""

    def add(self, loss: float | Tensor) -> None:
        """Add one step's loss: a tensor [] of float32 on a device, or a number."""
        self._since = _sum(self._since, loss)

    def close(self, index: int) -> float | Tensor:
        """Return a window's sum; the next window begins at 0."""
        self._sums = [_sum(before, self._since) for before in self._sums]
        closed, self._sums[index], self._since = self._sums[index], 0.0, 0.0
        return closed


def _sum(before: float | Tensor, loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor) and isinstance(before, Tensor):
        loss = loss.to(before.device)  # the loss of a model spread over devices may be on any of them
    return before + loss


@dataclass(slots=True)
class Window:
    """What the inner loop has done since this node's last delta of a fragment."""

    base: int
    """The round up to which the fragment was merged when the window began."""
    steps: int = 0
    tokens: int = 0
    loss: float | Tensor = 0.0
    """Sum over the steps. Set when the window is closed, as is `changed`."""
    changed: bool = False
    """Whether its outer step holds anything but zeros."""

    def add(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self.steps)


class Piece(NamedTuple):
    """As much of a part, in row-major order, as is processed at a time. Views, made once: making one takes as
    long as processing a thousand values."""

    span: slice
    ref: Tensor
    residual: Tensor
    buffers: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are processed together."""

    places: Sequence[int]
    """Which of the fragment's tensors these are."""
    theta: list[Tensor]
    pieces: Sequence[Piece]
    bucket: Bucket | None
    """None for a single tensor."""

    @property
    def device(self) -> torch.device:
        return self.theta[0].device

    def values(self) -> Tensor:
        """The parameters, one tensor after the other in row-major order; a copy if they do not lie so in
        memory.

        If their dtypes differ, as after a change while training ran, all come in the widest.
        """
        rows = [theta.detach().reshape(-1) for theta in self.theta]
        if self.bucket is None:
            return rows[0]
        if len({row.dtype for row in rows}) > 1:
            refs = self.pieces[0].ref.split(self.bucket.numels)  # a bucket is one piece
            rows = [_widened(row, ref) for row, ref in zip(rows, refs, strict=True)]
        return torch.cat(rows)

    def write_back(self, values: Tensor) -> None:
        """Write changed `values` back to the parameters, if they were a copy."""
        if self.bucket is not None:
            parts = zip(values.split(self.bucket.numels), self.theta, strict=True)
            torch._foreach_copy_(self.theta, [part.view(theta.shape) for part, theta in parts])
        elif not self.theta[0].is_contiguous():
            self.theta[0].copy_(values.view(self.theta[0].shape))

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """This part's rows as one, of `tensors` that hold a row for each of the fragment's tensors."""
        if self.bucket is None:
            return tensors[self.places[0]]
        return torch.cat([tensors[place] for place in self.places])


@dataclass(slots=True)
class FragmentState:
    """One fragment's tensors, each list in the order of the fragment's slots."""

    fragment: Fragment
    theta: list[Tensor]
    """The live parameters."""
    ref: list[Tensor]
    """float32 image of the Phi last applied."""
    residual: list[Tensor]
    """What error feedback carries over: int32 fixed point."""
    buffers: dict[str, list[Tensor]]
    """What the outer optimizer keeps, float32, by its names."""
    parts: list[Part]
    window: Window
    last_published: int = 0
    merged_round: int = 0

    @property
    def saved(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps, by kind."""
        return {"residual": self.residual, **self.buffers}

    @property
    def gpu(self) -> torch.device | None:
        """The CUDA device that holds all of it, if one does; other kinds of devices have not been tried."""
        devices = {part.device for part in self.parts}
        return device if len(devices) == 1 and (device := devices.pop()).type == "cuda" else None

    @classmethod
    def of(
        cls, fragment: Fragment, tensors: Mapping[str, Tensor], codec: str, buffers: Sequence[str], base: int
    ) -> "FragmentState":
        """The state as training begins; `base` is the base of the first window."""
        theta = [tensors[slot.spec.name] for slot in fragment.slots]
        empty = [torch.empty(0)] * len(theta)
        ref, residual, kept = list(empty), list(empty), {name: list(empty) for name in buffers}
        parts: list[Part] = []
        for places in together(codec, theta):
            own = [theta[place] for place in places]
            numels = [tensor.numel() for tensor in own]
            image = torch.cat([tensor.detach().reshape(-1).float() for tensor in own])
            rest = torch.zeros_like(image, dtype=torch.int32)
            extra = [torch.zeros_like(image) for _ in buffers]
            rows = zip((ref, residual, *kept.values()), (image, rest, *extra), strict=True)
            for tensors_of, row in rows:
                for place, values in zip(places, row.split(numels), strict=True):
                    tensors_of[place] = values.view(theta[place].shape)
            bucket = Bucket(codec, numels, image.device) if len(places) > 1 else None
            parts.append(Part(places, own, _pieces(piece_numel(codec, image), image, rest, extra), bucket))
        return cls(fragment, theta, ref, residual, kept, parts, Window(base))


def _widened(theta: Tensor, ref: Tensor) -> Tensor:
    """A parameter in float32 or wider: `ref`, plus theta's progress from the image of `ref` in its own dtype.

    What bf16 cannot hold of `ref` is not progress.
    """
    if theta.dtype in (torch.float32, torch.float64):
        return theta
    return theta.float().sub_(ref.to(theta.dtype)).add_(ref)


def _pieces(size: int, ref: Tensor, residual: Tensor, buffers: Sequence[Tensor]) -> list[Piece]:
    spans = [slice(start, min(start + size, ref.numel())) for start in range(0, ref.numel(), size)]
    return [Piece(span, ref[span], residual[span], tuple(row[span] for row in buffers)) for span in spans]


class OuterState:
    """The state of all fragments of one model, which is what a checkpoint saves and restores."""

    def __init__(
        self, tensors: Mapping[str, Tensor], layout: Layout, codec: str, buffers: Sequence[str]
    ) -> None:
        """`tensors` are the model's parameters; `buffers` names what the outer optimizer keeps of each."""
        self.names = {tensor: name for name, tensor in tensors.items()}
        """The names of all the model's parameters."""
        count = len(layout.fragments)
        self.fragments = [
            # The base is the round of the fragment's turn before the first one that publishes it.
            FragmentState.of(fragment, tensors, codec, buffers, index - count if index else 0)
            for index, fragment in enumerate(layout.fragments)
        ]
