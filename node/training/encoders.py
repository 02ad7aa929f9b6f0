"""Encoding a delta with torch, on the device where the model is.

Each encoder writes the bytes that the reference codec of the same name (`gossamer.protocol.codecs`) would,
bit for bit, and the int32 values that every receiver will decode from them; the sender keeps the
difference as its error-feedback residual. All arithmetic is on integers, and no choice is left to a
library (the first of equal maxima is torch's promise), so CPU and CUDA agree.

A tensor is worked through in pieces whose temporaries stay in the CPU's cache. Except for `exact`, no
encoder waits for the device: every shape is known beforehand.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.protocol.codecs import CODECS, block, topk, two_bit
from gossamer.protocol.codecs.base import ZERO_BLOCK
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.layout import Fragment
from gossamer.protocol.payload import payload_bytes_max

Encoder = Callable[[Tensor, int, Tensor, Tensor], int]
"""``(values int32[n], start, section uint8[section_bytes_max(numel)], decoded int32[n]) -> bytes``.

The values are those from `start` on, a multiple of 4096, of a tensor of `numel`, which is cut anywhere else
only at its end. Returns how long the whole section is.
"""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
"""``(values int32[b, 256], exponents uint8[b, 1], codes uint8[b, c], decoded int32[b, 256], count)``.

`count` is how many of a block's values are real; the rest are zeros. `decoded` serves as scratch too.
"""

PIECE_CPU = 1 << 17
"""Values handled at a time: 512 KiB in, 512 KiB out. With half of it all of the outer step was up to a tenth
slower, for a piece costs some 40 calls whatever its size; with twice as much a small model's was."""

PIECE_DEVICE = 1 << 24
"""The same on accelerators, where few launches count."""


def piece_numel(codec: str, tensor: Tensor) -> int:
    """How many of a tensor's values to encode at a time."""
    if codec == "exact":
        return max(1, tensor.numel())
    return PIECE_CPU if tensor.is_cpu else PIECE_DEVICE


class SectionWriter:
    """Encodes one tensor, piece by piece, into its section of a payload."""

    def __init__(self, codec: str, section: Tensor) -> None:
        """`section`: uint8[section_bytes_max(numel)], on the tensor's device."""
        self._encoder = _encoder(codec)
        self._section = section
        self._start = 0
        self.length = 0
        """Bytes of the section, once all is written."""

    def write(self, values: Tensor, decoded: Tensor) -> None:
        """Encode the next `values`, int32[n], and leave in `decoded`, int32[n], what receivers will read.

        All pieces but the last have `piece_numel` values.
        """
        self.length = self._encoder(values, self._start, self._section, decoded)
        self._start += values.numel()


class PayloadWriter:
    """Encodes a fragment's tensors, in its order and on whatever devices, as one payload."""

    def __init__(self, codec: str, fragment: Fragment, out: memoryview) -> None:
        """`out` is writable and has `payload_bytes_max` bytes or more.

        Raises ConfigError for an unknown codec, ValueError if `out` is too small.
        """
        _encoder(codec)
        needed, room = payload_bytes_max(CODECS[codec], fragment), 0 if out.readonly else out.nbytes
        if room < needed:
            raise ValueError(f"a payload needs up to {needed} writable bytes, and there are {room}")
        self._codec = codec
        self._out = torch.from_numpy(np.frombuffer(out, dtype=np.uint8))
        self._slots = iter(fragment.slots)
        self._end = 0
        """Where the section that is being written begins."""
        self._section: SectionWriter | None = None
        self._on_devices: list[tuple[int, Tensor, SectionWriter]] = []

    def section(self, device: torch.device) -> SectionWriter:
        """Begin the next tensor, which lies on `device`; all of the one before is written."""
        start = self._written()
        numel = next(self._slots).numel
        place = self._out[start : start + CODECS[self._codec].section_bytes_max(numel)]
        target = place if device.type == "cpu" else torch.empty_like(place, device=device)
        self._section = SectionWriter(self._codec, target)
        if target is not place:
            self._on_devices.append((start, target, self._section))
        return self._section

    def finish(self) -> int:
        """Have all of it in `out`, of which no reference is kept; returns the payload's length in bytes."""
        length = self._written()
        # Copied at the end: the first copy waits for its device, and by now all the work is queued.
        for start, target, section in self._on_devices:
            self._out[start : start + section.length].copy_(target[: section.length])
        del self._out, self._section
        return length

    def _written(self) -> int:
        """Close the section that is being written; returns where the next begins."""
        if self._section is not None:
            self._end += self._section.length
        return self._end


