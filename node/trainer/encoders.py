"""From the values of a fragment's tensors to its payload, with torch, on the device where the model is.

Each kernel writes the same bytes as the reference codec of that name (`gossamer.protocol.codecs`), and the
int32 values that every receiver will decode from them. The sender keeps the difference as its error-feedback
residual. All arithmetic is on integers, and no choice is left to a library (torch promises the first of equal
maxima), so CPU and CUDA agree. No kernel waits for the device: every shape is known beforehand. A codec
without a kernel (`exact`) is encoded by its reference.

A large tensor is encoded in pieces whose temporaries stay in the CPU's cache. Small ones are encoded
together, in buckets, since each encoding costs some 40 torch calls, whatever its size: one tensor after the
other, each padded with zeros to whole blocks, so that a kernel writes what it would write for each alone.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.protocol.codecs import CODECS, block, topk, two_bit
from gossamer.protocol.codecs.base import ZERO_BLOCK
from gossamer.protocol.payloads import Fragment

EncodeBlocks = Callable[[Tensor, Tensor, Tensor, Tensor, int | Tensor], None]
"""``(values int32[b, n], exponents uint8[b, 1], codes uint8[b, c], decoded int32[b, n], count)``.

`count` is how many of a block's values are real: one number for all blocks, or int64[b, 1]. The rest are
zeros. `decoded` also serves as scratch.
"""

PIECE_CPU = 1 << 18
"""Values handled at a time: 1 MiB in, 1 MiB out. With half as many, the outer step of models of 6 and 10 M
parameters took a tenth longer, since a piece costs some 40 calls whatever its size; twice as many gained
nothing."""

PIECE_DEVICE = 1 << 23
"""Values handled at a time on an accelerator, where few launches matter; scratch takes some 200 MiB."""

SMALL_NUMEL = 1 << 14
"""The largest tensor that goes into a bucket on the CPU. For tensors of 4,096 values, int4 takes 3.5 times as
long without buckets, and topk six times. At 32,768 values neither gains: gathering and padding cost as much
as the calls that are saved."""

SMALL_NUMEL_DEVICE = 1 << 22
"""The same on accelerators, which process this many values in the time that it takes to launch 40 calls."""

CPU = torch.device("cpu")


class Kernel(NamedTuple):
    """Encodes whole blocks."""

    encode: EncodeBlocks
    block: int
    """Values that share an exponent."""
    run: int
    """A partial block is padded to a multiple of this."""
    values_per_byte: int


def _linear(
    codec: block.BlockCodec,
    values: Tensor,
    exponents: Tensor,
    codes: Tensor,
    decoded: Tensor,
    count: int | Tensor,
) -> None:
    """`int8` and `int4`."""
    magnitudes = torch.abs(values, out=decoded)
    peaks = magnitudes.amax(1, keepdim=True)
    shifts = _excess_bits(peaks, codec.bits - 1, codec.exponent_max)
    if codec.is_coarse:
        shifts = _coarser(shifts, magnitudes, peaks, count, codec.exponent_max)
    factors = torch.bitwise_left_shift(1, shifts)
    plus_half = _plus_half_nearer_to_zero if codec.is_coarse else _plus_half
    levels = plus_half(values, factors, decoded)
    levels.bitwise_right_shift_(shifts).clamp_(-codec.level_max - 1, codec.level_max)
    exponents.copy_(shifts)
    # uint8 wraps, so the offset of offset binary can be added last, to both halves of a byte at once.
    if codec.bits == 8:
        codes.copy_(levels)
        codes += 128
    else:
        narrow = levels.to(torch.uint8)
        half = block.BLOCK // 2
        torch.add(narrow[:, :half], narrow[:, half:], alpha=16, out=codes)
        codes += 8 * (1 + 16)
    decoded *= factors


def _coarser(shifts: Tensor, magnitudes: Tensor, peaks: Tensor, count: int | Tensor, most: int) -> Tensor:
    """The exponents of `int4`, int32[b, 1]; `shifts` are the finest that the blocks' peaks allow."""
    means = _sums(magnitudes, peaks) // count
    shifts = torch.maximum(shifts, _excess_bits(means, 0, most))
    steps = torch.bitwise_left_shift(1, shifts)
    return (shifts - (peaks <= (steps >> 1) + (steps >> 3)).int()).clamp_(min=0)


