"""Keys: what holds, what does not, and which are no keys at all."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import ConfigError, SignatureError
from gossamer.protocol.identity import Identity, has_small_order, node_id_of, short, verify
from tests.protocol import builders

P = 2**255 - 19

# The eight points of small order and the non-canonical encodings of two of them, with either sign bit
# (as listed in libsodium's ge25519_has_small_order, and in "Taming the Many EdDSAs").
SMALL_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("sign_bit", [0, 0x80])
@pytest.mark.parametrize("encoded", SMALL_ORDER)
def test_small_order_keys_are_refused_even_where_the_signature_holds(encoded, sign_bit):
    key = bytearray.fromhex(encoded)
    key[31] |= sign_bit
    key = bytes(key)
    assert has_small_order(key)
    # R = identity, S = 0 "signs" anything under a key of order 1, and under the others one message in 8.
    forged = (1).to_bytes(32, "little") + bytes(32)
    for message in (b"", b"a", b"b", b"c"):
        with pytest.raises(SignatureError):
            verify(key, forged, message)


@given(st.binary(max_size=100))
def test_signature_holds_for_its_message_and_key_only(message):
    me, other = builders.identity(0), builders.identity(1)
    signature = me.sign(message)
    verify(me.public_key, signature, message)
    for key, sig, text in (
        (other.public_key, signature, message),
        (me.public_key, signature, message + b"x"),
        (me.public_key, bytes(64), message),
        (me.public_key, signature[:63], message),
        (me.public_key, signature + b"x", message),
        (me.public_key[:31], signature, message),
        (b"", signature, message),
    ):
        with pytest.raises(SignatureError):
            verify(key, sig, text)


def test_malleated_signature_is_refused():
    """S + L is the other number that satisfies the equation; a strict verifier takes the smaller only."""
    order = 2**252 + 27742317777372353535851937790883648493
    me = builders.identity(0)
    signature = me.sign(b"m")
    s = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(SignatureError):
        verify(me.public_key, signature[:32] + s.to_bytes(32, "little"), b"m")


def test_node_id_is_the_hash_of_the_public_key():
    me = builders.identity(3)
    assert me.node_id == node_id_of(me.public_key) == sha256(me.public_key).digest()


@pytest.mark.parametrize(
    ("seed", "why"),
    [(bytes(31), "31"), (bytes(64), "64"), (bytes(32), "32 zeros")],
    ids=["short", "long", "zeros"],
)
def test_seeds_that_are_nobodys(seed, why):
    with pytest.raises(ConfigError, match=why):
        Identity.from_seed(seed)


def test_repr_hides_the_secret():
    seed = bytes(range(32))
    me = Identity.from_seed(seed)
    assert repr(me) == f"<Identity {short(me.node_id)}>"
    assert seed.hex() not in repr(me)
