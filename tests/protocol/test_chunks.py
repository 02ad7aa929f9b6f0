"""Content addressing: sizes, hashes and roots, and any flipped bit found."""

from __future__ import annotations

from hashlib import sha256

import pytest

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX, PAYLOAD_CHUNKS_MAX
from gossamer.protocol.payloads.chunks import (
    chunk_hashes,
    chunk_sizes,
    parse_index,
    payload_chunk_bytes,
    payload_chunk_sizes,
    root_of,
    split,
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
