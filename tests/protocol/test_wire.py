"""Nothing but MalformedError comes out of the parser, and nothing out of bounds gets through it."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import make_dataclass
from typing import Annotated
from unittest.mock import Mock

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import MalformedError
from gossamer.protocol.limits import ARRAYS_MAX
from gossamer.protocol.wire import (
    array,
    blob,
    boolean,
    integer,
    is_printable,
    number,
    pack,
    read,
    row,
    take,
    text,
    unpack,
)

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


REFUSED = {
    "integer": (integer(0, 10), [-1, 11, True, 1.0, "1", b"1", None, [1]]),
    "number": (number(0.0, 10.0), [math.nan, math.inf, -math.inf, 1, True, "1", 10.5, -0.5]),
    "boolean": (boolean, [0, 1, None, "true"]),
    "blob": (blob(3), [b"12", b"1234", "123", bytearray(b"123"), None]),
    "text": (
        text(),  # nothing that a terminal should not see
        ["a\nb", "\x1b[31m", "x" * 257, "é" * 129, b"x", "\u202e", "é\xa0", "\ue000", 1],
    ),
    "array": (array(blob(2), 2), [[b"ab"] * 3, [b"abc"], b"ab", (b"ab",)]),
    "row": (row(boolean, blob(2)), [[True], [True, b"ab", 1], [b"ab", True], True, None]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_field_may_not_be_is_refused_by_its_name(name):
    check, wrong = REFUSED[name]
    kind = make_dataclass("Kind", [("x", Annotated[object, check])])
    for value in wrong:
        with pytest.raises(MalformedError, match="thing: field x "):
            read(kind, [value], "thing")
        with pytest.raises(MalformedError, match="thing: "):
            take([value], "thing", check)


def test_fields_come_back_as_they_are_and_none_is_left_over():
    checks = (array(blob(2), 2), row(boolean, integer(0, 1)))
    assert take([[b"ab", b"cd"], [True, 1]], "thing", *checks) == ((b"ab", b"cd"), (True, 1))
    kind = make_dataclass("Kind", [("x", Annotated[bool, boolean])])
    assert read(kind, [True], "thing") == kind(True)
    for wrong in ([], [True, True], True, None):
        with pytest.raises(MalformedError, match="thing: not an array of 1 fields"):
            read(kind, wrong, "thing")


def test_text_is_the_same_to_every_python():
    """Tables of Unicode grow, and nodes with those of last year would not take the same revocations."""
    newer = "\U0001fa77 \U0003ffff"  # a character since 2022, and none yet
    assert text()(newer) == newer
    every = map(chr, range(0x110000))
    assert all(is_printable(c) for c in every if c.isprintable()), "whatever this Python's tables are"


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
