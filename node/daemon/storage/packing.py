"""Which form a chunk is packed in: the one that has its bytes at a receiver soonest, by measured speeds.

That takes the time to pack it, to send what it packs to, and to unpack that. On a slow line only the size
counts. On a line that is faster than a core packs, less packing is sooner, or none.

A chunk is packed when it is stored, for the line as it has been lately, and then it is sent as it lies: that
costs nothing. If a link is so fast that unpacking would take longer than the bytes that it saves, the chunk
is sent unpacked, since it was unpacked here to be checked. If a link is so slow that a stronger packer pays,
it is packed again.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Final, Literal

from gossamer.protocol.payloads import (
    PACKERS,
    Chunk,
    Form,
    form_of,
    pack_chunk,
    packed_ratios,
    unpack_chunk,
)

Choice = Literal["auto", "none", "lz4", "zstd"]
"""A packer, none, or what is soonest."""

RATE_AT_FIRST = 128 * 1024
"""Bytes per second that our line carries, until it has shown more: so little that the smallest form wins."""

PACK_AT_FIRST, UNPACK_AT_FIRST = 1 / 2e9, 1 / 4e9
"""Seconds a byte, until measured. On the fast side, so that each form is tried before it is ruled out."""

TIMED_BYTES = 1 << 16
"""What is shorter says nothing of a packer's speed."""

ONLY_SIZE_COUNTS: Final = 1.0
"""The rate of a line that is slower than any packer: for a packer that was chosen by hand."""

SMOOTHING = 1 / 8
"""What the latest speed weighs."""


class Packing:
    """Packs chunks and unpacks them, and measures how long that takes. Any thread."""

    def __init__(self, choice: Choice = "auto", clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: this thread's processor time, so that waiting for a core does not count."""
        self._is_free = choice == "auto"
        self._packers = [name for name in PACKERS if choice in ("auto", name)]
        self._clock = clock
        self.rate = float(RATE_AT_FIRST)
        """Bytes per second that our line has lately carried: chunks that are stored are packed for it."""
        self._pack_s: dict[Form, float] = {}
        self._unpack_s: dict[Form, float] = {}
        """Seconds a byte of the chunk."""

    def pack(self, data: bytes) -> Chunk:
        """Pack a chunk that is to be stored."""
        return self._packed(data, self._packers, self.rate if self._is_free else ONLY_SIZE_COUNTS)

    def to_send(self, chunk: Chunk, rate: float) -> Chunk:
        """A chunk as it goes soonest over a link of so many bytes a second, given as it lies."""
        if not self._is_free:
            return chunk
        if chunk.frame is None:
            return self._packed(chunk.data, self._packers, rate)
        form, size = form_of(chunk.frame), len(chunk.data)
        lying_s = len(chunk.frame) / rate + size * self._unpack_s.get(form, UNPACK_AT_FIRST)
        if size / rate <= lying_s:
            return Chunk(chunk.data, None)
        stronger = self._packers[self._packers.index(form.packer) + 1 :]
        return self._packed(chunk.data, stronger, rate, chunk.frame, lying_s)

    def unpack(self, frame: bytes) -> bytes:
        """As `unpack_chunk`."""
        begun = self._clock()
        data = unpack_chunk(frame)
        self._note(self._unpack_s, form_of(frame), len(data), begun)
        return data

    def _packed(
        self,
        data: bytes,
        packers: Collection[str],
        rate: float,
        frame: bytes | None = None,
        seconds: float = math.inf,
    ) -> Chunk:
        """Pack a chunk in a form of these packers that takes less time than it would take unpacked, and
        less than the `seconds` that the `frame` takes which there is."""
        best, form = min(seconds, len(data) / rate), None
        for one, ratio in packed_ratios(data, packers).items():
            takes = (
                self._pack_s.get(one, PACK_AT_FIRST) + self._unpack_s.get(one, UNPACK_AT_FIRST) + ratio / rate
            )
            if len(data) * takes < best:
                best, form = len(data) * takes, one
        if form is None:
            return Chunk(data, frame)
        begun = self._clock()
        packed = pack_chunk(data, form)
        self._note(self._pack_s, form, len(data), begun)
        return Chunk(data, packed)

    def _note(self, speeds: dict[Form, float], form: Form, size: int, begun: float) -> None:
        if size >= TIMED_BYTES:
            took = (self._clock() - begun) / size
            speeds[form] = took + (1 - SMOOTHING) * (speeds.get(form, took) - took)
