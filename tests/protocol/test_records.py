"""Bodies of records: every field bounded, and nothing but MalformedError for what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import MalformedError, PeerError, SignatureError
from gossamer.protocol.limits import RECORD_BYTES_MAX
from gossamer.protocol.payloads import TensorSpec, chunk_sizes, payload_length, plan
from gossamer.protocol.records import (
    DOMAIN,
    HEADER_BYTES,
    NO_RECORD,
    Claim,
    DeltaBody,
    MemberRecordBody,
    RecordKind,
    open_envelope,
    parse_delta,
    parse_member_record,
    seal,
)
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn
from gossamer.protocol.wire import pack, unpack
from tests.protocol import builders

ME = builders.identity(0)
SWARM = builders.SMALL.swarm_id
LAYOUT = builders.LAYOUT
F = len(LAYOUT.fragments)

GOOD = DeltaBody(
    round=7,
    base=5,
    tokens=1,
    steps=1,
    loss=1.0,
    codec="int8",
    payload_bytes=1,
    chunks=(bytes(32),),
    previous=NO_RECORD,
)
ROW = builders.row(ME).body


def _delta(body: DeltaBody | bytes, layout=LAYOUT):
    data = body if isinstance(body, bytes) else body.pack()
    return parse_delta(seal(ME, RecordKind.DELTA, SWARM, data), layout)


def _peer(body: MemberRecordBody | bytes):
    data = body if isinstance(body, bytes) else body.pack()
    return parse_member_record(seal(ME, RecordKind.MEMBER, SWARM, data))


@given(st.data())
def test_deltas_come_back(data):
    round_ = data.draw(st.integers(1, limits.ROUND_MAX))
    windows = data.draw(st.integers(1, 1 + (round_ - 1) // F))
    codec = data.draw(st.sampled_from(sorted(CODECS)))
    size = data.draw(st.integers(1, payload_length(CODECS[codec], LAYOUT.of_round(round_))))
    body = DeltaBody(
        round=round_,
        base=round_ - F * windows,
        tokens=data.draw(st.integers(1, limits.TOKENS_MAX)),
        steps=data.draw(st.integers(1, limits.STEPS_MAX)),
        loss=data.draw(st.floats(-limits.LOSS_MAX, limits.LOSS_MAX)),
        codec=codec,
        payload_bytes=size,
        chunks=tuple(data.draw(st.binary(min_size=32, max_size=32)) for _ in chunk_sizes(size)),
        previous=data.draw(st.binary(min_size=32, max_size=32)),
    )
    delta = _delta(body)
    assert delta.body == body
    assert delta.author == ME.node_id
    assert delta.staleness(F) == windows - 1


def test_a_delta_counts_only_in_its_authors_turn():
    """A tenth of 1,000 rounds are its; what it merged in between makes it no staler."""
    turn, taken = 10 * EVERY_ROUND, 0
    for round_ in range(10 * F, 10 * F + 1000):
        body = replace(GOOD, round=round_, base=round_ - 9 * F, turn=turn)
        if is_drawn(ME.node_id, round_, turn):
            assert _delta(body).staleness(F) == 0
            taken += 1
        else:
            with pytest.raises(MalformedError, match="turn"):
                _delta(body)
    assert 70 <= taken <= 130


@pytest.mark.parametrize(
    "changes",
    [
        {"turn": EVERY_ROUND - 1},
        {"turn": limits.TURN_MAX + 1},
        {"round": 0, "base": -2},
        {"round": limits.ROUND_MAX + 1, "base": limits.ROUND_MAX - 1},
        {"round": 7.0},
        {"base": 7},
        {"base": 4},  # of another fragment
        {"base": -1 - F},
        {"round": 2, "base": 1},
        {"tokens": 0},
        {"tokens": limits.TOKENS_MAX + 1},
        {"tokens": True},
        {"steps": 0},
        {"steps": limits.STEPS_MAX + 1},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"loss": 2e6},
        {"loss": 1},
        {"codec": "zip"},
        {"codec": b"int8"},
        {"codec": "x\n"},
        {"payload_bytes": 0},
        {"payload_bytes": 10**6},
        {"chunks": ()},
        {"chunks": (bytes(32), bytes(32))},
        {"chunks": (bytes(31),)},
        {"chunks": "x" * 32},
        {"previous": bytes(31)},
        {"previous": None},
    ],
    ids=str,
)
def test_deltas_out_of_bounds(changes):
    _delta(GOOD)
    with pytest.raises(MalformedError, match="delta: "):
        _delta(replace(GOOD, **changes))


@pytest.mark.parametrize(("parse", "body"), [(_delta, GOOD), (_peer, ROW)])
def test_truncated_and_extended_bodies(parse, body):
    packed = body.pack()
    assert parse(packed).body == body
    for cut in range(1, len(packed)):
        with pytest.raises(MalformedError):
            parse(packed[:cut])
    fields = unpack(packed, limits.RECORD_BYTES_MAX)
    with pytest.raises(MalformedError, match="not an array of"):
        parse(pack([*fields, None]))
    with pytest.raises(MalformedError, match="not an array of"):
        parse(pack(fields[:-1]))
    with pytest.raises(MalformedError):
        parse(packed + b"\xc0")


def test_kinds_are_not_confused():
    with pytest.raises(MalformedError, match="not a delta"):
        parse_delta(seal(ME, RecordKind.MEMBER, SWARM, ROW.pack()), LAYOUT)
    with pytest.raises(MalformedError, match="not a member record"):
        parse_member_record(seal(ME, RecordKind.DELTA, SWARM, GOOD.pack()))


def test_the_largest_delta_fits_in_an_envelope():
    """1 GiB of payload, all numbers at their largest."""
    layout = plan([TensorSpec("w", (2**28,), "rda")], 1)
    body = replace(
        GOOD,
        round=limits.ROUND_MAX,
        base=limits.ROUND_MAX - 1,
        tokens=limits.TOKENS_MAX,
        steps=limits.STEPS_MAX,
        codec="exact",
        payload_bytes=2**30,
        chunks=(b"\xff" * 32,) * limits.PAYLOAD_CHUNKS_MAX,
    )
    assert _delta(body, layout).body == body


def test_a_payload_beyond_the_chunk_limit_is_refused():
    layout = plan([TensorSpec("w", (2**29,), "rda")], 1)
    for chunks in (limits.PAYLOAD_CHUNKS_MAX, limits.PAYLOAD_CHUNKS_MAX + 1):
        body = replace(GOOD, base=6, codec="exact", payload_bytes=2**30 + 1, chunks=(bytes(32),) * chunks)
        with pytest.raises(MalformedError):
            _delta(body, layout)


CLAIM = Claim(16, 100, bytes(32), bytes(32))


@pytest.mark.parametrize(
    "changes",
    [
        {"incarnation": -1},
        {"incarnation": 2**53 + 1},
        {"heartbeat": 1.0},
        {"leaving": 0},
        {"trains": None},
        {"addresses": ("a:1",) * (limits.ADDRESSES_PER_PEER_MAX + 1)},
        {"addresses": ("a:1\n",)},
        {"addresses": "a:1"},
        {"addresses": ("x" * 257,)},
        {"name": "\x1b[31mred"},
        {"name": "x" * 257},
        {"device": b"cpu"},
        {"version": 1},
        {"round": -1},
        {"round": limits.ROUND_MAX + 1},
        {"inner_steps": -1},
        {"tokens": limits.OWN_TOKENS_MAX + 1},
        {"tokens_per_s": -0.1},
        {"tokens_per_s": float("inf")},
        {"loss": float("nan")},
        {"claims": (CLAIM, CLAIM)},
        {"claims": tuple(CLAIM._replace(round=round_) for round_ in range(limits.CLAIMS_MAX + 1))},
        {"dialled": (bytes(limits.LINK_PREFIX_BYTES),) * (limits.LINKS_STATED_MAX + 1)},
        {"dialled": (bytes(limits.LINK_PREFIX_BYTES + 1),)},
        {"fingerprint": bytes(31)},
        {"fingerprint": bytes(33)},
    ],
    ids=str,
)
def test_peer_rows_out_of_bounds(changes):
    _peer(ROW)
    with pytest.raises(MalformedError, match="member: |claim: "):
        _peer(replace(ROW, **changes))


@given(dialled=st.lists(st.binary(min_size=4, max_size=4), max_size=limits.LINKS_STATED_MAX))
def test_rows_come_back_with_the_links_they_tell(dialled):
    body = replace(ROW, dialled=tuple(dialled))
    assert _peer(body).body == body
    assert len(body.pack()) == len(ROW.pack()) + 4 * len(dialled)


# --- envelopes: what was signed, for this swarm, this kind and by this author, or nothing


@given(st.binary(min_size=1, max_size=500), st.sampled_from(list(RecordKind)))
def test_envelopes_come_back(body, kind):
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
    for wrong in (sealed[:cut], sealed + b"\x00", body):
        with pytest.raises(PeerError):
            open_envelope(wrong, SWARM)


OTHERS = builders.identity(1).public_key


@pytest.mark.parametrize(
    ("change", "swarm_id", "error"),
    [
        (lambda data: data, bytes(32), SignatureError),
        (lambda data: bytes([RecordKind.MEMBER]) + data[1:], SWARM, SignatureError),
        (lambda data: data[:1] + OTHERS + data[33:], SWARM, SignatureError),
        (lambda data: data[:1] + (1).to_bytes(32, "little") + data[33:], SWARM, SignatureError),
        (lambda data: bytes([5]) + data[1:], SWARM, MalformedError),
    ],
    ids=["another swarm", "another kind", "another author", "a key of small order", "an unknown kind"],
)
def test_an_envelope_of_something_else_is_refused(change, swarm_id, error):
    data = seal(ME, RecordKind.DELTA, SWARM, b"body").data
    with pytest.raises(error):
        open_envelope(change(data), swarm_id)


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


def test_envelopes_are_bounded():
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
