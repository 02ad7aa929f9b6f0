"""Fuzz targets that decide who is let in: credentials, questions, proofs, invitations, contacts."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.node.address import parse_contact
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
from gossamer.protocol.errors import ConfigError, RefusedError
from gossamer.protocol.records import HEADER_BYTES, RecordKind, seal
from gossamer.protocol.wire import is_printable
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.target import Target
from tests.protocol import builders
from tests.protocol.builders import OWNER, identity

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
