"""A payload: one fragment's delta, encoded tensor by tensor.

Sections lie one after another in the fragment's order, so that a merge can go tensor by tensor in bounded
memory, and never holds a whole decoded delta.
"""

from collections.abc import Iterable
from itertools import accumulate

from gossamer.protocol.codecs import CODECS, Codec
from gossamer.protocol.codecs.base import Sums, Survey
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.payloads.layout import Fragment, Layout, Slot


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
    """One tensor of a payload, decoded as it is asked for. Its methods raise PayloadError."""

    __slots__ = ("_codec", "_data", "numel")

    def __init__(self, codec: Codec, data: memoryview, numel: int) -> None:
        self._codec = codec
        self._data = data
        self.numel = numel

    def __len__(self) -> int:
        """The length of the section in bytes."""
        return len(self._data)

    def decode(self, start: int = 0, stop: int | None = None) -> Ints:
        """See `Codec.decode`."""
        return self._codec.decode(self._data, self.numel, start, stop)

    def accumulate(self, start: int, factor: int, sums: Sums) -> None:
        """See `Codec.accumulate`."""
        self._codec.accumulate(self._data, self.numel, start, factor, sums)

    def survey(self, start: int, stop: int, sampling: slice) -> Survey:
        """See `Codec.survey`."""
        return self._codec.survey(self._data, self.numel, start, stop, sampling)


def section_of(codec_name: str, slot: Slot, data: memoryview) -> Section:
    """One tensor, from the bytes of its whole section (see `section_starts`)."""
    return Section(CODECS[codec_name], data, slot.numel)


class Payload:
    """A payload cut into its sections, decoded on demand. Raises PayloadError if its length is wrong."""

    __slots__ = ("_codec", "_data", "_fragment", "_starts", "size")

    def __init__(self, codec_name: str, fragment: Fragment, data: bytes | memoryview) -> None:
        self._codec = CODECS[codec_name]
        self._fragment = fragment
        self._data = memoryview(data)
        self._starts = section_starts(self._codec, fragment)
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
        return Section(self._codec, data, self._fragment.slots[index].numel)
