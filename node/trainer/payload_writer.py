"""From the values of a fragment's tensors to its payload, in the daemon's memory.

Small tensors are processed together, in buckets, since each one costs some 40 torch calls, whatever its size.
A bucket's values lie one tensor after the other. For encoding, each tensor is padded with zeros to whole
blocks, so that a codec's kernel takes all of them at once, and writes what it would write for each alone.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gossamer.node.trainer.encoders import KERNELS, encode_piece, piece_numel
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.payloads import Fragment

SMALL_NUMEL = 1 << 14
"""The largest tensor that goes into a bucket on the CPU. For tensors of 4,096 values, int4 takes 3.5 times as
long without buckets, and topk six times. At 32,768 values neither gains: gathering and padding cost as much
as the calls that are saved."""

SMALL_NUMEL_DEVICE = 1 << 22
"""The same on accelerators, which process this many values in the time that it takes to launch 40 calls."""

T = TypeVar("T")


class Bucket:
    """How the tensors of a bucket are encoded."""

    def __init__(self, codec: str, numels: Sequence[int], device: torch.device) -> None:
        kernel = KERNELS[codec]
        self._kernel = kernel.encode
        self._block = min(kernel.block, -(-max(numels) // kernel.run) * kernel.run)
        blocks = [-(-numel // self._block) for numel in numels]
        padding = [self._block * count - numel for numel, count in zip(numels, blocks, strict=True)]
        zeros = torch.zeros(self._block, dtype=torch.int32, device=device)
        self.numels = list(numels)
        self.section_bytes = [CODECS[codec].section_bytes(numel) for numel in numels]
        """Length of each tensor's section."""
        self._padding = [zeros[:count] for count in padding]
        self._padded = _alternating(self.numels, padding)
        self._blocks = blocks
        self._code_bytes = self._block // kernel.values_per_byte
        codes = [size - count for size, count in zip(self.section_bytes, blocks, strict=True)]
        unused = [self._code_bytes * count - size for size, count in zip(codes, blocks, strict=True)]
        self._codes = _alternating(codes, unused)
        counts = [[self._block] * (b - 1) + [self._block - p] for b, p in zip(blocks, padding, strict=True)]
        self._counts = torch.tensor(list(chain(*counts)), device=device).unsqueeze(1)

    def encode(self, values: Tensor, decoded: Tensor) -> Tensor:
        """Return the tensors' sections, one after the other, and write to `decoded` what they decode to.

        `values` and `decoded` are int32[n], n being the sum of `numels`.
        """
        padded = torch.cat(_alternating(values.split(self.numels), self._padding)).view(-1, self._block)
        exponents = padded.new_empty((len(padded), 1), dtype=torch.uint8)
        codes = padded.new_empty((len(padded), self._code_bytes), dtype=torch.uint8)
        result = torch.empty_like(padded)
        self._kernel(padded, exponents, codes, result, self._counts)
        torch.cat(result.view(-1).split(self._padded)[::2], out=decoded)
        return torch.cat(
            _alternating(exponents.view(-1).split(self._blocks), codes.view(-1).split(self._codes)[::2])
        )


def together(codec: str, tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors in groups: small ones in buckets, each other tensor alone."""
    alone = [i for i, tensor in enumerate(tensors) if codec not in KERNELS or not _is_small(tensor)]
    small = set(range(len(tensors))).difference(alone)
    groups = [[i] for i in alone]
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    # Smallest first, so that tensors in a bucket are of similar size: each is padded at most to the largest.
    for i in sorted(small, key=lambda i: (tensors[i].numel(), i)):
        tensor = tensors[i]
        run = KERNELS[codec].run
        group = filling.get((tensor.device, tensor.dtype))
        if group is None or (len(group) + 1) * -(-tensor.numel() // run) * run > piece_numel(codec, tensor):
            group = filling[tensor.device, tensor.dtype] = []
            groups.append(group)
        group.append(i)
    return groups


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (SMALL_NUMEL if tensor.is_cpu else SMALL_NUMEL_DEVICE)


def _alternating(first: Sequence[T], second: Sequence[T]) -> list[T]:
    return list(chain.from_iterable(zip(first, second, strict=True)))


class PayloadWriter:
    """Encodes a fragment's tensors, in any order and on whatever devices, as one payload."""

    def __init__(self, codec: str, fragment: Fragment, out: memoryview) -> None:
        """`out` is writable and has the payload's length in bytes or more. Raises ValueError otherwise."""
        self._codec = codec
        self._sizes = [CODECS[codec].section_bytes(slot.numel) for slot in fragment.slots]
        needed, room = sum(self._sizes), 0 if out.readonly else out.nbytes
        if room < needed:
            raise ValueError(f"a payload needs {needed} writable bytes, and there are {room}")
        self._out = torch.from_numpy(np.frombuffer(out, dtype=np.uint8)[:needed])
        self._sections = self._out.split(self._sizes) if needed else ()
        self._elsewhere: dict[torch.device, tuple[Tensor, Sequence[Tensor]]] = {}
        """By device other than the CPU, a payload and its sections; what is written there is copied at the
        end."""
        self._devices: list[torch.device | None] = [None] * len(self._sizes)
        """The device on which each section was written; None for the CPU."""

    def write(self, place: int, start: int, values: Tensor, decoded: Tensor) -> None:
        """Encode values of the fragment's tensor `place`, from `start` on; see `encode_piece`."""
        encode_piece(self._codec, values, start, self._targets([place], values.device)[0], decoded)

    def write_bucket(self, places: Sequence[int], bucket: Bucket, values: Tensor, decoded: Tensor) -> None:
        """Encode all tensors of a bucket, int32[n]; `decoded`, int32[n], gets what receivers will read."""
        sections = bucket.encode(values, decoded)
        torch._foreach_copy_(
            self._targets(places, sections.device), list(sections.split(bucket.section_bytes))
        )

    def finish(self) -> int:
        """Complete the payload, wait for GPUs, and drop all references to it; returns its length in bytes."""
        offsets = list(accumulate(self._sizes, initial=0))
        for device, run in groupby(range(len(self._sizes)), self._devices.__getitem__):
            if device is not None:  # adjacent sections are copied together
                places = list(run)
                part = slice(offsets[places[0]], offsets[places[-1] + 1])
                self._out[part].copy_(self._elsewhere[device][0][part], non_blocking=device.type == "cuda")
        for device in self._elsewhere:
            if device.type == "cuda":  # copies into pinned memory were not waited for
                torch.cuda.current_stream(device).synchronize()
        del self._out, self._sections, self._elsewhere
        return offsets[-1]

    def _targets(self, places: Sequence[int], device: torch.device) -> list[Tensor]:
        if device.type == "cpu":
            return [self._sections[place] for place in places]
        if device not in self._elsewhere:
            payload = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
            self._elsewhere[device] = payload, payload.split(self._sizes)
        for place in places:
            self._devices[place] = device
        return [self._elsewhere[device][1][place] for place in places]
