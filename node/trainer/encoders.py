"""Encoding a delta with torch, on the device where the model is.

Each encoder writes the same bytes as the reference codec of that name (`gossamer.protocol.codecs`), and the
int32 values that every receiver will decode from them. The sender keeps the difference as its error-feedback
residual. All arithmetic is on integers, and no choice is left to a library (torch promises the first of equal
maxima), so CPU and CUDA agree.

A tensor is processed in pieces whose temporaries stay in the CPU's cache. No kernel waits for the device:
every shape is known beforehand. A codec without a kernel (`exact`) is encoded by its reference.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.protocol.codecs import CODECS, block, topk, two_bit
from gossamer.protocol.codecs.base import ZERO_BLOCK

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


class Kernel(NamedTuple):
    """Encodes whole blocks."""

    encode: EncodeBlocks
    block: int
    """Values that share an exponent."""
    run: int
    """A partial block is padded to a multiple of this."""
    values_per_byte: int


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
    if codec in KERNELS:
        _in_blocks(KERNELS[codec], values, start, section, decoded)
        return
    # The reference codec, on the CPU: for `exact`, and for a codec that nobody has written a kernel for.
    reference, numbers = CODECS[codec], values.cpu().numpy()
    data = reference.encode(numbers)
    section.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else section)
    decoded.copy_(torch.from_numpy(reference.decode(memoryview(data), numbers.size, 0, numbers.size)))


def encode_tensor(codec: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `values`, int32 fixed point of any shape with magnitudes below 2**30, on their own device.

    Returns the section, uint8[bytes], and what it decodes to, int32 of the same shape; both are new tensors
    on that device.
    """
    length = CODECS[codec].section_bytes(values.numel())
    section = torch.empty(length, dtype=torch.uint8, device=values.device)
    decoded = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    size, start = piece_numel(codec, values), 0
    pieces = values.contiguous().view(-1).split(size)
    for piece, result in zip(pieces, decoded.view(-1).split(size), strict=True):
        encode_piece(codec, piece, start, section, result)
        start += piece.numel()
    return section, decoded


def _in_blocks(kernel: Kernel, values: Tensor, start: int, section: Tensor, decoded: Tensor) -> None:
    """Run a kernel; a partial last block is padded with zeros.

    A section has all blocks' exponents first, then all codes.
    """
    tail = values.numel() % kernel.block
    if tail and values.numel() > tail:
        split = values.numel() - tail
        _in_blocks(kernel, values[:split], start, section, decoded[:split])
        _in_blocks(kernel, values[split:], start + split, section, decoded[split:])
        return
    blocks = -(-section.numel() // (1 + kernel.block // kernel.values_per_byte))
    first, end = start // kernel.block, -(-(start + values.numel()) // kernel.block)
    padding = -tail % kernel.run
    exponents = section[first:end].unsqueeze(1)
    codes = section[blocks + start // kernel.values_per_byte :]
    codes = codes[: (values.numel() + padding) // kernel.values_per_byte]
    if tail:
        padded = pad(values, (0, padding)).view(1, -1)
        result = torch.empty_like(padded)
        kernel.encode(padded, exponents, codes.view(1, -1), result, tail)
        decoded.copy_(result[0, :tail])
    elif end > first:
        in_blocks = values.view(-1, kernel.block), exponents, codes.view(end - first, -1)
        kernel.encode(*in_blocks, decoded.view(-1, kernel.block), kernel.block)


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
