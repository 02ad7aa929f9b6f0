"""From the values of a fragment's tensors to its payload, with torch, on the device where the model is.

Each kernel writes the same bytes as the reference codec of that name (`gossamer.protocol.codecs`), and the
int32 values that every receiver will decode from them. The sender keeps the difference as its error-feedback
residual. All arithmetic is on integers, and no choice is left to a library (torch promises the first of equal
maxima), so CPU and CUDA agree. No kernel waits for the device: every shape is known beforehand. A codec
without a kernel (`exact`) is encoded by its reference.

A large tensor is encoded in pieces whose temporaries stay in the CPU's cache. Small ones are encoded
together, in buckets, since each encoding costs some 40 torch calls, whatever its size: one tensor after the
other, each padded with zeros to whole blocks, so that a kernel writes what it would write for each alone. The
outer loop keeps its own state of them padded, too, so that nothing is cut and joined for each delta.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, chain, compress, groupby, pairwise
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
zeros, and stay so in `decoded`, which also serves as scratch.
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
    if isinstance(
        count, Tensor
    ):  # no level is zero, as padding has to be; a mask would take three times as long
        places = torch.arange(values.shape[1], dtype=torch.int16, device=values.device)
        decoded *= (count.short() - places).clamp_(0, 1)


def _topk(
    codec: topk.TopKCodec,
    values: Tensor,
    exponents: Tensor,
    codes: Tensor,
    decoded: Tensor,
    count: int | Tensor,
) -> None:
    """`topk8`, `topk16` and `topk`: the largest value of each run, with one exponent for those of a block."""
    values, decoded = (tensor.view(len(tensor), -1, codec.run) for tensor in (values, decoded))
    positions = torch.abs(values, out=decoded).argmax(2, keepdim=True)
    picked = values.gather(2, positions).squeeze(2)
    magnitudes = picked.abs()
    shifts = _excess_bits(_mean_above_mean(magnitudes, codec.runs), 2, topk.EXPONENT_MAX)
    units = 1 << shifts
    is_large = 2 * magnitudes >= 5 * units  # both sides stay within int32
    entries = positions.squeeze(2) + topk.NEGATIVE * (picked < 0) + topk.LARGE * is_large
    entries -= topk.LARGE * (entries == topk.NOTHING)
    entries.masked_fill_(magnitudes <= units, topk.NOTHING)
    levels = _topk_levels(values.device)[entries] * units
    exponents.copy_(shifts)
    codes.copy_(entries)
    decoded.zero_().scatter_(2, positions, levels.unsqueeze(2))


def _mean_above_mean(magnitudes: Tensor, runs: int) -> Tensor:
    """The mean, int64[b, 1], of those values in each row of int32[b, r] that are at least the mean of `runs`,
    the missing ones being 0."""
    sums = magnitudes.sum(1, keepdim=True, dtype=torch.int64)
    above = magnitudes.masked_fill(magnitudes < -(-sums // runs), 0)
    return above.sum(1, keepdim=True, dtype=torch.int64) // above.bool().sum(1, keepdim=True).clamp_(min=1)


@cache
def _topk_levels(device: torch.device) -> Tensor:
    """What each byte stands for."""
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
    **{
        codec.name: Kernel(partial(_topk, codec), topk.BLOCK, codec.run, codec.run)
        for codec in (topk.TOPK8, topk.TOPK16, topk.TOPK)
    },
}
"""The kernels of codecs that work in blocks."""


def piece_numel(codecs: Collection[str], tensor: Tensor) -> int:
    """How many of a tensor's values to encode at a time in any of the codecs; one that has no kernel takes
    all at once."""
    if not set(codecs) <= KERNELS.keys():
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


class Cuts:
    """Parts of a long tensor, cut out all at once: one after the other takes five times as long."""

    def __init__(self, spans: Iterable[tuple[int, int]], total: int) -> None:
        """`spans` are ascending and do not overlap; `total` is the length of the tensor."""
        edges = pairwise((0, *chain(*spans), total))
        cuts = [(stop - start, bool(i % 2)) for i, (start, stop) in enumerate(edges) if stop > start]
        self._lengths, self._is_part = [list(column) for column in zip(*cuts, strict=True)]

    def of(self, whole: Tensor) -> list[Tensor]:
        """The parts, as views."""
        return list(compress(whole.split(self._lengths), self._is_part))


class _Form:
    """What the values of a bucket become in one codec: memory for it, and views of that, made once."""

    def __init__(
        self,
        codec: str,
        unit: int,
        spans: Sequence[tuple[int, int]],
        starts: Sequence[int],
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        """`spans` are the tensors' in the bucket, each padded to a multiple of `unit`; for the others see
        `Bucket`."""
        kernel = KERNELS[codec]
        self._kernel, self._size = kernel.encode, min(kernel.block, unit)
        counts, exponents, codes, edges, blocks = [], [], [], [], 0
        for (start, stop), place in zip(spans, places, strict=True):
            real, padded = (-(-(stop - start) // size) for size in (self._size, unit))
            padded *= unit // self._size
            counts += [stop - at for at in range(start, start + padded * self._size, self._size)]
            exponents.append((blocks, blocks + real))
            begin, end = starts[place : place + 2]
            edges.append((begin, begin + real, end))
            at = start // kernel.values_per_byte
            codes.append((at, at + end - begin - real))
            blocks += padded
        # A block of nothing but padding counts as one value, since sums are divided by that.
        self._counts = torch.tensor(counts, device=device).clamp_(1, self._size).unsqueeze(1)
        self._exponents = torch.zeros((blocks, 1), dtype=torch.uint8, device=device)
        width = self._size // kernel.values_per_byte
        self._codes = torch.zeros((blocks, width), dtype=torch.uint8, device=device)
        parts = [Cuts(exponents, blocks).of(self._exponents.view(-1))]
        parts.append(Cuts(codes, self._codes.numel()).of(self._codes.view(-1)))
        self._encoded = list(chain(*zip(*parts, strict=True)))
        self._payload = Cuts(chain(*map(pairwise, edges)), starts[-1])

    def encode(self, values: Tensor, decoded: Tensor, payload: Tensor) -> None:
        """See `Bucket.encode`."""
        padded, result = values.view(-1, self._size), decoded.view(-1, self._size)
        self._kernel(padded, self._exponents, self._codes, result, self._counts)
        torch._foreach_copy_(self._payload.of(payload), self._encoded)


class Bucket:
    """Small tensors of a fragment that are encoded together, each padded with zeros to whole blocks."""

    def __init__(
        self,
        starts: Mapping[str, Sequence[int]],
        fragment: Fragment,
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        """`starts` are those of the fragment's sections in each codec, `places` the tensors' in it, in
        ascending order."""
        slots = [fragment.slots[place] for place in places]
        unit = _unit(starts, max(slot.numel for slot in slots))
        ends = list(accumulate(-(-slot.numel // unit) * unit for slot in slots))
        self.numel = ends[-1]
        """How many values there are, with the padding."""
        spans = [(at, at + slot.numel) for at, slot in zip((0, *ends[:-1]), slots, strict=True)]
        self.padded = Cuts(spans, self.numel)
        """Cuts the tensors' values out of those of the bucket, [numel];"""
        self.whole = Cuts([(slot.span.start, slot.span.stop) for slot in slots], fragment.numel)
        """out of those of the fragment, such as Phi."""
        self._forms = {codec: _Form(codec, unit, spans, at, places, device) for codec, at in starts.items()}

    def encode(self, codec: str, values: Tensor, decoded: Tensor, payload: Tensor) -> None:
        """Write the tensors' sections to a payload, and to `decoded` what they decode to.

        `values` and `decoded` are int32[numel]; `payload` is uint8[n] on the same device.
        """
        self._forms[codec].encode(values, decoded, payload)


