"""Nothing but MalformedError comes out of the parser, and nothing out of bounds gets through it."""

from __future__ import annotations

import math
import tracemalloc
from unittest.mock import Mock

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import MalformedError
from gossamer.protocol.limits import ARRAYS_MAX
from gossamer.protocol.wire import Fields, is_printable, pack, unpack

SCALARS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=40),
    st.text(max_size=40),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5), max_leaves=20)


@given(VALUES)
def test_what_is_packed_comes_back(value):
    assert unpack(pack(value), 10_000) == value


def test_a_lack_of_memory_is_not_taken_for_a_malformed_message(monkeypatch):
    """Whoever sent it would be blamed, and records on disk pass for those of another release."""
    monkeypatch.setattr(msgpack, "unpackb", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        unpack(pack([1]), 1000)


@given(VALUES, st.data())
def test_truncated_and_extended_values_are_malformed(value, data):
    packed = pack(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:cut], packed + b"\x00"):
        with pytest.raises(MalformedError):
            unpack(wrong, 10_000)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"a": 1}),
        msgpack.packb([{1: 2}]),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb([msgpack.Timestamp(0)]),
        b"\xc1",
        b"\xa1\xff",  # not UTF-8
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\x00\x10\x00\x00" * 2000,
        b"\x91" * 100_000,
        b"",
    ],
)
def test_maps_extensions_bombs_and_garbage_are_malformed(data):
    with pytest.raises(MalformedError):
        unpack(data, 1_000_000)


def test_size_limit():
    assert unpack(pack(b"x" * 8), 10) == b"x" * 8
    with pytest.raises(MalformedError, match="over the limit of 10"):
        unpack(pack(b"x" * 9), 10)


def _fields(*values: object) -> Fields:
    return Fields(list(values), "thing")


@pytest.mark.parametrize("value", [-1, 11, True, 1.0, "1", b"1", None, [1]])
def test_integer_refuses(value):
    with pytest.raises(MalformedError, match="thing: field n "):
        _fields(value).integer("n", 0, 10)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1, True, "1", 10.5, -0.5])
def test_number_refuses(value):
    with pytest.raises(MalformedError, match="field x"):
        _fields(value).number("x", 0.0, 10.0)


@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_boolean_refuses(value):
    with pytest.raises(MalformedError, match="field b"):
        _fields(value).boolean("b")


def test_text_is_the_same_to_every_python():
    """Tables of Unicode grow, and nodes with those of last year would not take the same revocations."""
    newer = "\U0001fa77 \U0003ffff"  # a character since 2022, and none yet
    assert _fields(newer).text("t") == newer
    every = map(chr, range(0x110000))
    assert all(is_printable(c) for c in every if c.isprintable()), "whatever this Python's tables are"


@pytest.mark.parametrize(
    "value", ["a\nb", "\x1b[31m", "x" * 257, "é" * 129, b"x", "\u202e", "é\xa0", "\ue000", 1]
)
def test_text_refuses_what_a_terminal_should_not_see(value):
    with pytest.raises(MalformedError, match="field t"):
        _fields(value).text("t")
    with pytest.raises(MalformedError, match="field t"):
        _fields([value]).texts("t", 3)


@pytest.mark.parametrize("value", [b"12", b"1234", "123", bytearray(b"123"), None])
def test_blob_refuses(value):
    with pytest.raises(MalformedError, match="field b"):
        _fields(value).blob("b", 3)


def test_array_limits_and_contents():
    assert _fields([b"ab", b"cd"]).blobs("bs", 2, 2) == (b"ab", b"cd")
    for wrong in ([b"ab"] * 3, [b"abc"], b"ab", (b"ab",)):
        with pytest.raises(MalformedError, match="field bs"):
            _fields(wrong).blobs("bs", 2, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_arrays_are_bounded_however_they_are_arranged(nested):
    """They cost 64 times in memory what they do on the wire."""
    most = [[]] * (ARRAYS_MAX - 1)
    if nested:
        most = [most[:2000], most[: ARRAYS_MAX - 2003]]
    assert unpack(pack(most), 10_000) == most
    with pytest.raises(MalformedError, match="not msgpack"):
        unpack(pack([*most, []]), 10_000)


def test_arrays_that_claim_more_than_there_is_take_no_memory():
    """At each level there was a list of the claimed length before any of its items."""
    bomb = b"\xdd\x00\x00\x10\x00" * 1000
    assert len(bomb) > 0x1000, "each for itself could be what it claims"
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            unpack(bomb, 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
