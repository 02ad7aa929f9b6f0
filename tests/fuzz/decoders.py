"""The protocol's decoders as fuzz targets, driven by the tables of codecs, messages and record kinds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np

from gossamer.protocol import limits, records, wire
from gossamer.protocol import messages as msg
from gossamer.protocol.access.handshake import HELLO_BYTES_MAX, ClientHandshake, ServerHandshake, refusal
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError, MalformedError, PeerError, SignatureError
from gossamer.protocol.fixedpoint import VALUE_LIMIT
from gossamer.protocol.manifest import from_canonical, from_toml
from gossamer.protocol.merge.merge import RoundMerge
from gossamer.protocol.payloads import (
    FORMS,
    Payload,
    TensorSpec,
    chunk_sizes,
    encode_payload,
    form_of,
    pack_chunk,
    packed_size,
    parse_index,
    plan,
    unpack_chunk,
)
from gossamer.protocol.records import HEADER_BYTES, Claim, RecordKind, open_envelope, seal
from gossamer.protocol.wire import is_printable, pack, unpack
from tests.fuzz.forge import blobs_from, conforms, forge
from tests.fuzz.mutate import mutate_bytes, mutate_packed
from tests.fuzz.target import Run, Target
from tests.protocol import builders
from tests.protocol.builders import turns_nobody_away

SWARM = builders.SMALL.swarm_id
KEYS = [builders.identity(number) for number in range(4)]
BODY_BYTES_MAX = limits.RECORD_BYTES_MAX - HEADER_BYTES
LISTS = limits.MESSAGE_BYTES_MAX - 6
"""How many empty arrays fit into one message."""


# --- msgpack and fields ------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return type(value) is str and is_printable(value) and len(value.encode()) <= limits.TEXT_BYTES_MAX


def _is_id(value: Any) -> bool:
    return type(value) is bytes and len(value) == 32


CHECKS: dict[str, tuple[wire.Check, Callable[[Any], bool]]] = {
    "integer": (
        wire.integer(0, limits.ROUND_MAX),
        lambda value: type(value) is int and 0 <= value <= limits.ROUND_MAX,
    ),
    "boolean": (wire.boolean, lambda value: type(value) is bool),
    "number": (
        wire.number(-limits.LOSS_MAX, limits.LOSS_MAX),
        lambda value: type(value) is float and abs(value) <= limits.LOSS_MAX,
    ),
    "blob": (wire.blob(32), _is_id),
    "text": (wire.text(), _is_text),
    "array": (wire.array(wire.blob(32), 1024), lambda value: len(value) <= 1024 and all(map(_is_id, value))),
}
"""By kind of field: how it is read, and a check of the value read."""


def _wire(data: bytes) -> Iterator[None]:
    value = unpack(data, limits.MESSAGE_BYTES_MAX)
    yield
    for item in value[:50] if isinstance(value, list) else [value]:
        for what, (check, fits) in CHECKS.items():
            with suppress(ValueError):
                taken = check(item)
                assert fits(taken), f"took {taken!r} for {what}"
    if not isinstance(value, list):
        raise MalformedError("not an array")


def _wire_seeds() -> list[bytes]:
    values = [[1, -1, 2**63, 0.5, b"x" * 32, "text", True, None, [b"y" * 32] * 3, ["a:1"]], [], [False]]
    deep = b"\x91" * 100 + b"\xc0"
    return [*(pack(value) for value in values), deep]


def _wide(items: int) -> list[bytes]:
    """Arrays of as many small values as there is room for."""
    begin = b"\xdd" + items.to_bytes(4, "big")
    fills = (b"\x90", b"\x80", b"\xc7\x00\x05", b"\xc0", b"\xa2ab", b"\xcb" + b"\x01" * 8)
    counts = [items // len(fill) for fill in fills]
    arrays = [b"\xdd" + n.to_bytes(4, "big") + fill * n for n, fill in zip(counts, fills, strict=True)]
    return [*arrays, begin, begin * 511, b"\x91" * items]


# --- messages ----------------------------------------------------------------------------------------


def _messages(data: bytes) -> Iterator[None]:
    unpack(data, limits.MESSAGE_BYTES_MAX)
    yield
    message = msg.decode(data)
    yield
    assert conforms(message, type(message))
    assert msg.decode(msg.encode(message)) == message


def _envelopes() -> list[bytes]:
    return [seal(KEYS[0], RecordKind(seed[0]), SWARM, seed[1:]).data for seed in record_seeds()[:12]]


def message_seeds() -> list[bytes]:
    """Forged messages of all kinds, as far as they decode, and some of the largest possible size."""
    dice = Random(1)
    found: list[bytes] = []
    for kind in msg.KINDS:
        for blobs in (blobs_from([bytes(32), KEYS[0].node_id]), blobs_from(_envelopes())):
            for _ in range(30):
                try:
                    data = msg.encode(forge(kind, dice, blobs))
                    msg.decode(data)
                except (PeerError, OverflowError):
                    continue
                found.append(data)
    return sorted(set(found))


def _message_giants() -> list[bytes]:
    rounds = (msg._COMPARED_MAX * limits.IDS_PER_ROUND_MAX, LISTS // 34)
    ids = (bytes(32),) * (min(rounds) // msg._COMPARED_MAX)
    record = (b"x" * limits.RECORD_BYTES_MAX, True)
    found = [
        msg.Records((record,) * limits.RECORDS_PER_MESSAGE_MAX),
        msg.RosterSummary(tuple((bytes(32), n, n) for n in range(limits.MEMBERS_MAX)), False),
        msg.RecordIds(tuple((n, ids) for n in range(msg._COMPARED_MAX))),
        msg.RecordIds(((1, (bytes(32),) * limits.IDS_PER_ROUND_MAX),)),
    ]
    return [msg.encode(message) for message in found] + _wide(LISTS)


# --- envelopes and records ---------------------------------------------------------------------------


def _envelope(data: bytes) -> Iterator[None]:
    try:
        envelope = open_envelope(data, SWARM)
    except SignatureError:
        yield
        raise
    assert envelope.data == data
    yield


def record_seeds() -> list[bytes]:
    """Bodies of records, each preceded by a byte that states its kind."""
    rng = np.random.default_rng(1)
    delta, _ = builders.random_delta(rng, KEYS[0], 2)
    body = delta.body
    claims = tuple(Claim(n, n, bytes(32), bytes(32)) for n in range(limits.CLAIMS_MAX))
    web = {"addresses": ("a:1", "[::1]:2"), "dialled": (b"abcd",) * 3}
    row = builders.row(KEYS[0], claims=claims, name="name", **web)
    bodies = [
        (RecordKind.DELTA, body.pack()),
        (RecordKind.MEMBER, row.body.pack()),
        (RecordKind.MEMBER, builders.row(KEYS[1]).body.pack()),
    ]
    for codec in CODECS:
        other, _ = builders.random_delta(rng, KEYS[0], 3, codec=codec)
        bodies.append((RecordKind.DELTA, other.body.pack()))
    bodies += [(kind, pack([1, 0.5, b"x" * 32, "text", True, []])) for kind in RecordKind]
    return [bytes([kind]) + packed for kind, packed in bodies]


def mutate_record(data: bytes, dice: Random) -> bytes:
    """Change the body, and now and then the kind."""
    kind = dice.choice(list(RecordKind)) if dice.randrange(20) == 0 else (data[0] if data else 1)
    return bytes([kind]) + mutate_packed(data[1:], dice)


def _records(data: bytes) -> Iterator[None]:
    """Signs its input with a real key: hostile bodies come from members that can sign them."""
    kind = RecordKind(data[0]) if data and data[0] in list(RecordKind) else RecordKind.DELTA
    sealed = seal(KEYS[len(data) % len(KEYS)], kind, SWARM, data[1:BODY_BYTES_MAX] or b"\xc0")
    envelope = open_envelope(sealed.data, SWARM)
    yield
    parse = getattr(records, f"parse_{kind.name.lower()}", None)
    if parse is None:
        return
    takes_layout = "layout" in inspect.signature(parse).parameters
    record = parse(envelope, builders.LAYOUT) if takes_layout else parse(envelope)
    yield
    again = open_envelope(seal(KEYS[0], kind, SWARM, record.body.pack()).data, SWARM)
    body = (parse(again, builders.LAYOUT) if takes_layout else parse(again)).body
    assert body == record.body
    assert conforms(body, type(body))


# --- payloads ----------------------------------------------------------------------------------------

FRAGMENT = plan(
    [
        TensorSpec("w", (70, 70), "rda"),
        TensorSpec("one", (), "mean"),
        TensorSpec("b", (257,), "mean"),
        TensorSpec("v", (256,), "rda"),
    ],
    1,
).fragments[0]


def _payload(codec: str) -> Run:
    honest = encode_payload(
        codec, FRAGMENT, builders.random_tensors(np.random.default_rng(2), FRAGMENT, 1 << 14)
    )

    def run(data: bytes) -> Iterator[None]:
        payload = Payload(codec, FRAGMENT, data)
        yield
        for index, slot in enumerate(FRAGMENT.slots):
            values = payload.tensor(index)
            assert values.dtype == np.int32
            assert values.shape == (slot.numel,)
            assert np.abs(values.astype(np.int64)).max() < VALUE_LIMIT
        yield
        _merges(codec, data, honest)

    return run


def _merges(codec: str, data: bytes, honest: bytes) -> None:
    """Merge it with others under extreme weights: the results must be integers within the range."""
    dice = Random(data)
    contributions = []
    for number, payload in enumerate((data, honest, data, honest)[: dice.choice((1, 2, 4))]):
        body = builders.body_of(
            payload,
            codec,
            limits.STALENESS_MAX,
            1,
            tokens=dice.choice((1, 1000, limits.TOKENS_MAX)),
            steps=dice.choice((1, 30, limits.STEPS_MAX)),
        )
        delta = records.Delta(record_id=bytes(32), author=bytes([number]) * 32, body=body, data=b"")
        contributions.append(builders.contribution(delta, payload, plan([s.spec for s in FRAGMENT.slots], 1)))
    merge = RoundMerge(contributions, FRAGMENT, builders.SMALL.outer)
    for index, slot in enumerate(FRAGMENT.slots):
        merged = merge.tensor(index)
        assert merged.dtype == np.int32
        assert merged.shape == (slot.numel,)
        assert np.abs(merged.astype(np.int64)).max() < VALUE_LIMIT


def _payload_seeds(codec: str) -> list[bytes]:
    rng = np.random.default_rng(3)
    sizes = (0, 1, 100, 1 << 14, 1 << 22, (1 << 30) - 1)
    return [encode_payload(codec, FRAGMENT, builders.random_tensors(rng, FRAGMENT, size)) for size in sizes]


def mutate_payload(data: bytes, dice: Random) -> bytes:
    """Make a change, mostly one that keeps the length, which is checked first."""
    changed = mutate_bytes(data, dice)
    return (changed + data[len(changed) :])[: len(data)] if dice.randrange(4) else changed


def _packed(data: bytes) -> Iterator[None]:
    size = packed_size(data)
    yield
    chunk = unpack_chunk(data)
    yield
    assert len(chunk) == size <= limits.CHUNK_BYTES_MAX
    again = pack_chunk(chunk, form_of(data))
    assert again is None or unpack_chunk(again) == chunk


def _packed_seeds() -> list[bytes]:
    chunks = (b"a" * 100, bytes(range(256)) * 40, bytes(limits.CHUNK_BYTES_MAX), *_payload_seeds("int4"))
    packed = (pack_chunk(chunk, form) for chunk in chunks for form in FORMS.values() if not len(chunk) % 4)
    return [frame for frame in packed if frame is not None]


def _index(data: bytes) -> Iterator[None]:
    total = int.from_bytes(data[:5], "big")
    if total > limits.PARAMETERS_MAX * 4:
        return
    yield
    hashes = parse_index(data[5:], total)
    yield
    assert len(hashes) == len(chunk_sizes(total))


def _index_seeds() -> list[bytes]:
    return [
        n.to_bytes(5, "big") + bytes(32) * len(chunk_sizes(n)) for n in (0, 1, 2**20, 2**20 + 1, 5 * 2**20)
    ]


# --- manifests ---------------------------------------------------------------------------------------


def _canonical(data: bytes) -> Iterator[None]:
    try:
        manifest = from_canonical(data)
    except MalformedError as error:
        if "is not msgpack" not in str(error):
            yield
        raise
    yield
    yield
    assert manifest.canonical() == data


def _manifest_seeds() -> list[bytes]:
    tensors = tuple(TensorSpec(f"tensor {n}", (n + 1, 3), "mean") for n in range(12))
    options = {"text": "x", "number": 1.5, "count": 3, "flag": True}
    return [
        manifest.canonical()
        for manifest in (
            builders.SMALL,
            builders.manifest(tensors, 4, task={"name": "text", "seed": 1, "options": options}),
            builders.manifest(pace={"every_steps": 0, "every_seconds": 5.0}, history={"retain": 0}),
        )
    ]


def _manifest_giants() -> list[bytes]:
    many = tuple(TensorSpec(f"t{n}", (1,), "mean") for n in range(limits.TENSORS_MAX))
    return [builders.manifest(many, limits.FRAGMENTS_MAX).canonical(), *_wide(limits.MANIFEST_BYTES_MAX - 5)]


def _toml(data: bytes) -> Iterator[None]:
    text = data.decode("utf-8", "replace")
    try:
        manifest = from_toml(text, "fuzz.toml")
    except ConfigError as error:
        if "is not valid TOML" not in str(error):
            yield
        # The message may quote a name from the operator's own file unescaped.
        raise ConfigError(ascii(str(error))) from None
    yield
    yield
    assert from_canonical(manifest.canonical()) == manifest


def _toml_seeds() -> list[bytes]:
    text = """
