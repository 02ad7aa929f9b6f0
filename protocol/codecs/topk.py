"""`topk`: of every 4096 values the 64 largest, each as a sign and one magnitude bit; 0.22 bit a parameter.

A section holds the blocks one after another, each as an exponent byte, the ascending indices (12 bits
each, two in three bytes), and two bits per entry: sign, and whether the magnitude is 2 or 3 times
``2**exponent``. A last block of ``n`` values keeps ``4 * ceil(n / 256)`` entries; an index at or past
``n`` is padding. Everything not sent stays in the sender's error-feedback residual.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import ZERO_BLOCK, Bytes, Sums, Survey, bit_length, multipliers
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints, sum_of_squares

BLOCK = 4096
KEPT = 64
EXPONENT_MAX = 27
PADDING = BLOCK - 1


def kept(numel: int) -> int:
    """Entries of a block of `numel` values: always a multiple of 4, so that all planes end on bytes."""
    return 4 * -(-numel // 256)


def _block_bytes(entries: int) -> int:
    return 1 + entries * 3 // 2 + entries // 4


class TopKCodec:
    """Sparse, one magnitude bit."""

    name = "topk"
    in_parts = True

    def section_bytes_max(self, numel: int) -> int:
        whole, tail = divmod(numel, BLOCK)
        return whole * _block_bytes(KEPT) + (_block_bytes(kept(tail)) if tail else 0)

    def section_bytes(self, data: memoryview, numel: int) -> int:
        return self.section_bytes_max(numel)

    def encode(self, values: Ints) -> bytes:
        flat = np.ascontiguousarray(values, dtype=np.int32).reshape(-1)
        whole = flat.size // BLOCK * BLOCK
        parts = [self._encode_blocks(flat[:whole].reshape(-1, BLOCK), KEPT)] if whole else []
        if whole < flat.size:
            parts.append(self._encode_blocks(flat[None, whole:], kept(flat.size - whole)))
        return b"".join(parts)

    def _encode_blocks(self, blocks: Ints, entries: int) -> bytes:
        chosen = min(entries, blocks.shape[1])
        order = np.argsort(-np.abs(blocks.astype(np.int64)), axis=1, kind="stable")[:, :chosen]
        indices = np.sort(order, axis=1)
        picked = np.take_along_axis(blocks, indices, axis=1)
        magnitudes = np.abs(picked).astype(np.int64)
        means = magnitudes.sum(axis=1) // chosen
        exponents = np.clip(bit_length(means * 5 // 4) - 2, 0, EXPONENT_MAX)
        # The border between levels 2 and 3 lies at 5 half units.
        large = 2 * magnitudes >= (5 << exponents.astype(np.int64))[:, None]
        flags = (picked < 0).astype(np.uint8) | (large.astype(np.uint8) << 1)
        is_zero = ~blocks.any(axis=1)
        flags[is_zero] = 0
        pad = ((0, 0), (0, entries - chosen))
        rows = np.concatenate(
            [
                np.where(is_zero, ZERO_BLOCK, exponents).astype(np.uint8)[:, None],
                pack_indices(np.pad(indices, pad, constant_values=PADDING)),
                pack_flags(np.pad(flags, pad)),
            ],
            axis=1,
        )
        return rows.tobytes()

    def decode(self, section: memoryview, numel: int, start: int = 0, stop: int | None = None) -> Ints:
        stop = numel if stop is None else stop
        values = np.zeros(stop - start, dtype=np.int32)
        for positions, levels in self._entries(section, numel, start, stop):
            values[positions] = levels
        return values

    def accumulate(self, section: memoryview, numel: int, start: int, factor: int, sums: Sums) -> None:
        for positions, levels in self._entries(section, numel, start, start + sums.size):
            sums[positions] += np.multiply(levels, np.int64(factor), dtype=np.int64)  # no position twice

    def survey(self, section: memoryview, numel: int, start: int, stop: int, sampling: slice) -> Survey:
        squares, chosen = 0, range(stop - start)[sampling]
        sample = np.zeros(len(chosen), dtype=np.int32)
        for positions, levels in self._entries(section, numel, start, stop):
            squares += sum_of_squares(levels)
            place, rest = np.divmod(positions - chosen.start, chosen.step)
            is_chosen = (rest == 0) & (place >= 0)
            sample[place[is_chosen]] = levels[is_chosen]
        return Survey(squares, sample)

    def _entries(
        self, section: memoryview, numel: int, start: int, stop: int
    ) -> Iterator[tuple[npt.NDArray[np.intp], Ints]]:
        """Positions after `start`, and values there: of whole blocks, then of a last one in part."""
        if len(section) != self.section_bytes_max(numel):
            raise PayloadError(f"topk: a section of {len(section)} bytes for {numel} values")
        data = np.frombuffer(section, dtype=np.uint8)
        first, whole = start // BLOCK, stop // BLOCK
        row = _block_bytes(KEPT)
        if whole > first:
            yield _unpack(data[first * row : whole * row].reshape(whole - first, row), BLOCK)
        if whole * BLOCK < stop:
            positions, values = _unpack(data[whole * row :].reshape(1, -1), stop - whole * BLOCK)
            yield positions + (whole * BLOCK - start), values


def _unpack(rows: Bytes, width: int) -> tuple[npt.NDArray[np.intp], Ints]:
    """The entries of blocks of `width` values: positions in all of them together, and values."""
    entries = kept(width)
    factors = multipliers(rows[:, 0], EXPONENT_MAX, zero_allowed=True)
    indices = unpack_indices(rows[:, 1 : 1 + entries * 3 // 2])
    flags = unpack_flags(rows[:, 1 + entries * 3 // 2 :])
    levels = _LEVELS[flags] * factors[:, None]
    positions = indices + width * np.arange(len(rows), dtype=np.int32)[:, None]
    if width == BLOCK:  # no index is past the end
        is_ordered = bool(np.all(indices[:, 1:] > indices[:, :-1]))
    else:
        valid = indices < width
        is_next = (indices[:, 1:] > indices[:, :-1]) & valid[:, :-1]
        is_ordered = not np.any(valid[:, 1:] & ~is_next)
        positions, levels = positions[valid], levels[valid]
    if not is_ordered:
        raise PayloadError("topk: indices are not in ascending order")
    return positions.reshape(-1).astype(np.intp), levels.reshape(-1)


_LEVELS = np.array([2, -2, 3, -3], dtype=np.int32)
"""By the two bits of an entry: the lower one is its sign, the higher one its magnitude."""


def pack_indices(indices: npt.NDArray[np.int64]) -> Bytes:
    """Write 12-bit integers, an even number a row, as two in three bytes."""
    first, second = indices[:, 0::2], indices[:, 1::2]
    triples = np.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], axis=2)
    return triples.astype(np.uint8).reshape(len(indices), -1)


def unpack_indices(packed: Bytes) -> Ints:
    """Inverse of `pack_indices`: int32."""
    triples = packed.reshape(len(packed), -1, 3).astype(np.int32)
    low, middle, high = triples[:, :, 0], triples[:, :, 1], triples[:, :, 2]
    indices = np.empty((*low.shape, 2), dtype=np.int32)
    np.bitwise_or(low, (middle & 15) << 8, out=indices[:, :, 0])
    np.bitwise_or(middle >> 4, high << 4, out=indices[:, :, 1])
    return indices.reshape(len(packed), -1)


def pack_flags(flags: Bytes) -> Bytes:
    """Write 2-bit integers, four in a byte, the first lowest."""
    quads = flags.reshape(len(flags), -1, 4)
    packed = quads[:, :, 0] | (quads[:, :, 1] << 2) | (quads[:, :, 2] << 4) | (quads[:, :, 3] << 6)
    return packed.astype(np.uint8, copy=False)


def unpack_flags(packed: Bytes) -> Bytes:
    """Inverse of `pack_flags`."""
    quads = np.empty((*packed.shape, 4), dtype=np.uint8)
    for number in range(4):
        np.bitwise_and(packed >> (2 * number), 3, out=quads[:, :, number])
    return quads.reshape(len(packed), -1)
