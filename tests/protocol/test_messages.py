"""Messages: each comes back as it was, and nothing else gets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.records import HEADER_BYTES
from gossamer.protocol.wire import pack, unpack

RANGES = limits.COMPARED_PARENTS_MAX * limits.RANGE_FANOUT

HASH = st.binary(min_size=32, max_size=32)
HASHES = st.lists(HASH, max_size=5).map(tuple)
NUMBER = st.integers(0, 2**53)
ROUND = st.integers(0, limits.ROUND_MAX)
ENVELOPE = st.binary(min_size=HEADER_BYTES, max_size=300)

MESSAGES = {
    "Records": st.builds(msg.Records, st.lists(st.tuples(ENVELOPE, st.booleans()), max_size=4).map(tuple)),
    "Have": st.builds(msg.Have, HASHES),
    "Digest": st.builds(
        msg.Digest,
        st.integers(0, limits.RANGE_LEVEL_MAX),
        st.lists(st.tuples(ROUND, HASH), max_size=5).map(tuple),
        st.booleans(),
    ),
    "RecordIds": st.builds(msg.RecordIds, st.lists(st.tuples(ROUND, HASHES), max_size=4).map(tuple)),
    "GetRecords": st.builds(msg.GetRecords, HASHES),
    "RosterSummary": st.builds(
        msg.RosterSummary, st.lists(st.tuples(HASH, NUMBER, NUMBER), max_size=5).map(tuple), st.booleans()
    ),
    "Ping": st.builds(msg.Ping, NUMBER),
    "Ack": st.builds(msg.Ack, NUMBER),
    "PingFor": st.builds(msg.PingFor, NUMBER, HASH),
    "Suspect": st.builds(msg.Suspect, HASH, NUMBER, NUMBER),
    "Want": st.builds(msg.Want, HASH),
    "Decline": st.builds(msg.Decline, HASH),
    "AclSummary": st.builds(msg.AclSummary, HASH, HASHES, st.booleans()),
    "HaveChunks": st.builds(
        msg.HaveChunks, HASH, st.lists(st.integers(0, limits.PAYLOAD_CHUNKS_MAX - 1), max_size=9).map(tuple)
    ),
    "NewDelta": st.builds(msg.NewDelta, ENVELOPE, st.binary(min_size=1, max_size=99)),
}
ANY = st.one_of(*MESSAGES.values())


def test_no_kind_is_forgotten_here():
    assert set(MESSAGES) == {kind.__name__ for kind in msg.KINDS}


@pytest.mark.parametrize("kind", sorted(MESSAGES))
@given(data=st.data())
def test_every_kind_comes_back(kind, data):
    message = data.draw(MESSAGES[kind])
    packed = msg.encode(message)
    assert msg.decode(packed) == message
    assert msg.encode(msg.decode(packed)) == packed


@given(ANY, st.data())
def test_truncated_and_extended_messages(message, data):
    packed = msg.encode(message)
    cut = data.draw(st.integers(0, len(packed) - 1))
    longer = pack([*unpack(packed, 10**7), 0])
    shorter = pack(unpack(packed, 10**7)[:-1])
    for wrong in (packed[:cut], packed + b"\xc0", longer, shorter):
        with pytest.raises(MalformedError):
            msg.decode(wrong)


H = bytes(32)
E = bytes(HEADER_BYTES)
WRONG = [
    (0,),
    (13,),
    (255, 1),
    (b"\x01", []),
    (True, [[E, True]]),
    (1, [[E[:-1], True]]),
    (1, [["x" * HEADER_BYTES, True]]),
    (1, [[bytes(limits.RECORD_BYTES_MAX + 1), True]]),
    (1, [[E, 1]]),
    (1, [[E, True, 0]]),
    (1, [E]),
    (1, [[E, True]] * (limits.RECORDS_PER_MESSAGE_MAX + 1)),
    (2, [H[:-1]]),
    (2, [H] * (limits.IDS_PER_MESSAGE_MAX + 1)),
    (3, limits.RANGE_LEVEL_MAX + 1, [], False),
    (3, -1, [], False),
    (3, 0, [[0, H[:-1]]], False),
    (3, 0, [[limits.ROUND_MAX + 1, H]], False),
    (3, 0, [[-1, H]], False),
    (3, 0, [[0, H]] * (RANGES + 1), False),
    (3, 0, [], 0),
    (4, [[0, [H[:-1]]]]),
    (4, [[0, [H] * (limits.IDS_PER_ROUND_MAX + 1)]]),
    (4, [[0, []]] * (RANGES + 1)),
    (5, [H] * (limits.IDS_PER_MESSAGE_MAX + 1)),
    (6, [[H, -1, 0]], False),
    (6, [[H, 0, 2**53 + 1]], False),
    (6, [[H, 0, 0]] * (limits.MEMBERS_MAX + 1), False),
    (7, -1),
    (7, 1.0),
    (8, 2**53 + 1),
    (9, 1, H[:-1]),
    (10, H, 0),
    (11, None),
    (12, H + b"x"),
    (14, H, [limits.PAYLOAD_CHUNKS_MAX]),
    (14, H, [-1]),
    (14, H, [True]),
    (14, H, [0] * (limits.PAYLOAD_CHUNKS_MAX + 1)),
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda f: f"{f[0]!r}-{str(f[1:])[:25]}")
def test_what_is_out_of_bounds(fields):
    with pytest.raises(MalformedError):
        msg.decode(pack(list(fields)))


NUMBERS = (2**53, 2**53)
LARGEST = [
    msg.Records(((b"\xff" * limits.RECORD_BYTES_MAX, True),) * limits.RECORDS_PER_MESSAGE_MAX),
    msg.Have((b"\xff" * 32,) * limits.IDS_PER_MESSAGE_MAX),
    msg.Digest(
        limits.RANGE_LEVEL_MAX,
        ((limits.ROUND_MAX, b"\xff" * 32),) * (RANGES),
        whole=True,
    ),
    msg.GetRecords((b"\xff" * 32,) * limits.IDS_PER_MESSAGE_MAX),
    msg.HaveChunks(b"\xff" * 32, (limits.PAYLOAD_CHUNKS_MAX - 1,) * limits.PAYLOAD_CHUNKS_MAX),
    msg.NewDelta(b"\xff" * limits.RECORD_BYTES_MAX, b"\xff" * limits.SENT_ALONG_BYTES_MAX),
    msg.RosterSummary(((b"\xff" * 32, *NUMBERS),) * limits.MEMBERS_MAX, answer=True),
    # What anti-entropy puts into an Inventory at most: it stops at the round that fills it.
    msg.RecordIds(
        (
            *((limits.ROUND_MAX, ()) for _ in range(RANGES - 2)),
            (limits.ROUND_MAX, (b"\xff" * 32,) * (limits.IDS_PER_MESSAGE_MAX - 1)),
            (limits.ROUND_MAX, (b"\xff" * 32,) * limits.IDS_PER_ROUND_MAX),
        )
    ),
]


@pytest.mark.parametrize("message", LARGEST, ids=lambda m: type(m).__name__)
def test_the_largest_message_of_each_kind_fits(message):
    packed = msg.encode(message)
    assert len(packed) <= limits.MESSAGE_BYTES_MAX
    assert len(packed) <= limits.SEND_QUEUE_BYTES_MAX
    assert msg.decode(packed) == message
