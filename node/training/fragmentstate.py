"""The outer loop's state for a fragment, and the parts in which the loop processes it.

A part is one large tensor, cut into pieces, or a bucket of small ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.node.training.buckets import Bucket, together
from gossamer.node.training.encoders import SectionWriter, piece_numel
from gossamer.node.training.payloadwriter import BucketWriter, PayloadWriter
from gossamer.protocol.payloads.layout import Fragment


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
    """As much of a part, in row-major order, as is processed at a time."""

    span: slice
    ref: Tensor
    residual: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are processed together."""

    places: Sequence[int]
    """Which of the fragment's tensors these are."""
    theta: list[Tensor]
    pieces: Sequence[Piece]
    """Views, made once, since making one takes as long as processing a thousand values."""
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

    def section(self, writer: PayloadWriter) -> SectionWriter | BucketWriter:
        """Begin this part of a payload."""
        if self.bucket is None:
            return writer.section(self.places[0], self.device)
        return writer.bucket(self.places, self.bucket)


@dataclass(slots=True)
class FragmentState:
    """One fragment's tensors, each list in the order of the fragment's slots."""

    fragment: Fragment
    theta: list[Tensor]
    ref: list[Tensor]
    residual: list[Tensor]
    """int32 fixed point."""
    momentum: list[Tensor]
    parts: list[Part]
    window: Window
    last_published: int = 0
    merged_round: int = 0

    @property
    def gpu(self) -> torch.device | None:
        """The CUDA device that holds all of it, if one does; other kinds of devices have not been tried."""
        devices = {part.device for part in self.parts}
        return device if len(devices) == 1 and (device := devices.pop()).type == "cuda" else None

    @property
    def is_mixed(self) -> bool:
        """Whether some tensors that are processed together have different dtypes by now."""
        return any(len({theta.dtype for theta in part.theta}) > 1 for part in self.parts)

    @classmethod
    def of(cls, fragment: Fragment, tensors: Mapping[str, Tensor], codec: str, base: int) -> "FragmentState":
        """The state as training begins; `base` is the base of the first window."""
        theta = [tensors[slot.spec.name] for slot in fragment.slots]
        ref, residual, momentum = ([torch.empty(0)] * len(theta) for _ in range(3))
        parts: list[Part] = []
        for places in together(codec, theta):
            mine = [theta[place] for place in places]
            numels = [tensor.numel() for tensor in mine]
            image = torch.cat([tensor.detach().reshape(-1).float() for tensor in mine])
            rows = image, torch.zeros_like(image, dtype=torch.int32), torch.zeros_like(image)
            for tensors_of, row in zip((ref, residual, momentum), rows, strict=True):
                for place, values in zip(places, row.split(numels), strict=True):
                    tensors_of[place] = values.view(theta[place].shape)
            bucket = Bucket(codec, numels, image.device) if len(places) > 1 else None
            parts.append(Part(places, mine, _pieces(*rows, piece_numel(image)), bucket))
        return cls(fragment, theta, ref, residual, momentum, parts, Window(base))


def _widened(theta: Tensor, ref: Tensor) -> Tensor:
    """A parameter in float32 or wider: `ref`, plus theta's progress from the image of `ref` in its own dtype.

    What bf16 cannot hold of `ref` is not progress.
    """
    if theta.dtype in (torch.float32, torch.float64):
        return theta
    return theta.float().sub_(ref.to(theta.dtype)).add_(ref)


def _pieces(ref: Tensor, residual: Tensor, momentum: Tensor, size: int) -> list[Piece]:
    spans = (slice(start, min(start + size, ref.numel())) for start in range(0, ref.numel(), size))
    return [Piece(span, ref[span], residual[span], momentum[span]) for span in spans]
