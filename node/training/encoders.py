"""Encoding a delta with torch, on the device where the model is.

Each encoder writes the bytes that the reference codec of the same name (`gossamer.protocol.codecs`) would,
bit for bit, and the int32 values that every receiver will decode from them; the sender keeps the
difference as its error-feedback residual. All arithmetic is on integers, and no choice is left to a
library (topk ranks by magnitude and then by position, so there are no ties), so CPU and CUDA agree.

A tensor is worked through in pieces whose temporaries stay in the CPU's cache. Except for `exact`, no
encoder waits for the device: every shape is known beforehand.
"""

from collections.abc import Callable, Sequence
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

Encoder = Callable[[Tensor, Tensor, Tensor], int]
"""``(values int32[n], section uint8[section_bytes_max(n)], decoded int32[n]) -> bytes written``."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
"""``(values int32[b, 256], exponents uint8[b, 1], codes uint8[b, c], decoded int32[b, 256], count)``.

`count` is how many of a block's values are real; the rest are zeros. `decoded` serves as scratch too.
"""

PIECE_CPU = 1 << 18
"""Values handled at a time: 1 MiB in, 1 MiB out. With a quarter of this, int4 and topk were a fifth to a
third slower (4 M values, one core), for a piece costs tens of calls whatever its size."""

PIECE_DEVICE = 1 << 24
"""The same on accelerators, where few launches count; topk's int64 keys then take 128 MiB."""


