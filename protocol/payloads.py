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
width, which NumPy and torch process at memory speed, and some codes come far more often than others. Of the
four bytes of a parameter the highest hardly vary, once its sign is in the lowest bit (*zigzag*). So a file of
int32 values is packed as four *planes*, all lowest bytes first: Phi to 0.66 of its size instead of 0.83, and
three times as fast. Chunks are hashed, signed for and merged unpacked. So what a release of a library makes
of odd input affects one transfer, and never a replica's bits.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapreplace
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple

import lz4.block
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

SAMPLE_PIECES, SAMPLE_PIECE_BYTES = 8, 2048
"""Of all parts of a chunk: enough to tell in which form the whole is smallest."""


class Packer(NamedTuple):
    """A library that makes bytes fewer. Any thread."""

    pack: Callable[[bytes], bytes]
    unpack: Callable[[memoryview, int], bytes]
    """The bytes in a frame that should hold so many; never makes more. Raises PayloadError."""


class Form(NamedTuple):
    """How a chunk is packed: by which packer, and whether in planes, as int32 values are."""

    packer: str
    has_planes: bool


def _zstd(data: bytes) -> bytes:
    try:
        return zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress(data)
    except zstandard.ZstdError:  # any bytes can be packed: only memory can be lacking
        raise MemoryError from None


def _unzstd(frame: memoryview, size: int) -> bytes:
    try:
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise PayloadError("a zstd frame of another length than its chunk")
        data: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError:
        raise PayloadError("a damaged zstd frame") from None
    return data


def _lz4(data: bytes) -> bytes:
    frame: bytes = lz4.block.compress(data, store_size=False)
    return frame


def _unlz4(frame: memoryview, size: int) -> bytes:
    try:
        data: bytes = lz4.block.decompress(frame, uncompressed_size=size)
    except lz4.block.LZ4BlockError:
        raise PayloadError("a damaged lz4 block") from None
    return data


PACKERS: Final = {"lz4": Packer(_lz4, _unlz4), "zstd": Packer(_zstd, _unzstd)}
"""By name, the one that packs least first."""

FORMS: Final = {1: Form("zstd", False), 2: Form("zstd", True), 3: Form("lz4", False), 4: Form("lz4", True)}
"""By the number that a packed chunk begins with."""

_NUMBERS = {form: number for number, form in FORMS.items()}
_HEADER_BYTES = 4
"""The number of the form, and in three bytes, the highest first, how many bytes the chunk has."""


class Chunk(NamedTuple):
    """A chunk, and what it packs to."""

    data: bytes
    frame: bytes | None
    """None if it would hardly be smaller."""

    @property
    def as_it_travels(self) -> bytes:
        return self.data if self.frame is None else self.frame


def pack_chunk(chunk: bytes, form: Form | None = None) -> bytes | None:
    """The chunk packed, None if hardly smaller: 1 MiB of `int4` takes 3 ms. Any thread.

    Without a `form`, that of zstd which makes a sample of the chunk smallest.
    """
    if form is None:
        ratios = packed_ratios(chunk, ("zstd",))
        if not ratios:
            return None
        form = min(ratios, key=ratios.__getitem__)
    body = _planes_of(chunk) if form.has_planes else chunk
    header = bytes([_NUMBERS[form]]) + len(chunk).to_bytes(_HEADER_BYTES - 1)
    frame = header + PACKERS[form.packer].pack(body)
    return frame if len(frame) <= WORTH_IT * len(chunk) else None


def packed_ratios(chunk: bytes, packers: Collection[str]) -> dict[Form, float]:
    """To what part of its size each form of these packers brings a sample, without those that hardly do."""
    sample = chunk
    if len(chunk) > SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        every = (len(chunk) - SAMPLE_PIECE_BYTES) // (SAMPLE_PIECES - 1) // 4 * 4
        places = range(0, SAMPLE_PIECES * every, every)
        sample = b"".join(chunk[place : place + SAMPLE_PIECE_BYTES] for place in places)
    forms = (form for form in FORMS.values() if form.packer in packers)
    frames = {form: pack_chunk(sample, form) for form in forms if not (form.has_planes and len(chunk) % 4)}
    return {form: len(frame) / len(sample) for form, frame in frames.items() if frame is not None}


def form_of(frame: bytes) -> Form:
    """The form of a packed chunk. Raises PayloadError, also if the length that it states cannot be."""
    form = FORMS.get(frame[0]) if len(frame) > _HEADER_BYTES else None
    if form is None:
        raise PayloadError("not a packed chunk")
    size = int.from_bytes(frame[1:_HEADER_BYTES])
    if not 0 < size <= CHUNK_BYTES_MAX or (form.has_planes and size % 4):
        raise PayloadError(f"a packed chunk of {size} bytes")
    return form


def packed_size(frame: bytes) -> int:
    """The size in bytes that a packed chunk states for its content. Raises PayloadError if none can be."""
    form_of(frame)
    return int.from_bytes(frame[1:_HEADER_BYTES])


def unpack_chunk(frame: bytes) -> bytes:
    """The chunk, unpacked in no more memory than a few times its size. Any thread. Raises PayloadError."""
    form, size = form_of(frame), packed_size(frame)
    data = PACKERS[form.packer].unpack(memoryview(frame)[_HEADER_BYTES:], size)
    if len(data) != size:
        raise PayloadError("a packed chunk of another length than it says")
    return _from_planes(data) if form.has_planes else data


def _planes_of(data: bytes) -> bytes:
    values = np.frombuffer(data, "<i4")
    zigzag = ((values << 1) ^ (values >> 31)).view("<u4")
    planes = np.empty((4, values.size), np.uint8)
    for place, plane in enumerate(planes):
        np.copyto(plane, zigzag >> 8 * place, casting="unsafe")
    return planes.tobytes()


def _from_planes(data: bytes) -> bytes:
    low, *higher = np.frombuffer(data, np.uint8).reshape(4, -1)
    zigzag = np.zeros(low.size, "<u4")
    for plane in (*reversed(higher), low):
        zigzag <<= 8
        zigzag |= plane
    return ((zigzag >> 1) ^ -(zigzag & 1)).tobytes()