def encode_tensor(codec: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `values`, int32 fixed point of any shape with magnitudes below 2**30, on their own device.

    Returns the section, uint8[bytes], and what it decodes to, int32 of the same shape; both new tensors
    on that device. Raises ConfigError for an unknown codec.
    """
    _encoder(codec)
    if values.dtype != torch.int32:
        raise ValueError(f"encoders take int32 fixed point, not {values.dtype}")
    room = CODECS[codec].section_bytes_max(values.numel())
    section = torch.empty(room, dtype=torch.uint8, device=values.device)
    decoded = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    writer, size = SectionWriter(codec, section), piece_numel(codec, values)
    pieces = values.contiguous().view(-1).split(size)
    for piece, result in zip(pieces, decoded.view(-1).split(size), strict=True):
        writer.write(piece, result)
    return section[: writer.length], decoded


def _encoder(codec: str) -> Encoder:
    try:
        return ENCODERS[codec]
    except KeyError:
        raise ConfigError(f"unknown codec {codec!r}: this version has {', '.join(ENCODERS)}") from None


def _exact(values: Tensor, start: int, section: Tensor, decoded: Tensor) -> int:
    """lz4 exists on the CPU only, and this codec is for tests and tiny models: use the reference.

    Compresses a tensor as a whole, so its only piece is all of it.
    """
    data = CODECS["exact"].encode(values.cpu().numpy())
    section[: len(data)].copy_(torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)))
    decoded.copy_(values)
    return len(data)


def _in_blocks(
    kernel: Kernel, width: int, values: Tensor, start: int, section: Tensor, decoded: Tensor
) -> int:
    """Run the kernel of a 256-value codec; a last block in part goes padded with zeros.

    `width` is a block's codes in bytes. A section has all blocks' exponents first, then all codes.
    """
    tail = values.numel() % block.BLOCK
    if tail and values.numel() > tail:
        split = values.numel() - tail
        _in_blocks(kernel, width, values[:split], start, section, decoded[:split])
        return _in_blocks(kernel, width, values[split:], start + split, section, decoded[split:])
    blocks = section.numel() // (1 + width)
    first, end = start // block.BLOCK, -(-(start + values.numel()) // block.BLOCK)
    exponents = section[first:end].unsqueeze(1)
    codes = section[blocks + first * width : blocks + end * width].view(-1, width)
    if tail:
        padded = pad(values, (0, block.BLOCK - tail)).view(1, -1)
        result = torch.empty_like(padded)
        kernel(padded, exponents, codes, result, tail)
        decoded.copy_(result[0, :tail])
    elif end > first:
        kernel(values.view(-1, block.BLOCK), exponents, codes, decoded.view(-1, block.BLOCK), block.BLOCK)
    return section.numel()


def _linear(bits: int, values: Tensor, exponents: Tensor, codes: Tensor, decoded: Tensor, count: int) -> None:
    """`int8` and `int4`."""
    level_max = 2 ** (bits - 1) - 1
    peaks = torch.abs(values, out=decoded).amax(1, keepdim=True)
    shifts = _excess_bits(peaks, bits - 1, 30 - bits)
    factors = torch.bitwise_left_shift(1, shifts)
    levels = torch.add(values, factors >> 1, out=decoded)
    levels.bitwise_right_shift_(shifts).clamp_(-level_max - 1, level_max)
    exponents.copy_(shifts)
    # uint8 wraps, so the offset of offset binary may be added last, to both halves of a byte at once.
    if bits == 8:
        codes.copy_(levels)
        codes += 128
    else:
        narrow = levels.to(torch.uint8)
        half = block.BLOCK // 2
        torch.add(narrow[:, :half], narrow[:, half:], alpha=16, out=codes)
        codes += 8 * (1 + 16)
    decoded *= factors


def _two_bit(values: Tensor, exponents: Tensor, codes: Tensor, decoded: Tensor, count: int) -> None:
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


def _topk(values: Tensor, start: int, section: Tensor, decoded: Tensor) -> int:
    """`topk`: whole blocks, then a last one in part, its last run padded with zeros."""
    tail = values.numel() % topk.BLOCK
    if tail and values.numel() > tail:
        split = values.numel() - tail
        _topk(values[:split], start, section, decoded[:split])
        return _topk(values[split:], start + split, section, decoded[split:])
    blocks = -(-section.numel() // (1 + topk.RUNS))
    first, end = start // topk.BLOCK, -(-(start + values.numel()) // topk.BLOCK)
    exponents = section[first:end].unsqueeze(1)
    entries = section[blocks + start // topk.RUN :][: -(-values.numel() // topk.RUN)]
    if tail:
        padded = pad(values, (0, -tail % topk.RUN)).view(1, -1, topk.RUN)
        result = torch.empty_like(padded)
        _largest_of_runs(padded, exponents, entries.unsqueeze(0), result)
        decoded.copy_(result.view(-1)[:tail])
    elif end > first:
        shape = (end - first, topk.RUNS, topk.RUN)
        _largest_of_runs(values.view(shape), exponents, entries.view(shape[:2]), decoded.view(shape))
    return section.numel()


def _largest_of_runs(values: Tensor, exponents: Tensor, entries: Tensor, decoded: Tensor) -> None:
    """Encode int32[b, r, 64] to uint8[b, 1] and uint8[b, r]; `decoded` serves as scratch too."""
    magnitudes, positions = torch.abs(values, out=decoded).max(2)
    is_negative = values.gather(2, positions.unsqueeze(2)).squeeze(2) < 0
    shifts = _excess_bits(_mean_above_mean(magnitudes), 2, topk.EXPONENT_MAX)
    units = 1 << shifts
    is_large = 2 * magnitudes >= 5 * units  # both sides stay within int32
    codes = positions + topk.NEGATIVE * is_negative + topk.LARGE * is_large
    codes -= topk.LARGE * (codes == topk.NOTHING)
    codes.masked_fill_(magnitudes <= units, topk.NOTHING)
    levels = _topk_levels(values.device)[codes] * units
    exponents.copy_(shifts)
    entries.copy_(codes)
    decoded.zero_().scatter_(2, positions.unsqueeze(2), levels.unsqueeze(2))


def _mean_above_mean(magnitudes: Tensor) -> Tensor:
    """Of each block's runs, int32[b, r]: the mean of those at or above a 64th of their sum, int64[b, 1]."""
    sums = magnitudes.sum(1, keepdim=True, dtype=torch.int64)
    above = magnitudes.masked_fill(magnitudes < -(-sums // topk.RUNS), 0)
    return above.sum(1, keepdim=True, dtype=torch.int64) // above.bool().sum(1, keepdim=True).clamp_(min=1)


@cache
def _topk_levels(device: torch.device) -> Tensor:
    """What each byte of `topk` stands for."""
    return torch.from_numpy(topk.LEVELS).to(device)


def _excess_bits(values: Tensor, bits: int, most: int) -> Tensor:
    """By how many bits non-negative integers are longer than `bits`, `most` at most: int32 of their shape."""
    return torch.bucketize(
        values, _powers(bits, most, values.device, values.dtype), right=True, out_int32=True
    )


@cache
def _powers(first: int, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """So many powers of two, from ``2**first`` on."""
    return 1 << torch.arange(first, first + count, device=device, dtype=dtype)


ENCODERS: dict[str, Encoder] = {
    "exact": _exact,
    "int8": partial(_in_blocks, partial(_linear, 8), block.BLOCK),
    "int4": partial(_in_blocks, partial(_linear, 4), block.BLOCK // 2),
    "int2": partial(_in_blocks, _two_bit, block.BLOCK // 4),
    "topk": _topk,
}
"""The encoder of every codec, by its name."""
