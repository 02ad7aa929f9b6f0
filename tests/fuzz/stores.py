"""Fuzz targets for what decides who is let in, and for what `node` reads: the trainer's socket, addresses,
other nodes' answers, snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np

from gossamer.node.address import format_address, parse_address, parse_contact
from gossamer.node.daemon.network.rpc import parse_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.node.ipc import messages as control
from gossamer.protocol import limits
from gossamer.protocol.access.acl import (
    AccessList,
    Grant,
    Invitation,
    Revocation,
    Role,
    grant_body,
    parse_grant,
    read_invitation,
    revocation_body,
)
from gossamer.protocol.access.handshake import ask, check_proof, check_question, prove
from gossamer.protocol.errors import ConfigError, GossamerError, LocalError, RefusedError
from gossamer.protocol.payloads import chunk_hashes, chunk_sizes
from gossamer.protocol.records import HEADER_BYTES, Claim, RecordKind, seal
from gossamer.protocol.wire import is_printable
from tests.fuzz.forge import blobs_from, forge
from tests.fuzz.mutate import mutate_bytes, mutate_packed, mutate_value
from tests.fuzz.target import Target
from tests.protocol import builders
from tests.protocol.builders import OWNER, identity


def _control(data: bytes) -> Iterator[None]:
    length = control.frame_length(data[: control.LENGTH_BYTES])
    body = data[control.LENGTH_BYTES :][:length]
    message = control.decode(body)
    yield
    assert type(message) in control._KINDS.values()


def _control_seeds() -> list[bytes]:
    dice = Random(1)
    kinds = [*control._KINDS.values()] * 4
    found = [control.encode(forge(kind, dice, blobs_from([bytes(32)]))) for kind in kinds]
    return [*found, b"\xff" * 8, b""]


def _mutate_frame(data: bytes, dice: Random) -> bytes:
    if dice.randrange(6) == 0:
        return mutate_bytes(data, dice)
    body = mutate_packed(data[control.LENGTH_BYTES :], dice)
    return len(body).to_bytes(control.LENGTH_BYTES, "big") + body


# --- addresses and status ----------------------------------------------------------------------------


def _address(data: bytes) -> Iterator[None]:
    text = data.decode("utf-8", "surrogateescape")
    if ":" in text:
        yield
    try:
        host, port = parse_address(text)
    except LocalError as error:
        raise LocalError(ascii(str(error))) from None
    yield
    yield
    assert 1 <= port <= 65535
    assert host.isascii()
    host.encode("idna")  # as a look-up does
    assert parse_address(format_address(host, port)) == (host, port)


def _address_seeds() -> list[bytes]:
    good = (
        "127.0.0.1:7700",
        "[::1]:1",
        "[fe80::1%eth0]:80",
        "[fe80::1%eth0.7]:80",
        "a-b.example:65535",
        "localhost:07700",
        "host.:1",
    )
    return [text.encode() for text in (*good, "[::1]", "a:b:c", "１:1", "a:" + "9" * 5000, "a." * 200 + ":1")]


def _status(data: bytes) -> Iterator[None]:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        pass
    else:
        yield
    status = parse_status("host:1", data)
    assert {"swarm_id", "node_id"} <= status.keys()


def _status_seeds() -> list[bytes]:
    status = {
        "swarm_id": "00" * 32,
        "node_id": "11" * 32,
        "members": [{"name": "x", "loss": 1.5}],
        "round": 3,
    }
    return [
        json.dumps(status).encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff\xfe{\0",
        b"NaN",
    ]


def _mutate_json(data: bytes, dice: Random) -> bytes:
    if dice.randrange(3) == 0:
        return mutate_bytes(data, dice)
    try:
        return json.dumps(mutate_value(json.loads(data), dice), default=repr).encode()[:200_000]
    except (ValueError, RecursionError, TypeError):
        return mutate_bytes(data, dice)


# --- snapshots ---------------------------------------------------------------------------------------

NUMEL = 2**18 + 100
"""A little more than one whole chunk."""

INDEX_BYTES = 2 * 32


class _Chunks(dict[bytes, bytes]):
    """A chunk store in memory."""

    def get(self, blob: bytes) -> bytes:  # type: ignore[override]
        if blob not in self:
            raise MissingChunkError(blob)
        return self[blob]

    def fits(self, blob: bytes, size: int) -> bool | None:
        return len(self[blob]) == size if blob in self else None


@cache
def _blobs() -> dict[bytes, bytes]:
    """Chunks that are there already: those of a snapshot, its index, and payloads of all sizes."""
    phi = np.arange(NUMEL, dtype="<i4").tobytes()
    index = b"".join(chunk_hashes(phi))
    pieces = [phi[: 2**20], phi[2**20 :], index, b"", b"x", bytes(400), bytes(2**20), bytes(401)]
    return {sha256(piece).digest(): piece for piece in pieces}


def _snapshot(data: bytes) -> Iterator[None]:
    chunks: Any = _Chunks(_blobs())
    claim = Claim(int(len(data) > INDEX_BYTES), 0, bytes(32), sha256(data).digest())
    chunks[claim.root] = data
    lacking = snapshots.missing(claim, 4 * NUMEL, chunks)
    yield
    assert all(size in (*chunk_sizes(4 * NUMEL), INDEX_BYTES) for _, size in lacking)
    phi = snapshots.load(claim, NUMEL, chunks)
    yield
    assert phi.shape == (NUMEL,)
    assert b"".join(chunk_hashes(phi.tobytes())) == data[:INDEX_BYTES]


def _snapshot_seeds() -> list[bytes]:
    """Of the first model, and of later ones, which lists the averaged model's sums too."""
    first, second, *_ = found = list(_blobs())
    later = [first + second + snapshots.SUMS * other for other in found]
    return [first + other for other in found] + later + [b"".join(found), b""]


