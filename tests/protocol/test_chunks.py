"""Chunks: sizes, hashes and roots; what is packed comes back, and no more than a chunk is ever unpacked."""

from __future__ import annotations

from hashlib import sha256
from unittest.mock import Mock

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX, PAYLOAD_CHUNKS_MAX
from gossamer.protocol.payloads import (
    WORTH_IT,
    chunk_hashes,
    chunk_sizes,
    pack_chunk,
    packed_size,
    parse_index,
    payload_chunk_bytes,
    payload_chunk_sizes,
    root_of,
    split,
    unpack_chunk,
)

MIB = CHUNK_BYTES_MAX


@pytest.mark.parametrize("total", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_sizes_agree_with_what_is_cut(total):
    data = bytes(total)
    chunks = list(split(data))
    assert tuple(len(chunk) for chunk in chunks) == chunk_sizes(total)
    assert b"".join(chunks) == data
    assert chunk_hashes(data) == tuple(sha256(chunk).digest() for chunk in chunks)


@pytest.mark.parametrize(
    ("total", "size"),
    [
        (0, MIB // 4),
        (MIB // 4 * 64, MIB // 4),
        (MIB // 4 * 64 + 1, MIB // 2),
        (20 * MIB, MIB // 2),
        (1024 * MIB, MIB),
    ],
)
def test_payloads_are_cut_finer_than_files(total, size):
    assert payload_chunk_bytes(total) == size
    sizes = payload_chunk_sizes(total)
    assert sum(sizes) == total
    assert len(sizes) <= (64 if size < MIB else PAYLOAD_CHUNKS_MAX)


def test_index_of_a_file():
    data = bytes(2 * MIB) + b"rest"
    hashes = chunk_hashes(data)
    index = b"".join(hashes)
    assert parse_index(index, len(data)) == hashes
    assert root_of(hashes) == sha256(index).digest()
    for wrong, total in ((index[:-1], len(data)), (index + bytes(32), len(data)), (index, 4 * MIB), (b"", 1)):
        with pytest.raises(PayloadError, match="does not describe"):
            parse_index(wrong, total)


# --- packing


@given(piece=st.binary(max_size=200), times=st.integers(1, 300))
def test_what_comes_back_is_what_went_in(piece: bytes, times: int) -> None:
    chunk = piece * times
    frame = pack_chunk(chunk)
    if frame is None:
        return
    assert len(frame) <= WORTH_IT * len(chunk)
    assert packed_size(frame) == len(chunk)
    assert unpack_chunk(frame) == chunk


def test_what_hardly_gets_smaller_is_not_packed(rng) -> None:  # type: ignore[no-untyped-def]
    assert pack_chunk(rng.bytes(97_000) + bytes(3_000)) is None
    assert pack_chunk(rng.bytes(90_000) + bytes(10_000)) is not None


def test_a_lack_of_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library raises an error of its own for it, as for a damaged frame."""
    fails = Mock(side_effect=zstandard.ZstdError("cannot compress: Allocation error : not enough memory"))
    monkeypatch.setattr(zstandard, "ZstdCompressor", Mock(return_value=Mock(compress=fails)))
    with pytest.raises(MemoryError):
        pack_chunk(bytes(1000))


@given(changed=st.binary(min_size=1, max_size=4), place=st.integers(0, 10_000), cut=st.integers(0, 10_000))
def test_a_damaged_frame_is_refused_or_holds_as_much_as_it_says(changed: bytes, place: int, cut: int) -> None:
    frame = pack_chunk(bytes(range(256)) * 20 + bytes(3000)) or b""
    place, cut = place % len(frame), cut % len(frame)
    for wrong in (frame[:place] + changed + frame[place + len(changed) :], frame[:cut]):
        try:
            chunk = unpack_chunk(wrong)
        except PayloadError:
            continue
        assert len(chunk) == packed_size(wrong) <= CHUNK_BYTES_MAX


def _claiming(size: int) -> bytes:
    """A frame that says it holds so many zeros, and does."""
    return zstandard.ZstdCompressor(1).compress(bytes(size))


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = _claiming(CHUNK_BYTES_MAX + 1)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("it was unpacked"))
    for read in (packed_size, unpack_chunk):
        with pytest.raises(PayloadError, match="how long"):
            read(bomb)


def test_a_frame_that_does_not_tell_its_length_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(1, write_content_size=False).compressobj()
    frame = compressor.compress(bytes(1000)) + compressor.flush()
    with pytest.raises(PayloadError, match="how long"):
        unpack_chunk(frame)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        _claiming(0),
        _claiming(1000)[:-1],
        _claiming(1000) + b"x",
        _claiming(1000) * 2,
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + _claiming(1000),
    ],
    ids=["nothing", "magic only", "empty", "cut", "trailing byte", "two frames", "skippable frame"],
)
def test_one_whole_frame_and_nothing_else(wrong: bytes) -> None:
    with pytest.raises(PayloadError):
        unpack_chunk(wrong)
