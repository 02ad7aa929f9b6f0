"""What a delta is made of: where tensors lie in Phi, how a delta's values become bytes, and bytes chunks.

**Layout.** The model is split by tensor into `F` fragments of about equal size (Streaming DiLoCo, arXiv
2501.18512): tensors go, largest first, into the fragment that is lightest so far. A tensor that is larger
than a fragment's share, as an embedding may be, is first cut into strips, which are placed, encoded and
merged as if they were tensors. Every node computes the same split. Within a fragment, tensors keep the order
of the manifest. A snapshot is the fragments' int32 values, one fragment after another.

**Payload.** One fragment's delta, encoded tensor by tensor. Sections lie one after another in the fragment's
order, so that a merge can go tensor by tensor in bounded memory, and never holds a whole decoded delta.

**Chunks.** Anything large is cut into chunks of at most 1 MiB, each known by its SHA-256. A *root* names a
whole file by one hash: it is the SHA-256 of the file's chunk hashes, one after another. That list is itself a
chunk (the *index*), so a file can be fetched from strangers with nothing known but its root. Genesis
parameters, snapshots and the digest of a replica all use roots.

**Packing.** A chunk travels and lies on disk packed, where that makes it smaller. Codecs write codes of fixed
width, which NumPy and torch process at memory speed. Some codes come far more often than others: a code of
`int4` holds about two bits of information. zstd (RFC 8878) takes out the rest, chunk by chunk: a core packs
300 MB of `int4` a second, and unpacks 1 GB. Chunks are hashed, signed for and merged unpacked. So what a
release of the library makes of odd input affects one transfer, and never a replica's bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapreplace
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple

import numpy as np
import zstandard

from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS, Codec
from gossamer.protocol.codecs.base import Sums, Survey
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.limits import CHUNK_BYTES_MAX

HASH_BYTES = 32

STRIP = 1 << 16
"""Strips of tensors begin at multiples of this. Codecs' blocks divide it, and no smaller tensor is cut."""


