"""What goes over the wire, byte for byte. (Tests of their own pin envelopes, manifests, codecs and merging.)

A release that writes or reads any of this in another way does not understand those before, and takes their
honest nodes for liars. So what fails here needs a new `PROTOCOL_VERSION`, with a line in the changelog,
unless it has been raised since the last release. Then the digest may be written anew.
"""

from __future__ import annotations

from hashlib import sha256

from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import Invitation, Role, grant_body, parse_grant, revocation_body
from gossamer.protocol.access.handshake import ClientHandshake, ServerHandshake, ask, prove
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.history.claims import chain, round_digest
from gossamer.protocol.payloads import (
    chunk_sizes,
    payload_chunk_bytes,
    payload_length,
    plan,
    root_of,
    unpack_chunk,
)
from gossamer.protocol.records import Claim, DeltaBody, MemberRecordBody, RecordKind, seal
from tests.protocol import builders

ALICE, BOB = builders.identity(1), builders.identity(2)
SWARM, CHANNEL, NONCE = b"s" * 32, b"c" * 32, b"n" * 32
A, B = b"a" * 32, b"b" * 32
ENVELOPE = bytes(range(128))

MESSAGES = (
    msg.Records(((ENVELOPE, True), (ENVELOPE, False))),
    msg.Have((A, B)),
    msg.Digest(1, ((16, A), (32, B)), True, 7),
    msg.RecordIds(((5, (A,)), (6, (A, B)))),
    msg.GetRecords((A, B)),
    msg.RosterSummary(((A, 3, 4), (B, 5, 6)), True),
    msg.Ping(300),
    msg.Ack(70_000),
    msg.PingFor(8, A),
    msg.Suspect(A, 9, 10),
    msg.Want(A),
    msg.Decline(B),
    msg.AclSummary(A, (A, B), True),
    msg.HaveChunks(A, (0, 3, 64)),
    msg.NewDelta(ENVELOPE, b"chunk"),
)


def digest(*parts: bytes) -> str:
    """Of the parts and where they end."""
    return sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()[:16]


def test_messages():
    assert [type(message) for message in MESSAGES] == list(msg.KINDS)
    assert digest(*map(msg.encode, MESSAGES)) == "8e2a4398686d174d"


def test_the_hello():
    server = ServerHandshake(ALICE, SWARM, CHANNEL, NONCE, A, credential=b"1", vet=builders.turns_nobody_away)
    client = ClientHandshake(BOB, SWARM, CHANNEL, B, None, credential=b"2", vet=builders.turns_nobody_away)
    challenge = server.challenge()
    hello = client.hello(challenge)
    _, welcome = server.answer(hello)
    assert digest(challenge, hello, welcome) == "bdf9978ca3c99509"


def test_questions_and_proofs():
    question = ask(ALICE, SWARM, CHANNEL, 1_700_000_000.0, "/gossamer/1/status", b"grant")
    assert digest(question, prove(ALICE, CHANNEL, NONCE)) == "3912847a2baf6e74"


def test_the_bodies_of_records():
    delta = DeltaBody(
        round=70,
        base=66,
        tokens=1000,
        steps=30,
        loss=2.5,
        codec="int4",
        payload_bytes=5,
        chunks=(A,),
        previous=B,
    )
    row = MemberRecordBody(
        incarnation=2**41,
        heartbeat=3,
        leaving=False,
        trains=True,
        addresses=("a:1",),
        fingerprint=A,
        name="é",
        device="cpu",
        version="1",
        round=70,
        inner_steps=2100,
        tokens=70_000,
        tokens_per_s=1.5,
        loss=2.5,
        claims=(Claim(64, 64_000, A, B),),
        dialled=(b"12345678",),
    )
    grant = grant_body(BOB.node_id, Role.TRAIN, 1_700_000_000, 0)
    revocation = revocation_body(BOB.node_id, 70, 1_700_000_000, "lies")
    assert digest(delta.pack(), row.pack(), grant, revocation) == "74a1144b1996629c"


def test_invitations():
    grant = seal(ALICE, RecordKind.GRANT, SWARM, grant_body(BOB.node_id, Role.TRAIN, 1_700_000_000, 0))
    assert digest(Invitation(SWARM, parse_grant(grant), ("a:1",)).to_text().encode()) == "7aa5337e468abd21"


def test_claims_and_roots():
    merged = round_digest([B, A])
    assert digest(merged, chain(bytes(32), 70, merged), root_of([A, B])) == "7b9b1038f8739569"


def test_how_files_and_payloads_are_cut():
    """The sizes of chunks, and of payloads; where each tensor lies."""
    sizes = [(n, payload_chunk_bytes(n), *chunk_sizes(n)) for n in (1, 2**18, 2**24 + 1, 2**26, 2**30)]
    slots = [[(s.spec.name, s.span) for s in f.slots] for f in plan(builders.TENSORS, 3).fragments]
    lengths = [
        (name, payload_length(codec, fragment))
        for name, codec in sorted(CODECS.items())
        for fragment in builders.LAYOUT.fragments
    ]
    assert digest(repr(sizes).encode(), repr(slots).encode(), repr(lengths).encode()) == "47ffea729e1379a7"


def test_packed_chunks_are_read():
    """What the library packs a chunk to may change, and what it unpacks may not."""
    frame = bytes.fromhex("0100000d28b52ffd200d69000068656c6c6f2c20737761726d21")
    assert unpack_chunk(frame) == b"hello, swarm!"
    planes = bytes.fromhex("0200000828b52ffd200841000005e0002200020000")
    assert unpack_chunk(bytes.fromhex("0300000dd068656c6c6f2c20737761726d21")) == b"hello, swarm!"
    assert unpack_chunk(planes) == bytes.fromhex("fdffffff70110100"), "int32: -3 and 70,000"
