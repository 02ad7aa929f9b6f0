"""What many tests of `protocol` build: identities, manifests, signed and unsigned deltas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from math import sqrt
from typing import Any

import numpy as np

from gossamer.protocol.access.acl import AccessList, Role, grant_body, revocation_body
from gossamer.protocol.context import Context
from gossamer.protocol.effects import Outbox
from gossamer.protocol.errors import PeerError
from gossamer.protocol.events import LinkUp
from gossamer.protocol.fixedpoint import Ints, sum_of_squares
from gossamer.protocol.identity import Identity
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import NodeInfo, Roster
from gossamer.protocol.merge.merge import Contribution, measure
from gossamer.protocol.payloads import (
    Fragment,
    Layout,
    Payload,
    TensorSpec,
    chunk_hashes,
    encode_payload,
    payload_chunk_bytes,
    plan,
)
from gossamer.protocol.records import (
    NO_RECORD,
    Delta,
    DeltaBody,
    MemberRecord,
    MemberRecordBody,
    RecordKind,
    open_envelope,
    parse_delta,
    parse_member_record,
    seal,
)
from gossamer.protocol.wire import is_printable

CREATED = 1_700_000_000
"""When the tests' swarms were created, in Unix seconds."""

TENSORS = (
    TensorSpec("wte", (40, 10), "mean"),
    TensorSpec("w", (300,), "rda"),
    TensorSpec("b", (7,), "mean"),
    TensorSpec("v", (3, 5), "rda"),
    TensorSpec("scale", (), "mean"),
)


@cache
def identity(number: int) -> Identity:
    """Key pair number `number`, always the same."""
    return Identity.from_seed(sha256(f"identity {number}".encode()).digest())


def one_rung(codec: str, **settings: object) -> dict[str, object]:
    """The outer section of a swarm with one codec."""
    of_rung = {key: settings.pop(key) for key in ("learning_rate", "ef_decay") if key in settings}
    return {"codecs": ({"name": codec, **of_rung},), **settings}


def manifest(
    tensors: tuple[TensorSpec, ...] = TENSORS, fragments: int = 2, name: str = "test", **sections: dict
) -> Manifest:
    """A small manifest; sections such as ``pace={...}`` replace the defaults."""
    return Manifest.model_validate(
        {
            "swarm": {"name": name, "created": CREATED},
            "task": {"name": "none"},
            "layout": {"fragments": fragments, "tensors": tensors},
            "genesis": {"digest": "00" * 32},
            "outer": one_rung("int8"),
            "pace": {"every_steps": 30, "contributors": 0},
            **sections,
        }
    )


SMALL = manifest()
LAYOUT = SMALL.plan()


def one_tensor(numel: int, averaging: str) -> Fragment:
    """A fragment that is one flat tensor."""
    return plan([TensorSpec("x", (numel,), averaging)], 1).fragments[0]


def several_tensors(sizes: Sequence[int]) -> Fragment:
    """A fragment of flat tensors."""
    return plan([TensorSpec(f"x{n}", (size,), "rda") for n, size in enumerate(sizes)], 1).fragments[0]


def random_tensors(rng: np.random.Generator, fragment: Fragment, magnitude: int) -> list[Ints]:
    """Values up to `magnitude` for every tensor of a fragment."""
    return [rng.integers(-magnitude, magnitude + 1, slot.numel).astype(np.int32) for slot in fragment.slots]


def norm(values: Ints) -> float:
    """The Euclidean norm, in fixed-point units."""
    return sqrt(sum_of_squares(values))


def body_of(payload: bytes, codec: str, round_: int, fragments: int, **changes: object) -> DeltaBody:
    """A delta body that describes a payload; the window is fresh (staleness 0) unless `changes` differ."""
    body = DeltaBody(
        round=round_,
        base=round_ - fragments,
        tokens=1000,
        steps=10,
        loss=2.5,
        codec=codec,
        payload_bytes=len(payload),
        chunks=chunk_hashes(payload, payload_chunk_bytes(len(payload))),
        previous=NO_RECORD,
    )
    return replace(body, **changes)


def signed(author: Identity, body: DeltaBody, of: Manifest = SMALL) -> Delta:
    """A delta as it comes off the wire: sealed, opened and parsed."""
    envelope = seal(author, RecordKind.DELTA, of.swarm_id, body.pack())
    return parse_delta(open_envelope(envelope.data, of.swarm_id), of.plan())


def random_delta(
    rng: np.random.Generator,
    author: Identity,
    round_: int,
    *,
    of: Manifest = SMALL,
    codec: str = "int8",
    magnitude: int = 1 << 14,
    **changes: object,
) -> tuple[Delta, bytes]:
    """A signed delta with a random payload, and that payload."""
    layout = of.plan()
    fragment = layout.of_round(round_)
    payload = encode_payload(codec, fragment, random_tensors(rng, fragment, magnitude))
    body = body_of(payload, codec, round_, len(layout.fragments), **changes)
    return signed(author, body, of), payload


