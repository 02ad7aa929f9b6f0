"""A signed question holds for one channel, one time and one thing; an answer shows whose channel it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.access.handshake import ASK_BYTES_MAX, ask, check_proof, check_question, prove
from gossamer.protocol.errors import MalformedError, PeerError, RefusedError, SignatureError
from gossamer.protocol.limits import ASK_FRESH_S, CREDENTIAL_BYTES_MAX
from tests.protocol.builders import identity

ASKER, NODE = identity(1), identity(2)
SWARM, CHANNEL, NONCE = b"s" * 32, b"c" * 32, b"n" * 32
NOW = 1_700_000_000.5
PATH = "/gossamer/1/status?digest=1"


def question(**changes) -> bytes:
    said = {"swarm_id": SWARM, "binding": CHANNEL, "unix_s": NOW, "path": PATH, "credential": b"grant"}
    return ask(ASKER, **{**said, **changes})


@pytest.mark.parametrize("credential", [b"", b"grant", bytes(CREDENTIAL_BYTES_MAX)])
def test_who_asks_and_what_it_shows(credential):
    data = question(credential=credential)
    assert len(data) <= ASK_BYTES_MAX
    found = check_question(data, SWARM, CHANNEL, NOW, PATH)
    assert (found.node_id, found.credential) == (ASKER.node_id, credential)


@pytest.mark.parametrize(
    "changes",
    [{"swarm_id": b"t" * 32}, {"binding": b"d" * 32}, {"binding": b""}, {"path": "/gossamer/1/manifest"}],
)
def test_it_holds_for_nothing_else(changes):
    with pytest.raises(SignatureError, match=f"to swarm {SWARM.hex()[:12]}, but another one was asked for"):
        check_question(question(**changes), SWARM, CHANNEL, NOW, PATH)


@pytest.mark.parametrize("off", [-1, 1])
def test_it_holds_for_some_minutes(off):
    check_question(question(), SWARM, CHANNEL, NOW + off * (ASK_FRESH_S - 1), PATH)
    with pytest.raises(RefusedError, match="clocks differ by 10 min; set"):
        check_question(question(), SWARM, CHANNEL, NOW + off * 600, PATH)


def test_a_proof_is_of_one_channel_and_one_nonce():
    proof = prove(NODE, CHANNEL, NONCE)
    assert check_proof(proof, CHANNEL, NONCE) == NODE.node_id
    for binding, nonce in ((b"d" * 32, NONCE), (CHANNEL, b"m" * 32), (b"", NONCE)):
        with pytest.raises(SignatureError):
            check_proof(proof, binding, nonce)


def test_a_question_is_no_proof_and_a_proof_no_question():
    with pytest.raises(PeerError):
        check_proof(question(), CHANNEL, NONCE)
    with pytest.raises(PeerError):
        check_question(prove(NODE, CHANNEL, NONCE), SWARM, CHANNEL, NOW, PATH)


@given(st.data())
def test_any_flipped_bit_is_found_but_in_the_credential(data):
    """The credential is signed by its owner, and judged by itself."""
    for message, check in (
        (question(credential=b""), lambda wrong: check_question(wrong, SWARM, CHANNEL, NOW, PATH)),
        (prove(NODE, CHANNEL, NONCE), lambda wrong: check_proof(wrong, CHANNEL, NONCE)),
    ):
        wrong = bytearray(message)
        bit = data.draw(st.integers(0, 8 * len(wrong) - 1))
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PeerError):
            check(bytes(wrong))


def test_messages_are_bounded():
    with pytest.raises(MalformedError):
        check_question(bytes(ASK_BYTES_MAX + 1), SWARM, CHANNEL, NOW, PATH)
    with pytest.raises(MalformedError):
        check_question(question(credential=bytes(CREDENTIAL_BYTES_MAX + 1)), SWARM, CHANNEL, NOW, PATH)