def _unit(codecs: Iterable[str], numel: int) -> int:
    """Tensors of up to `numel` values are padded to multiples of this, whole blocks in each of the codecs."""
    kernels = [KERNELS[codec] for codec in codecs]
    run = max(kernel.run for kernel in kernels)  # a power of two, as blocks are
    return min(max(kernel.block for kernel in kernels), -(-numel // run) * run)


def together(
    codecs: Collection[str], tensors: Sequence[Tensor], alone: Collection[int] = ()
) -> list[list[int]]:
    """The places of the tensors in groups: small ones in buckets, each other alone, as are all of `alone`."""
    groups: list[list[int]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    # Smallest first, so that tensors in a bucket are of similar size: each is padded at most to the largest.
    for i, tensor in sorted(enumerate(tensors), key=lambda one: (one[1].numel(), one[0])):
        small = SMALL_NUMEL if tensor.is_cpu else SMALL_NUMEL_DEVICE
        if not set(codecs) <= KERNELS.keys() or tensor.numel() > small or i in alone:
            groups.append([i])
            continue
        unit, kind = _unit(codecs, tensor.numel()), (tensor.device, tensor.dtype)
        group = filling.get(kind)
        padded = -(-tensor.numel() // unit) * unit
        if group is None or (len(group) + 1) * padded > piece_numel(codecs, tensor):
            group = filling[kind] = []
            groups.append(group)
        group.append(i)
    return groups


class PayloadWriter:
    """Encodes a fragment's tensors, in any order and on whatever devices, as one payload."""

    def __init__(self, codec: str, starts: Sequence[int], out: memoryview) -> None:
        """`starts`: see `section_starts`. `out` is writable and has the payload's length in bytes or more.
        Raises ValueError otherwise."""
        self._codec, self._starts = codec, starts
        room = 0 if out.readonly else out.nbytes
        if room < starts[-1]:
            raise ValueError(f"a payload needs {starts[-1]} writable bytes, and there are {room}")
        self._payloads = {CPU: torch.from_numpy(np.frombuffer(out, dtype=np.uint8)[: starts[-1]])}
        """By device, a payload; what is written elsewhere is copied here at the end."""
        self._devices = [CPU] * (len(starts) - 1)
        """The device on which each section was written."""

    def write(
        self, places: Sequence[int], bucket: Bucket | None, start: int, values: Tensor, decoded: Tensor
    ) -> None:
        """Encode all tensors of a bucket, or values of one tensor from `start` on; see `encode_piece`.

        `places` are the tensors' in the fragment. `decoded`, int32[n], gets what receivers will read.
        """
        device = values.device
        if device not in self._payloads:
            self._payloads[device] = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)
        for place in places:
            self._devices[place] = device
        payload = self._payloads[device]
        if bucket is None:
            encode_piece(self._codec, values, start, payload[self._span(places)], decoded)
        else:
            bucket.encode(self._codec, values, decoded, payload)

    def finish(self) -> int:
        """Complete the payload, wait for GPUs, and drop all references to it; returns its length in bytes."""
        here = self._payloads.pop(CPU)
        for device, run in groupby(range(len(self._devices)), self._devices.__getitem__):
            if device != CPU:  # adjacent sections are copied together
                part = self._span(list(run))
                here[part].copy_(self._payloads[device][part], non_blocking=device.type == "cuda")
        for device in self._payloads:
            if device.type == "cuda":  # copies into pinned memory were not waited for
                torch.cuda.current_stream(device).synchronize()
        self._payloads.clear()
        return self._starts[-1]

    def _span(self, places: Sequence[int]) -> slice:
        """The bytes of adjacent sections."""
        return slice(self._starts[places[0]], self._starts[places[-1] + 1])
