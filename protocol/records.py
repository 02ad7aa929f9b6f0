"""The bodies of records: what a delta says of itself, and what a node says of itself.

Bodies are positional msgpack. `parse_*` checks every field. Its result can be used without further checks,
except for what only the whole set can show (equivocation), or only the time (plausibility of a round).
"""

from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Annotated, Any, NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.blocks import claim
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id_of, verify
from gossamer.protocol.limits import RECORD_BYTES_MAX
from gossamer.protocol.payloads import HASH_BYTES, Layout, length_in, payload_chunk_sizes
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn, share
from gossamer.protocol.wire import array, blob, boolean, integer, number, pack, read, text, unpack, values

# --- Signed envelopes: the only form in which a record travels.
#
# Bytes on the wire: ``kind (1) | public key (32) | signature (64) | body``. The signature covers
# ``"gossamer/1" | kind | swarm id | public key | length of body (4, big endian) | body``, so that no bytes
# signed for one purpose, swarm or author are valid for another. The record id is the SHA-256 of the signed
# bytes. It leaves out the signature, since one message can have several valid ones.
#
# A relayed envelope is never re-encoded: it is stored and passed on as it was received.

DOMAIN = b"gossamer/1"
HEADER_BYTES = 1 + PUBLIC_KEY_BYTES + SIGNATURE_BYTES


class RecordKind(IntEnum):
    """What a record is about; part of the signed bytes."""

    DELTA = 1
    MEMBER = 2
    GRANT = 3
    REVOCATION = 4


@dataclass(frozen=True, slots=True)
class Envelope:
    """A record whose signature holds. Build one with `seal` or `open_envelope` only."""

    kind: RecordKind
    author: bytes
    """Node id of the signer."""
    record_id: bytes
    body: bytes
    data: bytes
    """The exact bytes to store and relay."""


def _signed_bytes(kind: RecordKind, swarm_id: bytes, public_key: bytes, body: bytes) -> bytes:
    return b"".join((DOMAIN, bytes([kind]), swarm_id, public_key, len(body).to_bytes(4, "big"), body))


def seal(identity: Identity, kind: RecordKind, swarm_id: bytes, body: bytes) -> Envelope:
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
        kind = RecordKind(data[0])
    except ValueError:
        raise MalformedError(f"unknown record kind {data[0]}") from None
    public_key = data[1 : 1 + PUBLIC_KEY_BYTES]
    signature = data[1 + PUBLIC_KEY_BYTES : HEADER_BYTES]
    body = data[HEADER_BYTES:]
    signed = _signed_bytes(kind, swarm_id, public_key, body)
    verify(public_key, signature, signed)
    return Envelope(kind, node_id_of(public_key), sha256(signed).digest(), body, data)


NO_RECORD = bytes(32)
"""Stands for "no earlier delta" in `Delta.previous`."""