[swarm]
name = "test"
created = 1700000000
[task]
name = "none"
options = { lr = 1e-3, text = "x", flag = true, big = 0x7fffffffffffffff }
[outer]
clip = 1.5
[[outer.codecs]]
name = "int4"
learning_rate = 0.5
[[outer.codecs]]
name = "topk"
[pace]
every_steps = 30
min_round_seconds = 0.05
[history]
retain = 256
[genesis]
digest = "%s"
[layout]
fragments = 2
tensors = [["w", [40, 10], "mean"], ["b", [7], "rda"]]
""" % ("00" * 32)
    hard = ("a = " + "[" * 3000, "x = 0x" + "f" * 5000, "x = " + "9" * 5000, "x = 1979-05-27T24:61:00+99:99")
    return [text.encode(), *(line.encode() for line in hard), b'"\\ud800" = 1', b"x = nan\ny = -inf"]


_TOKEN = re.compile(r'"[^"]*"|-?[0-9][0-9a-fx.e-]*|[a-z_]+|[][{}=,]')
_STRANGE = (
    "nan",
    "-inf",
    "0",
    "-1",
    "1e308",
    "5e-324",
    "9223372036854775808",
    "0xffffffffffffffffff",
    '""',
    '"\\u0000"',
    "[]",
    "{}",
    "true",
)


def mutate_toml(data: bytes, dice: Random) -> bytes:
    """Replace a name, a number, a string or a bracket with something strange."""
    text = data.decode("utf-8", "replace")
    tokens = list(_TOKEN.finditer(text))
    if not tokens or dice.randrange(8) == 0:
        return mutate_bytes(data, dice)
    token = dice.choice(tokens)
    new = dice.choice((dice.choice(_STRANGE), dice.choice(tokens).group()))
    return (text[: token.start()] + new + text[token.end() :]).encode()[:20_000]


# --- handshake ---------------------------------------------------------------------------------------


def _server() -> ServerHandshake:
    return ServerHandshake(KEYS[0], SWARM, b"binding", bytes(32), b"s" * 32, vet=turns_nobody_away)


def _client() -> ClientHandshake:
    return ClientHandshake(KEYS[1], SWARM, b"binding", b"n" * 32, None, vet=turns_nobody_away)


def _handshake(data: bytes) -> Iterator[None]:
    """The first byte states what the rest is: a Hello, a Challenge or a Welcome."""
    turn, rest = data[:1], data[1:]
    unpack(rest, HELLO_BYTES_MAX)
    yield
    if turn == b"\0":
        _server().answer(rest)
    elif turn == b"\1":
        _client().finish(_server().answer(_client().hello(_server().challenge()))[1])
        _client().hello(rest)
    else:
        client = _client()
        client.hello(_server().challenge())
        client.finish(rest)


def _handshake_seeds() -> list[bytes]:
    server, client = _server(), _client()
    challenge = server.challenge()
    hello = client.hello(challenge)
    welcome = server.answer(hello)[1]
    turns = [b"\0" + hello, b"\1" + challenge, b"\2" + welcome, b"\1" + refusal("no"), b"\2" + refusal("no")]
    return [*turns, b"\1" + (b"\xdd\x00\x00\x0f\xff" * 511)]


def _mutate_turn(data: bytes, dice: Random) -> bytes:
    turn = bytes([dice.randrange(3)]) if dice.randrange(20) == 0 else data[:1]
    return turn + mutate_packed(data[1:], dice)


__all__ = ["DECODERS", "message_seeds", "mutate_payload", "mutate_record", "record_seeds"]

DECODERS = [
    Target("wire", _wire, _wire_seeds, giants=lambda: _wide(LISTS)),
    Target("messages", _messages, message_seeds, giants=_message_giants),
    Target("envelope", _envelope, _envelopes, mutate=mutate_bytes),
    Target("records", _records, record_seeds, mutate=mutate_record, share=2.0),
    *(
        Target(
            f"payload-{name}", _payload(name), lambda name=name: _payload_seeds(name), mutate=mutate_payload
        )
        for name in CODECS
    ),
    Target("packed", _packed, _packed_seeds, mutate=mutate_bytes),
    Target("index", _index, _index_seeds, mutate=mutate_bytes, share=0.5),
    Target("manifest", _canonical, _manifest_seeds, giants=_manifest_giants),
    Target("toml", _toml, _toml_seeds, errors=ConfigError, mutate=mutate_toml, share=0.5),
    Target("handshake", _handshake, _handshake_seeds, mutate=_mutate_turn),
]
