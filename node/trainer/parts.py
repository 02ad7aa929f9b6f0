"""How a fragment lies in memory: the parts and pieces in which the outer loop goes through it.

On the CPU a piece stays in cache through all operations on it. Small tensors are gathered into buckets, and a
large one may be cut into strips, one a fragment. All of it, and every view, is made before training begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.node.trainer.encoders import Bucket
from gossamer.protocol.payloads import Fragment


class Piece(NamedTuple):
    """As much of a part, in row-major order, as is processed at a time. Views, made once: making one takes as
    long as processing a thousand values."""

    span: slice
    ref: Tensor
    residual: Tensor
    buffers: tuple[Tensor, ...]


class Scratch(NamedTuple):
    """Memory for one piece at a time, made once for all parameters of a device and a dtype, [n] each."""

    floats: Tensor
    ints: Tensor
    values: Tensor
    """The parameters of a bucket, in their own dtype."""

    @classmethod
    def of(cls, numel: int, device: torch.device, dtype: torch.dtype) -> "Scratch":
        """Zeros, so that all pages are touched."""
        kinds = torch.float32, torch.int32, dtype
        return cls(*(torch.zeros(numel, dtype=kind, device=device) for kind in kinds))

    def first(self, numel: int) -> "Scratch":
        return Scratch(*(whole[:numel] for whole in self))


class Gathering(NamedTuple):
    """A bucket of small tensors, and views of each of them, made once."""

    bucket: Bucket
    ref: list[Tensor]
    values: list[Tensor]
    """Of the scratch memory; as `ref`, of the parameters' shapes."""
    phi: list[Tensor]
    """Of the scratch memory's integers, flat."""


@dataclass(frozen=True, slots=True)
class Part:
    """One large tensor or a strip of one, cut into pieces that fit the CPU's cache, or a bucket of small ones
    in one piece."""

    places: Sequence[int]
    """Which of the fragment's tensors these are."""
    theta: list[Tensor]
    """The parameters, whole."""
    strip: slice
    """Which values of a single tensor, in row-major order."""
    ref: Tensor
    """All of the pieces' `ref`, [n]."""
    vanishing: Tensor | None
    """The values that fixed point cannot hold, zero elsewhere, [n]; None if there are hardly any."""
    pieces: Sequence[Piece]
    scratch: Scratch
    small: Gathering | None
    """None for a single tensor."""

    @property
    def device(self) -> torch.device:
        return self.theta[0].device

    def values(self) -> Tensor:
        """The parameters in row-major order, a bucket's padded; a copy if they do not lie so in memory. That
        of a bucket holds until the next bucket's is made."""
        if self.small is None:
            return self.theta[0].detach().reshape(-1)[self.strip]
        self.scratch.values.zero_()
        torch._foreach_copy_(self.small.values, self.theta)
        return self.scratch.values

    def phi(self, whole: Tensor, fragment: Fragment) -> Tensor:
        """The same of the whole fragment's Phi, int32."""
        if self.small is None:
            return whole[fragment.slots[self.places[0]].span]
        self.scratch.ints.zero_()
        torch._foreach_copy_(self.small.phi, self.small.bucket.whole.of(whole))
        return self.scratch.ints

    def write_back(self, values: Tensor) -> None:
        """Write changed `values` back to the parameters, if they were a copy."""
        if self.small is not None:
            torch._foreach_copy_(self.theta, self.small.values)
        elif not self.theta[0].is_contiguous():
            whole = self.theta[0].detach().reshape(-1)
            whole[self.strip] = values
            self.theta[0].copy_(whole.view(self.theta[0].shape))

    def go_to_ref(self) -> None:
        """Set the parameters to `ref`."""
        if self.small is not None:
            torch._foreach_copy_(self.theta, self.small.ref)
        else:
            values = self.values()
            self.write_back(values.copy_(self.ref))


def shaped(whole: Tensor, bucket: Bucket | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a part's values, of its tensors' shapes."""
    rows = [whole] if bucket is None else bucket.padded.of(whole)
    return [row.view(tensor.shape) for row, tensor in zip(rows, tensors, strict=True)]