_Hash = Annotated[bytes, blob(HASH_BYTES)]
_Counter = Annotated[int, integer(0, limits.COUNTER_MAX)]
_Text = Annotated[str, text()]
_Loss = Annotated[float, number(-limits.LOSS_MAX, limits.LOSS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBody:
    """One node's contribution to one round, without author and signature."""

    round: Annotated[int, integer(1, limits.ROUND_MAX)]
    base: Annotated[int, integer(1 - limits.FRAGMENTS_MAX, limits.ROUND_MAX)]
    """The round up to which the author had merged this fragment when its window began; negative before
    the first."""
    tokens: Annotated[int, integer(1, limits.TOKENS_MAX)]
    steps: Annotated[int, integer(1, limits.STEPS_MAX)]
    loss: _Loss
    """Mean training loss over the window, in the task's own unit (nats per token for text)."""
    codec: _Text
    payload_bytes: Annotated[int, integer(1, limits.PAYLOAD_CHUNKS_MAX * limits.CHUNK_BYTES_MAX)]
    chunks: Annotated[tuple[bytes, ...], array(blob(HASH_BYTES), limits.PAYLOAD_CHUNKS_MAX)]
    previous: _Hash
    """Record id of the author's delta before this one, or NO_RECORD."""
    took: Annotated[int, integer(0, limits.WINDOW_MS_MAX)] = 0
    """Milliseconds since the author's delta of this fragment before this one; 0 for the first of a run."""
    late: Annotated[int, integer(0, limits.WINDOW_MS_MAX)] = 0
    """After how many of these the author had merged half of the others' deltas for the round of that one."""
    agreement: Annotated[int, integer(-1000, 1000)] = 0
    """Mean cosine of that round's deltas as the author has merged them, in thousandths."""
    epoch: Annotated[int, integer(0, limits.EPOCH_MAX)] = 0
    """The epoch of the data that `blocks` are of."""
    blocks: Annotated[bytes, claim] = b""
    """The blocks that the author has trained on, and not claimed before, see `history.data_claims`."""
    turn: Annotated[int, integer(EVERY_ROUND, limits.TURN_MAX)] = EVERY_ROUND
    """How often the author contributes, as it knows the pace; see `sampling.is_drawn`."""

    def pack(self) -> bytes:
        return pack(values(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A verified delta record."""

    record_id: bytes
    author: bytes
    body: DeltaBody
    data: bytes
    """The envelope's exact bytes."""

    @property
    def round(self) -> int:
        return self.body.round

    def staleness(self, fragments: int) -> int:
        """How many times this fragment was merged during the window, beside what is usual where members take
        turns."""
        return share((self.body.round - self.body.base) // fragments - 1, self.body.turn)


def parse_delta(envelope: Envelope, layout: Layout) -> Delta:
    """Check a delta's body against the layout it must fit. Raises MalformedError."""
    if envelope.kind is not RecordKind.DELTA:
        raise MalformedError("not a delta")
    body = read(DeltaBody, unpack(envelope.body, limits.RECORD_BYTES_MAX), "delta")
    fragments = len(layout.fragments)
    if not 1 - fragments <= body.base <= body.round - fragments or (body.round - body.base) % fragments:
        raise MalformedError("delta: base is not an earlier round of the same fragment")
    if body.late > body.took:
        raise MalformedError("delta: later than its window was long")
    if body.epoch > body.round:
        raise MalformedError("delta: claims an epoch that cannot have begun")
    if not is_drawn(envelope.author, body.round, body.turn):
        raise MalformedError("delta: not its author's turn")
    if body.codec not in CODECS:
        raise MalformedError(f"delta: unknown codec {body.codec!r}")
    if body.payload_bytes > length_in(body.round, body.codec, layout):
        raise MalformedError("delta: a payload longer than its fragment makes it")
    if len(body.chunks) != len(payload_chunk_sizes(body.payload_bytes)):
        raise MalformedError("delta: number of chunks does not fit the payload size")
    return Delta(record_id=envelope.record_id, author=envelope.author, body=body, data=envelope.data)


class Claim(NamedTuple):
    """A member's signed word on its snapshot. The greater of two claims for one round wins."""

    round: Annotated[int, integer(0, limits.ROUND_MAX)]
    tokens: Annotated[int, integer(0, limits.TOKENS_TOTAL_MAX)]
    """Tokens of all deltas merged up to the round, as `merge.TokenCount` counts them."""
    digest: _Hash
    """Chain over the rounds' digests of merged records, see `history.claims`."""
    root: _Hash
    """Root of the snapshot's bytes, see `payloads`: of Phi, and of the sums of the averaged model."""

    @property
    def key(self) -> bytes:
        """The key that the snapshot's chunks are wanted under: no delta's id, whatever root a liar gives."""
        return b"snapshot" + self.root


Claims = tuple[Claim, ...]
"""The claims of one member, newest first and all different."""


def _fingerprint(value: Any) -> bytes:
    return b"" if value == b"" else bytes(blob(HASH_BYTES)(value))


def _prefixes(value: Any) -> tuple[bytes, ...]:
    size = limits.LINK_PREFIX_BYTES
    joined = blob(0, limits.LINKS_STATED_MAX * size)(value)
    if len(joined) % size:
        raise ValueError(f"is not a multiple of {size} bytes")
    return tuple(joined[at : at + size] for at in range(0, len(joined), size))


def _claims(value: Any) -> Claims:
    claims: Claims = array(lambda item: read(Claim, item, "claim"), limits.CLAIMS_MAX)(value)
    if len(set(claims)) != len(claims):  # each is a vote, and nobody has two
        raise ValueError("has one twice")
    return claims


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecordBody:
    """What a node says of itself. Only its author writes it; the newest one wins."""

    incarnation: _Counter
    """Grows with every start of the node: milliseconds of Unix time, or one more than the last."""
    heartbeat: _Counter
    leaving: Annotated[bool, boolean]
    trains: Annotated[bool, boolean]
    addresses: Annotated[tuple[str, ...], array(text(), limits.ADDRESSES_PER_PEER_MAX)]
    """``host:port`` where the node may be dialled; empty for one that can only dial out."""
    fingerprint: Annotated[bytes, _fingerprint]
    """SHA-256 of the node's TLS certificate, 32 bytes; empty without TLS."""
    name: _Text
    device: _Text
    version: _Text
    round: Annotated[int, integer(0, limits.ROUND_MAX)]
    """The last round that the node has published since it started or came back; 0 before the first."""
    inner_steps: _Counter
    tokens: Annotated[int, integer(0, limits.OWN_TOKENS_MAX)]
    tokens_per_s: Annotated[float, number(0.0, limits.TOKENS_PER_S_MAX)]
    loss: _Loss
    claims: Annotated[tuple[Claim, ...], _claims] = ()
    """The snapshots that the node holds, newest first: what it attests of the sealed past, and can serve."""
    dialled: Annotated[tuple[bytes, ...], _prefixes] = ()
    """The first 4 bytes of the id of each node to which this one has dialled a link: for displays, and to
    know which member to ask about which. Each link is reported by one of its ends only."""

    @property
    def age(self) -> tuple[int, int]:
        """Orders the records of one author."""
        return (self.incarnation, self.heartbeat)

    def pack(self) -> bytes:
        return pack([*values(self)[:-1], b"".join(self.dialled)])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A verified member record."""

    node_id: bytes
    body: MemberRecordBody
    data: bytes


def parse_member_record(envelope: Envelope) -> MemberRecord:
    """Check a member record's body. Raises MalformedError."""
    if envelope.kind is not RecordKind.MEMBER:
        raise MalformedError("not a member record")
    body = read(MemberRecordBody, unpack(envelope.body, limits.RECORD_BYTES_MAX), "member")
    return MemberRecord(node_id=envelope.author, body=body, data=envelope.data)
