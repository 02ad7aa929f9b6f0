"""Envelopes: exactly what was signed, for this swarm, this kind and by this author, or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import MalformedError, PeerError
from gossamer.protocol.limits import RECORD_BYTES_MAX
from gossamer.protocol.records import DOMAIN, HEADER_BYTES, RecordKind, open_envelope, seal
from tests.protocol import builders

SWARM = bytes(range(32))
ME = builders.identity(0)


@given(st.binary(min_size=1, max_size=500), st.sampled_from(list(RecordKind)))
def test_round_trip(body, kind):
    sealed = seal(ME, kind, SWARM, body)
    assert open_envelope(sealed.data, SWARM) == sealed
    assert (sealed.kind, sealed.author, sealed.body) == (kind, ME.node_id, body)


@given(st.binary(min_size=1, max_size=60), st.data())
def test_any_flipped_bit_is_caught(body, data):
    sealed = bytearray(seal(ME, RecordKind.DELTA, SWARM, body).data)
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError):
        open_envelope(bytes(sealed), SWARM)


@given(st.binary(min_size=2, max_size=60), st.data())
def test_any_truncation_or_extension_is_caught(body, data):
    sealed = seal(ME, RecordKind.MEMBER, SWARM, body).data
    cut = data.draw(st.integers(0, len(sealed) - 1))
    for wrong in (sealed[:cut], sealed + b"\x00"):
        with pytest.raises(PeerError):
            open_envelope(wrong, SWARM)


@given(st.binary(max_size=300))
def test_random_bytes(data):
    with pytest.raises(PeerError):
        open_envelope(data, SWARM)


@pytest.mark.parametrize("kind", [0, 5, 255])
def test_unknown_kind(kind):
    sealed = seal(ME, RecordKind.DELTA, SWARM, b"body").data
    with pytest.raises(MalformedError, match=f"unknown record kind {kind}"):
        open_envelope(bytes([kind]) + sealed[1:], SWARM)


def test_record_id_leaves_the_signature_out_and_everything_else_in():
    ids = {
        seal(who, kind, swarm, body).record_id
        for who in (ME, builders.identity(1))
        for kind in RecordKind
        for swarm in (SWARM, bytes(32))
        for body in (b"a", b"b")
    }
    assert len(ids) == 2 * len(RecordKind) * 2 * 2
    assert (
        seal(ME, RecordKind.DELTA, SWARM, b"a").record_id == seal(ME, RecordKind.DELTA, SWARM, b"a").record_id
    )


def test_bounds():
    largest = seal(ME, RecordKind.DELTA, SWARM, bytes(RECORD_BYTES_MAX - HEADER_BYTES))
    assert len(largest.data) == RECORD_BYTES_MAX
    assert open_envelope(largest.data, SWARM) == largest
    with pytest.raises(ValueError, match="over the limit"):
        seal(ME, RecordKind.DELTA, SWARM, bytes(RECORD_BYTES_MAX - HEADER_BYTES + 1))
    for size in (0, HEADER_BYTES, RECORD_BYTES_MAX + 1):
        with pytest.raises(MalformedError, match=f"an envelope of {size} bytes"):
            open_envelope(bytes(size), SWARM)


def test_bytes_are_those_of_version_1():
    """A change here splits every swarm: it needs a new version."""
    sealed = seal(ME, RecordKind.DELTA, SWARM, b"body")
    signed = DOMAIN + b"\x01" + SWARM + ME.public_key + b"\x00\x00\x00\x04" + b"body"
    assert sealed.data == b"\x01" + ME.public_key + ME.sign(signed) + b"body"
