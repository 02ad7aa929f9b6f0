"""What the outer loop keeps of a fragment, and the parts in which it goes through it.

A part is a large tensor, cut to pieces, or a bucket of small ones.
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
    """What the inner loop did since this node's last delta of a fragment."""

    base: int
    """The round up to which the fragment was merged when the window began."""
    steps: int = 0
    tokens: int = 0
    loss: float | Tensor = 0.0
    """Sum over the steps; known once it is closed, as is what follows."""
    changed: bool = False
    """Whether its delta holds anything."""

    def add(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    @property
    def mean_loss(self) -> float:
        return float(self.loss) / max(1, self.steps)


class Piece(NamedTuple):
    """So much of a part, in row-major order, as is worked on at a time."""

    span: slice
    ref: Tensor
    residual: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What is gone through at once."""

    places: Sequence[int]
    """Which of the fragment's tensors these are."""
    theta: list[Tensor]
    pieces: Sequence[Piece]
    """Views, made once, for making one takes as long as working through a thousand values."""
    bucket: Bucket | None
    """Where there are several tensors."""

    @property
    def device(self) -> torch.device:
        return self.theta[0].device

    def values(self) -> Tensor:
        """The parameters, one tensor after the other in row-major order; a copy where they do not lie so.

        Of several dtypes, as some may have got while training ran, all are in the widest.
        """
        rows = [theta.detach().reshape(-1) for theta in self.theta]
        if self.bucket is None:
            return rows[0]
        if len({row.dtype for row in rows}) > 1:
            refs = self.pieces[0].ref.split(self.bucket.numels)  # a bucket is one piece
            rows = [_widened(row, ref) for row, ref in zip(rows, refs, strict=True)]
        return torch.cat(rows)

    def write_back(self, values: Tensor) -> None:
        """Finish what was done to `values`."""
        if self.bucket is not None:
            parts = zip(values.split(self.bucket.numels), self.theta, strict=True)
            torch._foreach_copy_(self.theta, [part.view(theta.shape) for part, theta in parts])
        elif not self.theta[0].is_contiguous():
            self.theta[0].copy_(values.view(self.theta[0].shape))

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """From a row for each of the fragment's tensors, those of this part as one."""
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
        """The one that all of it is on; no other kind of device has been tried as one."""
        devices = {part.device for part in self.parts}
        return device if len(devices) == 1 and (device := devices.pop()).type == "cuda" else None

    @property
    def is_mixed(self) -> bool:
        """Whether some tensors that are worked through together have got different dtypes."""
        return any(len({theta.dtype for theta in part.theta}) > 1 for part in self.parts)

    @classmethod
    def of(cls, fragment: Fragment, tensors: Mapping[str, Tensor], codec: str, base: int) -> "FragmentState":
        """As training begins; `base` is what the first window is based on."""
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
    """A parameter as it would be in float32 at least: `ref` and the progress from its image in theta's dtype.

    What bf16 cannot hold of `ref` is not progress.
    """
    if theta.dtype in (torch.float32, torch.float64):
        return theta
    return theta.float().sub_(ref.to(theta.dtype)).add_(ref)


def _pieces(ref: Tensor, residual: Tensor, momentum: Tensor, size: int) -> list[Piece]:
    spans = (slice(start, min(start + size, ref.numel())) for start in range(0, ref.numel(), size))
    return [Piece(span, ref[span], residual[span], momentum[span]) for span in spans]
