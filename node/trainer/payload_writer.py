"""Small tensors processed together, since each one costs some 40 torch calls, whatever its size.

A bucket's values lie one tensor after the other. For encoding, each tensor is padded with zeros to whole
blocks, so that a codec's kernel takes all of them at once, and writes what it would write for each alone.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gossamer.node.trainer.encoders import KERNELS, SectionWriter, check_codec, piece_numel
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.payloads.layout import Fragment

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
        if group is None or (len(group) + 1) * -(-tensor.numel() // run) * run > piece_numel(tensor):
            group = filling[tensor.device, tensor.dtype] = []
            groups.append(group)
        group.append(i)
    return groups


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (SMALL_NUMEL if tensor.is_cpu else SMALL_NUMEL_DEVICE)


def _alternating(first: Sequence[T], second: Sequence[T]) -> list[T]:
    return list(chain.from_iterable(zip(first, second, strict=True)))


# --- From the values of a fragment's tensors to its payload, in the daemon's memory.


class PayloadWriter:
    """Encodes a fragment's tensors, in any order and on whatever devices, as one payload."""

    def __init__(self, codec: str, fragment: Fragment, out: memoryview) -> None:
        """`out` is writable and has `payload_length` bytes or more.

        Raises ConfigError for an unknown codec, ValueError if `out` is too small.
        """
        check_codec(codec)
        self._codec = codec
        self._sizes = [CODECS[codec].section_bytes(slot.numel) for slot in fragment.slots]
        needed, room = sum(self._sizes), 0 if out.readonly else out.nbytes
        if room < needed:
            raise ValueError(f"a payload needs {needed} writable bytes, and there are {room}")
        cpu = torch.device("cpu")
        self._payloads = {cpu: torch.from_numpy(np.frombuffer(out, dtype=np.uint8)[:needed])}
        """The payload by device. The CPU's is `out`; what is written in another's is copied there at the
        end."""
        self._places = {cpu: self._payloads[cpu].split(self._sizes) if needed else ()}
        """By device, where each tensor's section goes."""
        self._devices = [cpu] * len(self._sizes)
        """The device on which each section was written."""

    def section(self, place: int, device: torch.device) -> SectionWriter:
        """Begin the fragment's tensor `place`, which lies on `device`."""
        return SectionWriter(self._codec, self._targets([place], device)[0])

    def bucket(self, places: Sequence[int], bucket: Bucket) -> "BucketWriter":
        """Begin the tensors of a bucket."""
        return BucketWriter(self, places, bucket)

    def add(self, places: Sequence[int], sections: Tensor, sizes: Sequence[int]) -> None:
        """Take the sections of several tensors, uint8[sum of sizes]."""
        torch._foreach_copy_(self._targets(places, sections.device), sections.split(list(sizes)))

    def finish(self) -> int:
        """Complete the payload in `out` and drop all references to it; returns its length in bytes."""
        if len(self._payloads) > 1:
            self._collect()
        del self._payloads, self._places
        return sum(self._sizes)

    def _targets(self, places: Sequence[int], device: torch.device) -> list[Tensor]:
        if device not in self._payloads:
            payload = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
            self._payloads[device], self._places[device] = payload, payload.split(self._sizes)
        if device.type != "cpu":
            for place in places:
                self._devices[place] = device
        return [self._places[device][place] for place in places]

    def _collect(self) -> None:
        """Copy adjacent sections together, and wait for the devices once all copies are queued."""
        out = self._payloads[torch.device("cpu")]
        bounds = list(accumulate(self._sizes, initial=0))
        for device, run in groupby(range(len(self._sizes)), self._devices.__getitem__):
            if device.type == "cpu":
                continue
            places = list(run)
            part = slice(bounds[places[0]], bounds[places[-1] + 1])
            out[part].copy_(self._payloads[device][part], non_blocking=device.type == "cuda")
        for device in self._payloads:
            if device.type == "cuda":  # copies into pinned memory were not waited for
                torch.cuda.current_stream(device).synchronize()


class BucketWriter:
    """Encodes a bucket's tensors."""

    def __init__(self, payload: PayloadWriter, places: Sequence[int], bucket: Bucket) -> None:
        self._payload = payload
        self._places = places
        self._bucket = bucket

    def write(self, values: Tensor, decoded: Tensor) -> None:
        """Encode all `values`, int32[n], and write to `decoded`, int32[n], what receivers will read."""
        self._payload.add(self._places, self._bucket.encode(values, decoded), self._bucket.section_bytes)