class TensorSpec(NamedTuple):
    """One trainable tensor: its name, its shape and the rule by which its deltas are averaged."""

    name: str
    shape: tuple[int, ...]
    averaging: str

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor, or of a strip of one, in its fragment; all numbers count elements."""

    spec: TensorSpec
    offset: int
    numel: int
    start: int = 0
    """Where in the tensor, in row-major order, the strip begins."""

    @property
    def span(self) -> slice:
        """Of the fragment's elements."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def strip(self) -> slice:
        """Of the tensor's elements, in row-major order."""
        return slice(self.start, self.start + self.numel)

    @property
    def is_cut(self) -> bool:
        """Whether it is but a strip of its tensor."""
        return self.numel < self.spec.numel


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed subset of the tensors, merged together; `offset` is where it starts in a snapshot."""

    index: int
    slots: tuple[Slot, ...]
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments of a model. Build it with `plan`."""

    fragments: tuple[Fragment, ...]
    numel: int = field(init=False)
    payload_bytes: dict[str, tuple[int, ...]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """The fragments' payload lengths by codec, once computed: a cache for `length_in`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", sum(fragment.numel for fragment in self.fragments))

    @property
    def snapshot_bytes(self) -> int:
        return 4 * self.numel

    def tensors(self, phi: Ints) -> Iterator[tuple[TensorSpec, Ints]]:
        """Every tensor with its values in a snapshot, flat: a view, or a copy if it is cut."""
        strips: dict[TensorSpec, dict[int, Ints]] = {}
        for fragment in self.fragments:
            for slot in fragment.slots:
                strips.setdefault(slot.spec, {})[slot.start] = phi[fragment.offset :][slot.span]
        for spec, parts in strips.items():
            values = [parts[start] for start in sorted(parts)]
            yield spec, values[0] if len(values) == 1 else np.concatenate(values)

    def of_round(self, round_: int) -> Fragment:
        """The fragment that a round concerns."""
        return self.fragments[round_ % len(self.fragments)]

    def trained_tokens(self, delta_tokens: int) -> int:
        """Tokens that were trained on, if deltas of all fragments state `delta_tokens` together.

        An inner step moves all fragments, and the next delta of each states its tokens: `F` times in all.
        """
        return delta_tokens // len(self.fragments)


def plan(tensors: Sequence[TensorSpec], fragments: int) -> Layout:
    """Distribute `tensors` over `fragments`, balanced by element count; the same on every node.

    With few or small tensors, fragments may stay empty.
    """
    share = -(-sum(tensor.numel for tensor in tensors) // fragments)
    longest = -(-share // STRIP) * STRIP
    strips = [
        (min(longest, tensor.numel - start), index, start)
        for index, tensor in enumerate(tensors)
        for start in range(0, tensor.numel, longest)
    ]
    loads = [(0, number) for number in range(fragments)]  # a heap
    chosen: list[list[tuple[int, int, int]]] = [[] for _ in range(fragments)]
    for numel, index, start in sorted(strips, key=lambda strip: (-strip[0], *strip[1:])):
        load, lightest = loads[0]
        heapreplace(loads, (load + numel, lightest))
        chosen[lightest].append((index, start, numel))
    built: list[Fragment] = []
    for number, members in enumerate(chosen):
        slots: list[Slot] = []
        offset = 0
        for index, start, numel in sorted(members):
            slots.append(Slot(tensors[index], offset, numel, start))
            offset += numel
        start = built[-1].offset + built[-1].numel if built else 0
        built.append(Fragment(number, tuple(slots), start, offset))
    return Layout(tuple(built))


def section_starts(codec: Codec, fragment: Fragment) -> list[int]:
    """The byte offsets at which the tensors' sections begin in a payload, and where the last one ends."""
    return list(accumulate((codec.section_bytes(slot.numel) for slot in fragment.slots), initial=0))


def payload_length(codec: Codec, fragment: Fragment) -> int:
    """The length in bytes of every payload of this fragment."""
    return section_starts(codec, fragment)[-1]


def length_in(round_: int, codec_name: str, layout: Layout) -> int:
    """`payload_length` for a round's fragment. Cached: every record is checked against it, and there may be
    thousands of tensors."""
    lengths = layout.payload_bytes.get(codec_name)
    if lengths is None:
        found = (payload_length(CODECS[codec_name], fragment) for fragment in layout.fragments)
        lengths = layout.payload_bytes[codec_name] = tuple(found)
    return lengths[layout.of_round(round_).index]


def encode_payload(codec_name: str, fragment: Fragment, tensors: Iterable[Ints]) -> bytes:
    """Encode the fragment's tensors (int32 fixed point, in its order) with the reference encoder."""
    codec = CODECS[codec_name]
    return b"".join(codec.encode(values) for _, values in zip(fragment.slots, tensors, strict=True))


class Section:
    """A tensor or strip of a payload: the bytes of its whole section (see `section_starts`), decoded as it is
    asked for. It and its methods raise PayloadError."""

    __slots__ = ("_codec", "_data", "numel")

    def __init__(self, codec_name: str, data: memoryview, numel: int) -> None:
        self._codec, self._data, self.numel = CODECS[codec_name], data, numel
        if len(data) != self._codec.section_bytes(numel):
            raise PayloadError(f"{codec_name}: a section of {len(data)} bytes for {numel} values")

    def __len__(self) -> int:
        """The length of the section in bytes."""
        return len(self._data)

    def decode(self, start: int = 0, stop: int | None = None) -> Ints:
        """See `Codec.decode`."""
        return self._codec.decode(self._data, self.numel, start, self.numel if stop is None else stop)

    def accumulate(self, start: int, factor: int, sums: Sums) -> None:
        """See `Codec.accumulate`."""
        self._codec.accumulate(self._data, self.numel, start, factor, sums)

    def survey(self, start: int, stop: int, sampling: slice) -> Survey:
        """See `Codec.survey`."""
        return self._codec.survey(self._data, self.numel, start, stop, sampling)


class Payload:
    """A payload cut into its sections, decoded on demand. Raises PayloadError if its length is wrong."""

    __slots__ = ("_codec_name", "_data", "_fragment", "_starts", "size")

    def __init__(self, codec_name: str, fragment: Fragment, data: bytes | memoryview) -> None:
        self._codec_name, self._fragment, self._data = codec_name, fragment, memoryview(data)
        self._starts = section_starts(CODECS[codec_name], fragment)
        self.size = len(data)
        if self.size != self._starts[-1]:
            raise PayloadError(f"a payload of {self.size} bytes, where its fragment takes {self._starts[-1]}")

    @property
    def tensors(self) -> int:
        """How many tensors the payload holds."""
        return len(self._fragment.slots)

    @property
    def numel(self) -> int:
        """How many values all tensors have together."""
        return self._fragment.numel

    def tensor(self, index: int) -> Ints:
        """Decode the fragment's tensor `index` as int32[numel]. Raises PayloadError."""
        return self.section(index).decode()

    def section(self, index: int) -> Section:
        """The fragment's tensor `index`, to be decoded in parts."""
        data = self._data[self._starts[index] : self._starts[index + 1]]
        return Section(self._codec_name, data, self._fragment.slots[index].numel)


def payload_chunk_bytes(total: int) -> int:
    """Size of the chunks of a payload of `total` bytes: a power of two, for about 64 chunks.

    A node can pass on a chunk only when it has all of it: what goes through many hands goes in small chunks.
    """
    size = limits.PAYLOAD_CHUNK_BYTES_MIN
    while size * limits.PAYLOAD_CHUNKS_AIM < total and size < CHUNK_BYTES_MAX:
        size *= 2
    return size


def split(data: memoryview | bytes, size: int = CHUNK_BYTES_MAX) -> Iterable[memoryview]:
    """Cut `data` into chunks of `size`, the last one shorter. No copies."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), size):
        yield view[start : start + size]


def split_payload(data: memoryview | bytes) -> Iterable[memoryview]:
    """Cut a payload into its chunks. No copies."""
    return split(data, payload_chunk_bytes(len(data)))


def chunk_hashes(data: memoryview | bytes, size: int = CHUNK_BYTES_MAX) -> tuple[bytes, ...]:
    """Return the SHA-256 of every chunk of `data`."""
    return tuple(sha256(chunk).digest() for chunk in split(data, size))


def root_of(hashes: Iterable[bytes]) -> bytes:
    """Return the root of a file with these chunk hashes."""
    return sha256(b"".join(hashes)).digest()


def chunk_sizes(total: int, size: int = CHUNK_BYTES_MAX) -> tuple[int, ...]:
    """Return the sizes in bytes of the chunks of a file of `total` bytes, cut every `size`."""
    whole, rest = divmod(total, size)
    return (size,) * whole + ((rest,) if rest else ())


def payload_chunk_sizes(total: int) -> tuple[int, ...]:
    """Return the sizes in bytes of the chunks of a payload of `total` bytes."""
    return chunk_sizes(total, payload_chunk_bytes(total))


def parse_index(index: bytes, total: int) -> tuple[bytes, ...]:
    """Read the chunk hashes of a file of `total` bytes from its index. Raises PayloadError if wrong."""
    if len(index) != HASH_BYTES * len(chunk_sizes(total)):
        raise PayloadError(f"an index of {len(index)} bytes does not describe a file of {total}")
    return tuple(index[i : i + HASH_BYTES] for i in range(0, len(index), HASH_BYTES))


LEVEL: Final = 1
"""The zstd level. Higher ones save 1 % more on codes, and take a third longer."""

WORTH_IT: Final = 0.95
"""A chunk that packs to more than this part of its size goes as it is: unpacking costs more than is saved."""


class Chunk(NamedTuple):
    """A chunk, and the zstd frame that it packs to."""

    data: bytes
    frame: bytes | None
    """None if the frame would hardly be smaller."""

    @property
    def as_it_travels(self) -> bytes:
        return self.data if self.frame is None else self.frame

    @classmethod
    def of(cls, data: bytes) -> "Chunk":
        """Pack a chunk: 1 MiB of `int4` takes 3 ms. Any thread."""
        return cls(data, pack_chunk(data))


def pack_chunk(chunk: bytes) -> bytes | None:
    """One zstd frame that states its content's size, or None if it is hardly smaller. Any thread."""
    try:
        frame = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress(chunk)
    except zstandard.ZstdError:  # any bytes can be packed: only memory can be lacking
        raise MemoryError from None
    return frame if len(frame) <= WORTH_IT * len(chunk) else None


def packed_size(frame: bytes) -> int:
    """The size in bytes that a frame states for its chunk. Raises PayloadError if none, or too large."""
    try:
        size: int = zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError:
        raise PayloadError("not a zstd frame") from None
    if not 0 < size <= CHUNK_BYTES_MAX:
        raise PayloadError("a zstd frame that does not say how long a chunk it holds")
    return size


def unpack_chunk(frame: bytes) -> bytes:
    """The chunk in a frame, unpacked in no more memory than it takes. Any thread. Raises PayloadError."""
    size = packed_size(frame)
    try:
        chunk: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise PayloadError("a damaged zstd frame") from None
    if len(chunk) != size:
        raise PayloadError("a zstd frame of another length than it says")
    return chunk
