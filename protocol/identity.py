"""Who a node is: an Ed25519 key pair, and the hash of its public half.

The node id is SHA-256 of the public key. Small-order public keys are refused, since a signature under
one can hold for many messages (Chalkias et al., "Taming the Many EdDSAs", 2020).
"""

from dataclasses import dataclass
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gossamer.protocol.errors import ConfigError, SignatureError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
NODE_ID_BYTES = 32

_P = 2**255 - 19
_ORDER_8_Y = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SMALL_ORDER_Y = frozenset({0, 1, _P - 1, _ORDER_8_Y, _P - _ORDER_8_Y, _P, _P + 1})
"""The y coordinates of the eight small-order points, and the two that have a second encoding."""


def node_id_of(public_key: bytes) -> bytes:
    """Return the 32-byte node id of a public key."""
    return sha256(public_key).digest()


def short(node_id: bytes) -> str:
    """A node id, record id or digest as people see it: its first 8 hex digits."""
    return node_id[:4].hex()


def has_small_order(public_key: bytes) -> bool:
    """Whether a 32-byte key encodes a point of order 1, 2, 4 or 8."""
    y = int.from_bytes(public_key, "little") & (2**255 - 1)
    return y in _SMALL_ORDER_Y


def verify(public_key: bytes, signature: bytes, message: bytes) -> None:
    """Raise SignatureError unless `signature` over `message` holds under `public_key`."""
    if len(public_key) != PUBLIC_KEY_BYTES or has_small_order(public_key):
        raise SignatureError("public key of small order or wrong length")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise SignatureError("signature does not hold") from None


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """A node's own key pair. Its repr shows the node id and never the secret."""

    _key: Ed25519PrivateKey
    public_key: bytes
    node_id: bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Build the key pair of a 32-byte secret seed.

        Raises ConfigError for any other length, and for zeros: a disk that has lost a file's content returns
        zeros in its place, and everybody would have that key.
        """
        if len(seed) != 32:
            raise ConfigError(f"a secret key has 32 bytes, this one has {len(seed)}")
        if not any(seed):
            raise ConfigError("a secret key is not 32 zeros")
        key = Ed25519PrivateKey.from_private_bytes(seed)
        public_key = key.public_key().public_bytes_raw()
        return cls(key, public_key, node_id_of(public_key))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"<Identity {short(self.node_id)}>"
