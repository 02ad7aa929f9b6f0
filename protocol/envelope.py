"""Signed envelopes: the only form in which a record travels.

Bytes on the wire: ``kind (1) | public key (32) | signature (64) | body``. The signature covers
``"gossamer/1" | kind | swarm id | public key | length of body (4, big endian) | body``, so that no bytes
signed for one purpose, swarm or author are valid for another. The record id is the SHA-256 of the signed
bytes. It leaves out the signature, since one message can have several valid ones.

A relayed envelope is never re-encoded: it is stored and passed on as it was received.
"""

from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

from gossamer.protocol.errors import MalformedError, UnsupportedError
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id_of, verify
from gossamer.protocol.limits import RECORD_BYTES_MAX

DOMAIN = b"gossamer/1"
HEADER_BYTES = 1 + PUBLIC_KEY_BYTES + SIGNATURE_BYTES


class Kind(IntEnum):
    """What a record is about; part of the signed bytes."""

    DELTA = 1
    ROW = 2
    GRANT = 3
    REVOCATION = 4


@dataclass(frozen=True, slots=True)
class Envelope:
    """A record whose signature holds. Build one with `seal` or `open_envelope` only."""

    kind: Kind
    author: bytes
    """Node id of the signer."""
    record_id: bytes
    body: bytes
    data: bytes
    """The exact bytes to store and relay."""


def _signed_bytes(kind: Kind, swarm_id: bytes, public_key: bytes, body: bytes) -> bytes:
    return b"".join((DOMAIN, bytes([kind]), swarm_id, public_key, len(body).to_bytes(4, "big"), body))


def seal(identity: Identity, kind: Kind, swarm_id: bytes, body: bytes) -> Envelope:
    """Sign `body` as a record of `kind` in the swarm."""
    signed = _signed_bytes(kind, swarm_id, identity.public_key, body)
    data = bytes([kind]) + identity.public_key + identity.sign(signed) + body
    if len(data) > RECORD_BYTES_MAX:
        raise ValueError(f"a record of {len(data)} bytes is over the limit of {RECORD_BYTES_MAX}")
    return Envelope(kind, identity.node_id, sha256(signed).digest(), body, data)


def open_envelope(data: bytes, swarm_id: bytes) -> Envelope:
    """Check length, kind and signature, in that order, before anyone looks at the body.

    Raises MalformedError or SignatureError.
    """
    if not HEADER_BYTES < len(data) <= RECORD_BYTES_MAX:
        raise MalformedError(f"an envelope of {len(data)} bytes")
    try:
        kind = Kind(data[0])
    except ValueError:
        raise UnsupportedError(f"unknown record kind {data[0]}") from None
    public_key = data[1 : 1 + PUBLIC_KEY_BYTES]
    signature = data[1 + PUBLIC_KEY_BYTES : HEADER_BYTES]
    body = data[HEADER_BYTES:]
    signed = _signed_bytes(kind, swarm_id, public_key, body)
    verify(public_key, signature, signed)
    return Envelope(kind, node_id_of(public_key), sha256(signed).digest(), body, data)