def unsigned(author: int, round_: int, variant: int = 0, **changes: object) -> Delta:
    """An unsigned delta for tests of sets and schedules, where signatures would only cost time."""
    node_id = sha256(f"author {author}".encode()).digest()
    record_id = sha256(f"record {author} {round_} {variant}".encode()).digest()
    body = body_of(record_id, "int8", round_, 1, **changes)
    return Delta(record_id=record_id, author=node_id, body=body, data=b"envelope of " + record_id)


class Plain:
    """A delta's values for one tensor, without a codec: a `rules.base.Vector`."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.numel = values.size

    def decode(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.values[start:stop]

    def accumulate(self, start: int, factor: int, sums: np.ndarray) -> None:
        sums += self.decode(start, start + sums.size).astype(np.int64) * factor


def contribution(delta: Delta, payload: bytes, layout: Layout) -> Contribution:
    """A delta as Merge sees it. Raises PayloadError."""
    parsed = Payload(delta.body.codec, layout.of_round(delta.round), payload)
    return Contribution(
        author=delta.author,
        tokens=delta.body.tokens,
        steps=delta.body.steps,
        staleness=delta.staleness(len(layout.fragments)),
        norms=measure(parsed).norms,
        tensor=parsed.section,
        turn=delta.body.turn,
    )


OWNER = identity(900)
"""Owns the tests' invited swarms."""


def admission(mode: str = "invited", *owners: Identity) -> dict:
    """The manifest's section for a swarm of `OWNER`, or of others."""
    return {"mode": mode, "owners": [owner.public_key.hex() for owner in owners or (OWNER,)]}


def grant(
    node: Identity,
    of: Manifest,
    *,
    role: Role = Role.TRAIN,
    expires: int = 0,
    issued: int = 0,
    by: Identity = OWNER,
) -> bytes:
    """A grant's envelope."""
    return seal(by, RecordKind.GRANT, of.swarm_id, grant_body(node.node_id, role, issued, expires)).data


def revocation(
    node: Identity,
    of: Manifest,
    *,
    last_round: int = 0,
    reason: str = "",
    issued: int = 0,
    by: Identity = OWNER,
) -> bytes:
    """A revocation's envelope."""
    body = revocation_body(node.node_id, last_round, issued, reason)
    return seal(by, RecordKind.REVOCATION, of.swarm_id, body).data


def row(author: Identity, *, of: Manifest = SMALL, **changes: object) -> MemberRecord:
    """A signed row as it comes off the wire."""
    body = MemberRecordBody(
        incarnation=1,
        heartbeat=1,
        leaving=False,
        trains=True,
        addresses=(f"{author.node_id[:2].hex()}:7700",),
        fingerprint=b"",
        name="",
        device="cpu",
        version="0",
        round=0,
        inner_steps=0,
        tokens=0,
        tokens_per_s=0.0,
        loss=0.0,
    )
    envelope = seal(author, RecordKind.MEMBER, of.swarm_id, replace(body, **changes).pack())
    return parse_member_record(open_envelope(envelope.data, of.swarm_id))


@contextmanager
def refusing(kind: type[PeerError]) -> Iterator[None]:
    """The block may raise only `kind`, with a message that is fit for a log."""
    try:
        yield
    except kind as error:
        if not is_printable(str(error)):
            raise AssertionError(f"not for a log: {error!r}") from error


NOBODY = NodeInfo(name="", trains=True, incarnation=1)
"""What a node says of itself that has nothing to say, and was given no address."""


def context(own: int = 0, of: Manifest = SMALL, links: int = 0) -> Context:
    """What the machines of one node share; link n leads to node n."""
    me, rng, outbox = identity(own), random.Random(own + 1), Outbox()
    roster = Roster(me.node_id)
    known = Links(me.node_id, roster, NOBODY, rng, outbox)
    for number in range(1, links + 1):
        known.up(LinkUp(number, identity(number).node_id, True, None), 0.0)
    acl = AccessList(of.admission, of.swarm_id)
    return Context(me, of, NOBODY, acl, known, roster, Ledger(), rng, outbox)


class Drained:
    """A machine of the core; a method of it that returns nothing gives the effects that it appended."""

    def __init__(self, machine: Any, outbox: Outbox) -> None:
        self.machine = machine
        self._outbox = outbox

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.machine, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self._outbox.drain() if result is None else result

        return call


def turns_nobody_away(node_id: bytes, credential: bytes) -> None:
    """The `Vet` of an open swarm."""