def _plus_half(values: Tensor, steps: Tensor, out: Tensor) -> Tensor:
    """Add half of a block's step to each value, so that rounding down then rounds to the nearest."""
    return torch.add(values, steps >> 1, out=out)


def _plus_half_nearer_to_zero(values: Tensor, steps: Tensor, out: Tensor) -> Tensor:
    """``values - clamp(values, -eighth, eighth) + half`` of each block's step, with one pass fewer."""
    eighths, halves = steps >> 3, steps >> 1
    excess = torch.sub(values, halves, out=out)
    torch.maximum(excess, -eighths - halves, out=excess)
    torch.minimum(excess, eighths - halves, out=excess)
    return torch.sub(values, excess, out=out)


def _sums(magnitudes: Tensor, peaks: Tensor) -> Tensor:
    """Each block's sum, int64[b, 1], of magnitudes that are at most its block's peak."""
    # On the CPU int32 is four times as fast, if it can hold the sums. On a device, finding out would wait.
    fits = magnitudes.is_cpu and int(peaks.amax()) < (1 << 31) // magnitudes.shape[1]
    return magnitudes.sum(1, keepdim=True, dtype=torch.int32 if fits else torch.int64).long()


def _two_bit(values: Tensor, exponents: Tensor, codes: Tensor, decoded: Tensor, count: int | Tensor) -> None:
    """`int2`."""
    sums = torch.abs(values, out=decoded).sum(1, keepdim=True, dtype=torch.int64)
    scale = (sums // count * 225) >> 8
    shifts = _excess_bits(scale, 1, two_bit.EXPONENT_MAX)
    is_zero = sums == 0
    exponents.copy_(shifts.masked_fill(is_zero, ZERO_BLOCK))
    # floor(v / (2 << shift)) is -2, -1, 0 or 1 for the levels -3, -1, 1 and 3; clamping saturates the rest.
    floors = torch.bitwise_right_shift(values, shifts + 1, out=decoded).clamp_(-2, 1)
    narrow = floors.to(torch.uint8)
    quarters = narrow.view(-1, 4, two_bit.QUARTER)
    torch.add(quarters[:, 0], quarters[:, 1], alpha=4, out=codes)
    codes.add_(quarters[:, 2], alpha=16).add_(quarters[:, 3], alpha=64)
    codes += 2 * (1 + 4 + 16 + 64)
    codes.masked_fill_(is_zero, 0)
    decoded *= 2
    decoded += 1
    decoded *= (1 << shifts).masked_fill_(is_zero, 0)


def _topk(values: Tensor, exponents: Tensor, codes: Tensor, decoded: Tensor, count: int | Tensor) -> None:
    """`topk`: the largest value of each run, with one exponent for up to 64 runs."""
    values, decoded = (tensor.view(len(tensor), -1, topk.RUN) for tensor in (values, decoded))
    magnitudes, positions = torch.abs(values, out=decoded).max(2)
    is_negative = values.gather(2, positions.unsqueeze(2)).squeeze(2) < 0
    shifts = _excess_bits(_mean_above_mean(magnitudes), 2, topk.EXPONENT_MAX)
    units = 1 << shifts
    is_large = 2 * magnitudes >= 5 * units  # both sides stay within int32
    entries = positions + topk.NEGATIVE * is_negative + topk.LARGE * is_large
    entries -= topk.LARGE * (entries == topk.NOTHING)
    entries.masked_fill_(magnitudes <= units, topk.NOTHING)
    levels = _topk_levels(values.device)[entries] * units
    exponents.copy_(shifts)
    codes.copy_(entries)
    decoded.zero_().scatter_(2, positions.unsqueeze(2), levels.unsqueeze(2))


def _mean_above_mean(magnitudes: Tensor) -> Tensor:
    """The mean, int64[b, 1], of those values in each row of int32[b, r] that are at least a 64th of its
    sum."""
    sums = magnitudes.sum(1, keepdim=True, dtype=torch.int64)
    above = magnitudes.masked_fill(magnitudes < -(-sums // topk.RUNS), 0)
    return above.sum(1, keepdim=True, dtype=torch.int64) // above.bool().sum(1, keepdim=True).clamp_(min=1)


@cache
def _topk_levels(device: torch.device) -> Tensor:
    """What each byte of `topk` stands for."""
    return torch.from_numpy(topk.LEVELS).to(device)


def _excess_bits(values: Tensor, bits: int, most: int) -> Tensor:
    """By how many bits non-negative integers are longer than `bits`, at most `most`: int32 of their shape."""
    return torch.bucketize(
        values, _powers(bits, most, values.device, values.dtype), right=True, out_int32=True
    )


@cache
def _powers(first: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The `count` powers of two from ``2**first`` on."""
    return 1 << torch.arange(first, first + count, device=device, dtype=dtype)


KERNELS = {
    "int8": Kernel(partial(_linear, block.INT8), block.BLOCK, block.BLOCK, 1),
    "int4": Kernel(partial(_linear, block.INT4), block.BLOCK, block.BLOCK, 2),
    "int2": Kernel(_two_bit, block.BLOCK, block.BLOCK, 4),
    "topk": Kernel(_topk, topk.BLOCK, topk.RUN, topk.RUN),
}
"""The kernels of codecs that work in blocks."""


def piece_numel(codec: str, tensor: Tensor) -> int:
    """How many of a tensor's values to encode at a time; a codec that has no kernel takes all at once."""
    if codec not in KERNELS:
        return max(1, tensor.numel())
    return PIECE_CPU if tensor.is_cpu else PIECE_DEVICE


def encode_piece(codec: str, values: Tensor, start: int, section: Tensor, decoded: Tensor) -> None:
    """Encode a tensor's values from `start` on, and write to `decoded` what receivers will read.

    Args:
        values: int32[n], magnitudes below 2**30; `piece_numel` of them, except at the tensor's end.
        section: uint8[section_bytes(numel)], of the whole tensor, on the same device; as is
        decoded: int32[n].
    """
    if codec not in KERNELS:
        reference, numbers = CODECS[codec], values.cpu().numpy()
        data = reference.encode(numbers)
        section.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else section)
        decoded.copy_(torch.from_numpy(reference.decode(memoryview(data), numbers.size, 0, numbers.size)))
        return
    kernel = KERNELS[codec]
    # A section has all blocks' exponents first, then all codes.
    blocks = -(-section.numel() // (1 + kernel.block // kernel.values_per_byte))
    tail = values.numel() % kernel.block
    split = values.numel() - tail
    if split:
        first, count = start // kernel.block, split // kernel.block
        exponents = section[first : first + count].unsqueeze(1)
        codes = section[blocks + start // kernel.values_per_byte :][: split // kernel.values_per_byte]
        whole = decoded[:split].view(count, -1)
        kernel.encode(values[:split].view(count, -1), exponents, codes.view(count, -1), whole, kernel.block)
    if tail:  # the last block: the last exponent, and the codes at the end
        padded = pad(values[split:], (0, -tail % kernel.run)).view(1, -1)
        result = torch.empty_like(padded)
        codes = section[blocks + (start + split) // kernel.values_per_byte :].view(1, -1)
        kernel.encode(padded, section[blocks - 1 : blocks].unsqueeze(1), codes, result, tail)
        decoded[split:].copy_(result[0, :tail])


class Bucket:
    """How the tensors of a bucket are encoded."""

    def __init__(self, codec: str, numels: Sequence[int], device: torch.device) -> None:
        kernel = KERNELS[codec]
        size = min(kernel.block, -(-max(numels) // kernel.run) * kernel.run)
        blocks = [-(-numel // size) for numel in numels]
        padding = [size * count - numel for numel, count in zip(numels, blocks, strict=True)]
        self.numels = list(numels)
        self.section_bytes = [CODECS[codec].section_bytes(numel) for numel in numels]
        """Length of each tensor's section."""
        self._kernel, self._size, self._blocks = kernel.encode, size, blocks
        zeros = torch.zeros(size, dtype=torch.int32, device=device)
        self._padding = [zeros[:count] for count in padding]
        self._values = list(chain(*zip(numels, padding, strict=True)))
        """How many of the padded values are a tensor's, and how many are padding, in turn."""
        self._code_bytes = size // kernel.values_per_byte
        codes = [length - count for length, count in zip(self.section_bytes, blocks, strict=True)]
        self._codes = list(
            chain(*((n, self._code_bytes * b - n) for n, b in zip(codes, blocks, strict=True)))
        )
        counts = chain(*([size] * (b - 1) + [size - p] for b, p in zip(blocks, padding, strict=True)))
        self._counts = torch.tensor(list(counts), device=device).unsqueeze(1)

    def encode(self, values: Tensor, decoded: Tensor) -> list[Tensor]:
        """Return the tensors' sections, and write to `decoded` what they decode to.

        `values` and `decoded` are int32[n], n being the sum of `numels`.
        """
        rows = zip(values.split(self.numels), self._padding, strict=True)
        padded = torch.cat(list(chain(*rows))).view(-1, self._size)
        exponents = padded.new_empty((len(padded), 1), dtype=torch.uint8)
        codes = padded.new_empty((len(padded), self._code_bytes), dtype=torch.uint8)
        result = torch.empty_like(padded)
        self._kernel(padded, exponents, codes, result, self._counts)
        torch.cat(result.view(-1).split(self._values)[::2], out=decoded)
        parts = exponents.view(-1).split(self._blocks), codes.view(-1).split(self._codes)[::2]
        sections = torch.cat(list(chain(*zip(*parts, strict=True))))
        return list(sections.split(self.section_bytes))


def together(codec: str, tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors in groups: small ones in buckets, each other tensor alone."""
    groups: list[list[int]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    # Smallest first, so that tensors in a bucket are of similar size: each is padded at most to the largest.
    for i, tensor in sorted(enumerate(tensors), key=lambda one: (one[1].numel(), one[0])):
        if codec not in KERNELS or tensor.numel() > (SMALL_NUMEL if tensor.is_cpu else SMALL_NUMEL_DEVICE):
            groups.append([i])
            continue
        run, kind = KERNELS[codec].run, (tensor.device, tensor.dtype)
        group = filling.get(kind)
        if group is None or (len(group) + 1) * -(-tensor.numel() // run) * run > piece_numel(codec, tensor):
            group = filling[kind] = []
            groups.append(group)
        group.append(i)
    return groups


class PayloadWriter:
    """Encodes a fragment's tensors, in any order and on whatever devices, as one payload."""

    def __init__(self, codec: str, fragment: Fragment, out: memoryview) -> None:
        """`out` is writable and has the payload's length in bytes or more. Raises ValueError otherwise."""
        self._codec = codec
        self._sizes = [CODECS[codec].section_bytes(slot.numel) for slot in fragment.slots]
        needed, room = sum(self._sizes), 0 if out.readonly else out.nbytes
        if room < needed:
            raise ValueError(f"a payload needs {needed} writable bytes, and there are {room}")
        here = torch.from_numpy(np.frombuffer(out, dtype=np.uint8)[:needed])
        self._payloads = {CPU: (here, here.split(self._sizes) if needed else ())}
        """By device, a payload and its sections; what is written elsewhere is copied here at the end."""
        self._devices = [CPU] * len(self._sizes)
        """The device on which each section was written."""

    def write(
        self, places: Sequence[int], bucket: Bucket | None, start: int, values: Tensor, decoded: Tensor
    ) -> None:
        """Encode all tensors of a bucket, or values of one tensor from `start` on; see `encode_piece`.

        `places` are the tensors' in the fragment. `decoded`, int32[n], gets what receivers will read.
        """
        device = values.device
        if device not in self._payloads:
            payload = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
            self._payloads[device] = payload, payload.split(self._sizes)
        for place in places:
            self._devices[place] = device
        targets = [self._payloads[device][1][place] for place in places]
        if bucket is None:
            encode_piece(self._codec, values, start, targets[0], decoded)
        else:
            torch._foreach_copy_(targets, bucket.encode(values, decoded))

    def finish(self) -> int:
        """Complete the payload, wait for GPUs, and drop all references to it; returns its length in bytes."""
        here = self._payloads.pop(CPU)[0]
        offsets = list(accumulate(self._sizes, initial=0))
        for device, run in groupby(range(len(self._sizes)), self._devices.__getitem__):
            if device != CPU:  # adjacent sections are copied together
                places = list(run)
                part = slice(offsets[places[0]], offsets[places[-1] + 1])
                here[part].copy_(self._payloads[device][0][part], non_blocking=device.type == "cuda")
        for device in self._payloads:
            if device.type == "cuda":  # copies into pinned memory were not waited for
                torch.cuda.current_stream(device).synchronize()
        self._payloads.clear()
        return offsets[-1]
