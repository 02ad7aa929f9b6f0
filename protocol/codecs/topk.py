"""`topk`: of every 4096 values the 64 largest, each as a sign and one magnitude bit; 0.22 bit a parameter.

A section holds the blocks one after another, each as an exponent byte, the ascending indices (12 bits
each, two in three bytes), and two bits per entry: sign, and whether the magnitude is 2 or 3 times
``2**exponent``. A last block of ``n`` values keeps ``4 * ceil(n / 256)`` entries; an index at or past
``n`` is padding. Everything not sent stays in the sender's error-feedback residual.
"""

import numpy as np
import numpy.typing as npt

from gossamer.protocol.codecs.base import ZERO_BLOCK, Bytes, bit_length, multipliers
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints

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

    def decode(self, section: memoryview, numel: int) -> Ints:
        if len(section) != self.section_bytes_max(numel):
            raise PayloadError(f"topk: a section of {len(section)} bytes for {numel} values")
        data = np.frombuffer(section, dtype=np.uint8)
        values = np.zeros(numel, dtype=np.int32)
        whole = numel // BLOCK
        split = whole * _block_bytes(KEPT)
        if whole:
            self._decode_blocks(
                data[:split].reshape(whole, -1), values[: whole * BLOCK].reshape(whole, BLOCK)
            )
        if whole * BLOCK < numel:
            self._decode_blocks(data[split:].reshape(1, -1), values[whole * BLOCK :].reshape(1, -1))
        return values

    def _decode_blocks(self, rows: Bytes, out: Ints) -> None:
        entries = kept(out.shape[1])
        factors = multipliers(rows[:, 0], EXPONENT_MAX, zero_allowed=True)
        indices = unpack_indices(rows[:, 1 : 1 + entries * 3 // 2])
        flags = unpack_flags(rows[:, 1 + entries * 3 // 2 :])
        valid = indices < out.shape[1]
        if np.any((np.diff(indices, axis=1) <= 0) & valid[:, 1:]) or np.any(valid[:, 1:] & ~valid[:, :-1]):
            raise PayloadError("topk: indices are not in ascending order")
        levels = ((2 + (flags >> 1)) * (1 - 2 * (flags & 1))).astype(np.int32) * factors[:, None]
        block, entry = np.nonzero(valid)
        out[block, indices[block, entry]] = levels[block, entry]


def pack_indices(indices: npt.NDArray[np.int64]) -> Bytes:
    """Write 12-bit integers, an even number a row, as two in three bytes."""
    first, second = indices[:, 0::2], indices[:, 1::2]
    triples = np.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], axis=2)
    return triples.astype(np.uint8).reshape(len(indices), -1)


def unpack_indices(packed: Bytes) -> npt.NDArray[np.int64]:
    """Inverse of `pack_indices`."""
    triples = packed.reshape(len(packed), -1, 3).astype(np.int64)
    first = triples[:, :, 0] | ((triples[:, :, 1] & 15) << 8)
    second = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    return np.stack([first, second], axis=2).reshape(len(packed), -1)


def pack_flags(flags: Bytes) -> Bytes:
    """Write 2-bit integers, four in a byte, the first lowest."""
    quads = flags.reshape(len(flags), -1, 4)
    packed = quads[:, :, 0] | (quads[:, :, 1] << 2) | (quads[:, :, 2] << 4) | (quads[:, :, 3] << 6)
    return packed.astype(np.uint8, copy=False)


def unpack_flags(packed: Bytes) -> npt.NDArray[np.int64]:
    """Inverse of `pack_flags`."""
    quads = [(packed >> shift) & 3 for shift in (0, 2, 4, 6)]
    return np.stack(quads, axis=2).reshape(len(packed), -1).astype(np.int64)