STORES = [
    Target("control", _control, _control_seeds, mutate=_mutate_frame),
    Target("address", _address, _address_seeds, errors=LocalError, mutate=mutate_bytes),
    Target("status", _status, _status_seeds, errors=LocalError, mutate=_mutate_json),
    Target("snapshot", _snapshot, _snapshot_seeds, errors=GossamerError, mutate=mutate_bytes, share=0.3),
]


# --- who is let in: credentials, questions, proofs, invitations, contacts ---

INVITED = builders.manifest(admission=builders.admission())
NODE = identity(1)
SWARM = INVITED.swarm_id
NOW = 1_800_000_000
BODY_BYTES_MAX = limits.CREDENTIAL_BYTES_MAX - HEADER_BYTES


def _credential(data: bytes) -> Iterator[None]:
    """The first byte chooses the kind; the rest is a body, which an owner really signs."""
    kind = RecordKind.GRANT if data[:1] < b"\x80" else RecordKind.REVOCATION
    acl = AccessList(INVITED.admission, SWARM)
    yield
    record = acl.learn(seal(OWNER, kind, SWARM, data[1 : 1 + BODY_BYTES_MAX]).data)
    yield
    assert record is not None and acl.ids() == (record.record_id,)
    assert all(len(reason) <= limits.TEXT_BYTES_MAX and is_printable(reason) for reason in _said(acl, record))


def _said(acl: AccessList, record: Grant | Revocation) -> Iterator[str]:
    """The reason for which the node that a record is about is turned away, if it is."""
    try:
        acl.vet(record.node_id, NOW)
    except RefusedError as error:
        yield str(error)


def _credential_seeds() -> list[bytes]:
    return [
        b"\x00" + grant_body(NODE.node_id, Role.TRAIN, NOW, NOW + 86400),
        b"\x00" + grant_body(NODE.node_id, Role.OBSERVE, NOW, 0),
        b"\xff" + revocation_body(NODE.node_id, 7, NOW, "key stolen"),
    ]


def _question(data: bytes) -> Iterator[None]:
    yield
    question = check_question(data, SWARM, b"f" * 32, NOW, "/gossamer/1/status")
    yield
    assert question.node_id == NODE.node_id


def _question_seeds() -> list[bytes]:
    return [ask(NODE, SWARM, b"f" * 32, NOW, "/gossamer/1/status", shown) for shown in (b"", b"c" * 300)]


def _proof(data: bytes) -> Iterator[None]:
    yield
    assert check_proof(data, b"f" * 32, b"n" * 32) == NODE.node_id
    yield


def _invitation(data: bytes) -> Iterator[None]:
    text = data.decode("utf-8", "replace")
    yield
    invitation = read_invitation(text)
    yield
    assert read_invitation(invitation.to_text()) == invitation


def _invitation_seeds() -> list[bytes]:
    grant = parse_grant(seal(OWNER, RecordKind.GRANT, SWARM, grant_body(NODE.node_id, Role.TRAIN, NOW, 0)))
    contacts: tuple[tuple[str, ...], ...] = ((), (f"gossamer://{'ab' * 32}@host:7700", "10.0.0.1:1"))
    return [Invitation(SWARM, grant, several).to_text().encode() for several in contacts]


def _contact(data: bytes) -> Iterator[None]:
    text = data.decode("utf-8", "replace")
    yield
    try:
        contact = parse_contact(text)
    except ConfigError as error:
        raise ConfigError(ascii(str(error))) from None
    yield
    assert parse_contact(str(contact)) == contact


def _contact_seeds() -> list[bytes]:
    return [f"gossamer://{'ab' * 32}@host:7700".encode(), b"gossamer://host:7700", b"[::1]:7700"]


ADMITTANCE = [
    Target("credential", _credential, _credential_seeds, mutate=mutate_bytes, share=0.5),
    Target("question", _question, _question_seeds, mutate=mutate_bytes, share=0.5),
    Target(
        "proof",
        _proof,
        lambda: [prove(NODE, b"f" * 32, b"n" * 32)],
        mutate=mutate_bytes,
        share=0.25,
    ),
    Target("invitation", _invitation, _invitation_seeds, errors=ConfigError, mutate=mutate_bytes, share=0.5),
    Target("contact", _contact, _contact_seeds, errors=ConfigError, mutate=mutate_bytes, share=0.5),
]