def encode_tensor(codec: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `values`, int32 fixed point of any shape with magnitudes below 2**30, on their own device.

    Returns the section, uint8[bytes], and what it decodes to, int32 of the same shape; both new tensors
    on that device. Raises ConfigError for an unknown codec.
    """
    encoder = _encoder(codec)
    room = CODECS[codec].section_bytes_max(values.numel())
    section = torch.empty(room, dtype=torch.uint8, device=values.device)
    written, decoded = _encode_into(encoder, values, section)
    return section[:written], decoded


def encode_fragment(
    codec: str, fragment: Fragment, tensors: Sequence[Tensor], out: memoryview
) -> tuple[int, list[Tensor]]:
    """Encode a fragment's tensors, in its order and on whatever devices, as one payload into `out`.

    `tensors` are as for `encode_tensor`. `out` is writable and has `payload_bytes_max` bytes or more; no
    reference to it outlives the call. Returns the payload's length in bytes, and each tensor decoded.
    Raises ConfigError for an unknown codec, ValueError if `out` is too small or a tensor of another size.
    """
    encoder = _encoder(codec)
    needed, room = payload_bytes_max(CODECS[codec], fragment), 0 if out.readonly else out.nbytes
    if room < needed:
        raise ValueError(f"a payload needs up to {needed} writable bytes, and there are {room}")
    target = torch.from_numpy(np.frombuffer(out, dtype=np.uint8))
    on_devices: list[tuple[Tensor, Tensor]] = []
    decoded_all: list[Tensor] = []
    end = 0
    for slot, values in zip(fragment.slots, tensors, strict=True):
        if values.numel() != slot.numel:
            raise ValueError(f"{slot.spec.name} has {values.numel()} values, its slot {slot.numel}")
        place = target[end : end + CODECS[codec].section_bytes_max(slot.numel)]
        section = place if values.is_cpu else torch.empty_like(place, device=values.device)
        written, decoded = _encode_into(encoder, values, section)
        if section is not place:
            on_devices.append((place[:written], section[:written]))
        decoded_all.append(decoded)
        end += written
    # Copied at the end: the first copy waits for its device, and by now all the work is queued.
    for place, section in on_devices:
        place.copy_(section)
    return end, decoded_all


def _encoder(codec: str) -> Encoder:
    try:
        return ENCODERS[codec]
    except KeyError:
        raise ConfigError(f"unknown codec {codec!r}: this version has {', '.join(ENCODERS)}") from None


def _encode_into(encoder: Encoder, values: Tensor, section: Tensor) -> tuple[int, Tensor]:
    """Run an encoder; return the bytes written to `section` and the decoded tensor."""
    if values.dtype != torch.int32:
        raise ValueError(f"encoders take int32 fixed point, not {values.dtype}")
    decoded = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    return encoder(values.contiguous().view(-1), section, decoded.view(-1)), decoded


def _exact(values: Tensor, section: Tensor, decoded: Tensor) -> int:
    """lz4 exists on the CPU only, and this codec is for tests and tiny models: use the reference."""
    data = CODECS["exact"].encode(values.cpu().numpy())
    section[: len(data)].copy_(torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)))
    decoded.copy_(values)
    return len(data)


def _in_blocks(kernel: Kernel, values: Tensor, section: Tensor, decoded: Tensor) -> int:
    """Run the kernel of a 256-value codec piece by piece; a last block in part goes padded with zeros."""
    if not values.numel():
        return 0
    blocks = -(-values.numel() // block.BLOCK)
    whole, tail = divmod(values.numel(), block.BLOCK)
    exponents, codes = section[:blocks].view(blocks, 1), section[blocks:].view(blocks, -1)
    split = whole * block.BLOCK
    source, result = values[:split].view(-1, block.BLOCK), decoded[:split].view(-1, block.BLOCK)
    for piece in _pieces(values, whole, block.BLOCK):
        kernel(source[piece], exponents[piece], codes[piece], result[piece], block.BLOCK)
    if tail:
        source = pad(values[split:], (0, block.BLOCK - tail)).view(1, -1)
        result = torch.empty_like(source)
        kernel(source, exponents[whole:], codes[whole:], result, tail)
        decoded[split:] = result[0, :tail]
    return section.numel()


def _linear(bits: int, values: Tensor, exponents: Tensor, codes: Tensor, decoded: Tensor, count: int) -> None:
    """`int8` and `int4`."""
    level_max = 2 ** (bits - 1) - 1
    peaks = torch.abs(values, out=decoded).amax(1, keepdim=True)
    shifts = (_bit_length(peaks) - (bits - 1)).clamp_(0, 30 - bits)
    factors = 1 << shifts
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
    shifts = (_bit_length(scale) - 1).clamp_(0, two_bit.EXPONENT_MAX)
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


def _topk(values: Tensor, section: Tensor, decoded: Tensor) -> int:
    """`topk`: whole blocks piece by piece, then the last block in part."""
    whole, tail = divmod(values.numel(), topk.BLOCK)
    split = whole * topk.BLOCK
    row_bytes = CODECS["topk"].section_bytes_max(topk.BLOCK)
    rows = section[: whole * row_bytes].view(-1, row_bytes)
    source, result = values[:split].view(-1, topk.BLOCK), decoded[:split].view(-1, topk.BLOCK)
    for piece in _pieces(values, whole, topk.BLOCK):
        _sparse(source[piece], rows[piece], result[piece])
    if tail:
        _sparse(values[None, split:], section[None, whole * row_bytes :], decoded[None, split:])
    return section.numel()


def _sparse(values: Tensor, rows: Tensor, decoded: Tensor) -> None:
    """Encode int32[b, n], n up to 4096, to uint8[b, row bytes]."""
    entries = topk.kept(values.shape[1])
    indices = _largest(values, min(entries, values.shape[1]))
    picked = values.gather(1, indices)
    magnitudes = picked.abs()
    sums = magnitudes.sum(1, keepdim=True, dtype=torch.int64)
    scale = (sums // indices.shape[1] * 5) >> 2
    shifts = (_bit_length(scale) - 2).clamp_(0, topk.EXPONENT_MAX)
    is_zero = sums == 0
    # The border between levels 2 and 3 lies at 5 half units. Both sides stay within int32.
    large = 2 * magnitudes >= 5 << shifts
    is_negative = picked < 0
    levels = (2 + large.int()) * (1 << shifts).masked_fill_(is_zero, 0)
    decoded.zero_().scatter_(1, indices, torch.where(is_negative, -levels, levels))
    padding = (0, entries - indices.shape[1])
    rows[:, :1] = shifts.masked_fill(is_zero, ZERO_BLOCK)
    split = 1 + entries * 3 // 2
    first, second = pad(indices, padding, value=topk.PADDING).unflatten(1, (-1, 2)).unbind(2)
    triples = rows[:, 1:split].unflatten(1, (-1, 3))
    triples[:, :, 0] = first  # storing to uint8 keeps the low 8 bits
    triples[:, :, 1] = (first >> 8) | (second << 4)
    triples[:, :, 2] = second >> 4
    flags = pad(is_negative.to(torch.uint8).add_(large, alpha=2), padding).unflatten(1, (-1, 4))
    rows[:, split:] = flags[:, :, 0] | (flags[:, :, 1] << 2) | (flags[:, :, 2] << 4) | (flags[:, :, 3] << 6)


def _largest(values: Tensor, count: int) -> Tensor:
    """Positions of each row's `count` largest magnitudes, ascending, int64[b, count].

    Ranks by a key that holds the magnitude and, below it, the position counted from the end: no two keys
    are equal, so the choice is that of the reference's stable sort, whatever way `topk` finds it.
    """
    last = topk.BLOCK - 1
    from_end = torch.arange(last, last - values.shape[1], -1, device=values.device)
    keys = torch.add(from_end, values.abs(), alpha=topk.BLOCK)
    best = keys.topk(count, dim=1, sorted=False).values
    return (last - (best & last)).sort(dim=1).values


def _bit_length(values: Tensor) -> Tensor:
    """Bit length of non-negative integers, int32 of the same shape; 31 for all that are larger."""
    return torch.bucketize(values, _powers(values.device, values.dtype), right=True, out_int32=True)


@cache
def _powers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The powers of two from 1 to 2**30."""
    return 1 << torch.arange(31, device=device, dtype=dtype)


def _pieces(values: Tensor, blocks: int, block_size: int) -> list[slice]:
    """Cut a number of whole blocks into pieces to be handled at a time."""
    step = (PIECE_CPU if values.is_cpu else PIECE_DEVICE) // block_size
    return [slice(start, min(start + step, blocks)) for start in range(0, blocks, step)]


ENCODERS: dict[str, Encoder] = {
    "exact": _exact,
    "int8": partial(_in_blocks, partial(_linear, 8)),
    "int4": partial(_in_blocks, partial(_linear, 4)),
    "int2": partial(_in_blocks, _two_bit),
    "topk": _topk,
}
"""The encoder of every codec, by its name."""
