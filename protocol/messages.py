"""What two linked nodes say to each other: one small dataclass per message, positional msgpack on the wire.

`decode` returns a validated message or raises MalformedError; `encode` is its inverse. Adding a message
means adding a class here and a handler in `replica`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from gossamer.protocol import limits
from gossamer.protocol.errors import MalformedError, UnsupportedError
from gossamer.protocol.identity import NODE_ID_BYTES
from gossamer.protocol.payloads.chunks import HASH_BYTES
from gossamer.protocol.range_digests import FANOUT, LEVEL_MAX
from gossamer.protocol.records import HEADER_BYTES
from gossamer.protocol.wire import Fields, pack, unpack

_COMPARED_MAX = limits.COMPARED_PARENTS_MAX * FANOUT


class Message(Protocol):
    """Anything a link carries."""

    code: ClassVar[int]

    def fields(self) -> list[Any]: ...

    @classmethod
    def parse(cls, fields: Fields) -> Self: ...


def _pairs(fields: Fields, name: str, high: int) -> list[Fields]:
    return [Fields(item, name) for item in fields.array(name, high)]


def _entry(item: Any) -> tuple[bytes, bool]:
    """An envelope and its flag. Checked by hand for speed, since most of what a link carries is envelopes."""
    if type(item) is list and len(item) == 2:
        envelope, held = item
        if type(envelope) is bytes and type(held) is bool:
            if HEADER_BYTES <= len(envelope) <= limits.RECORD_BYTES_MAX:
                return envelope, held
    raise MalformedError("records: not an envelope and a flag")


@dataclass(frozen=True, slots=True)
class Records:
    """Signed envelopes, each with a flag: whether the sender holds its payload too."""

    code: ClassVar[int] = 1
    entries: tuple[tuple[bytes, bool], ...]

    @classmethod
    def batches(cls, entries: Sequence[tuple[bytes, bool]]) -> Iterator[Self]:
        """Cut envelopes into messages that fit."""
        for start in range(0, len(entries), limits.RECORDS_PER_MESSAGE_MAX):
            yield cls(tuple(entries[start : start + limits.RECORDS_PER_MESSAGE_MAX]))

    def fields(self) -> list[Any]:
        return [self.entries]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        items = fields.array("records", limits.RECORDS_PER_MESSAGE_MAX)
        return cls(tuple([_entry(item) for item in items]))


@dataclass(frozen=True, slots=True)
class Have:
    """The sender now holds the payloads of these deltas."""

    code: ClassVar[int] = 2
    record_ids: tuple[bytes, ...]

    def fields(self) -> list[Any]:
        return [self.record_ids]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.blobs("record_ids", HASH_BYTES, limits.IDS_PER_MESSAGE_MAX))


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of ranges of the sender's ledger at one level: answer with what differs, one level down.

    `whole` marks the opening of an exchange: these ranges cover all that the sender has. Rounds up to
    `above` are left out, since one of the two has closed them. No ranges at all is the answer "we are
    equal".
    """

    code: ClassVar[int] = 3
    level: int
    ranges: tuple[tuple[int, bytes], ...]
    whole: bool = False
    above: int = 0

    def fields(self) -> list[Any]:
        return [self.level, self.ranges, self.whole, self.above]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        level = fields.integer("level", 0, LEVEL_MAX)
        ranges = []
        for item in _pairs(fields, "ranges", _COMPARED_MAX):
            ranges.append((item.integer("index", 0, limits.ROUND_MAX), item.blob("digest", HASH_BYTES)))
            item.end()
        return cls(
            level, tuple(ranges), fields.boolean("whole"), fields.integer("above", 0, limits.ROUND_MAX)
        )


@dataclass(frozen=True, slots=True)
class RecordIds:
    """All record ids that the sender has for some rounds on which the two ledgers differ."""

    code: ClassVar[int] = 4
    rounds: tuple[tuple[int, tuple[bytes, ...]], ...]

    def fields(self) -> list[Any]:
        return [self.rounds]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        rounds = []
        for item in _pairs(fields, "rounds", _COMPARED_MAX):
            number = item.integer("round", 0, limits.ROUND_MAX)
            rounds.append((number, item.blobs("record_ids", HASH_BYTES, limits.IDS_PER_ROUND_MAX)))
            item.end()
        return cls(tuple(rounds))


@dataclass(frozen=True, slots=True)
class GetRecords:
    """Send me these records."""

    code: ClassVar[int] = 5
    record_ids: tuple[bytes, ...]

    def fields(self) -> list[Any]:
        return [self.record_ids]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.blobs("record_ids", HASH_BYTES, limits.IDS_PER_MESSAGE_MAX))


@dataclass(frozen=True, slots=True)
class RosterSummary:
    """Which rows the sender has, and how new: (node id, incarnation, heartbeat)."""

    code: ClassVar[int] = 6
    rows: tuple[tuple[bytes, int, int], ...]
    answer: bool
    """Whether this answers another summary, and so wants none back."""

    def fields(self) -> list[Any]:
        return [self.rows, self.answer]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        rows = []
        for item in _pairs(fields, "rows", limits.MEMBERS_MAX):
            node_id = item.blob("node_id", NODE_ID_BYTES)
            incarnation = item.integer("incarnation", 0, limits.COUNTER_MAX)
            heartbeat = item.integer("heartbeat", 0, limits.COUNTER_MAX)
            rows.append((node_id, incarnation, heartbeat))
            item.end()
        return cls(tuple(rows), fields.boolean("answer"))


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""

    code: ClassVar[int] = 7
    number: int

    def fields(self) -> list[Any]:
        return [self.number]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.integer("number", 0, limits.COUNTER_MAX))


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a Ping, or to a PingFor whose target answered."""

    code: ClassVar[int] = 8
    number: int

    def fields(self) -> list[Any]:
        return [self.number]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.integer("number", 0, limits.COUNTER_MAX))


@dataclass(frozen=True, slots=True)
class PingFor:
    """I cannot reach this node: ping it for me, and acknowledge `number` if you can vouch for it."""

    code: ClassVar[int] = 9
    number: int
    node_id: bytes

    def fields(self) -> list[Any]:
        return [self.number, self.node_id]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.integer("number", 0, limits.COUNTER_MAX), fields.blob("node_id", NODE_ID_BYTES))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node seems to have been dead since this row of its own; a newer one refutes that."""

    code: ClassVar[int] = 10
    node_id: bytes
    incarnation: int
    heartbeat: int

    def fields(self) -> list[Any]:
        return [self.node_id, self.incarnation, self.heartbeat]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(
            fields.blob("node_id", NODE_ID_BYTES),
            fields.integer("incarnation", 0, limits.COUNTER_MAX),
            fields.integer("heartbeat", 0, limits.COUNTER_MAX),
        )


@dataclass(frozen=True, slots=True)
class Want:
    """Send me this chunk by PUT: you dialled me, so I may not be able to GET it from you."""

    code: ClassVar[int] = 11
    blob: bytes

    def fields(self) -> list[Any]:
        return [self.blob]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.blob("blob", HASH_BYTES))


@dataclass(frozen=True, slots=True)
class Decline:
    """I cannot send that chunk."""

    code: ClassVar[int] = 12
    blob: bytes

    def fields(self) -> list[Any]:
        return [self.blob]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(fields.blob("blob", HASH_BYTES))


@dataclass(frozen=True, slots=True)
class AclSummary:
    """Digest of the sender's access list (see `acl`) and, where it differed, the ids of all records in it."""

    code: ClassVar[int] = 13
    digest: bytes
    record_ids: tuple[bytes, ...] = ()
    answer: bool = False
    """Whether this answers a list of ids, and so wants none back."""

    def fields(self) -> list[Any]:
        return [self.digest, self.record_ids, self.answer]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(
            fields.blob("digest", HASH_BYTES),
            fields.blobs("record_ids", HASH_BYTES, limits.ACL_RECORDS_MAX),
            fields.boolean("answer"),
        )


@dataclass(frozen=True, slots=True)
class HaveChunks:
    """The sender now holds these chunks of a delta's payload, numbered from 0."""

    code: ClassVar[int] = 14
    record_id: bytes
    places: tuple[int, ...]

    def fields(self) -> list[Any]:
        return [self.record_id, self.places]

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        record_id = fields.blob("record_id", HASH_BYTES)
        places = fields.array("places", limits.PAYLOAD_CHUNKS_MAX)
        if not all(type(place) is int and 0 <= place < limits.PAYLOAD_CHUNKS_MAX for place in places):
            raise MalformedError("places: not the numbers of chunks")
        return cls(record_id, tuple(places))


_TYPES: dict[int, type[Message]] = {
    kind.code: kind
    for kind in (
        Records,
        Have,
        Digest,
        RecordIds,
        GetRecords,
        RosterSummary,
        Ping,
        Ack,
        PingFor,
        Suspect,
        Want,
        Decline,
        AclSummary,
        HaveChunks,
    )
}


def encode(message: Message) -> bytes:
    """Serialise a message."""
    return pack([message.code, *message.fields()])


def decode(data: bytes) -> Message:
    """Parse and check a message. Raises MalformedError."""
    fields = Fields(unpack(data, limits.MESSAGE_BYTES_MAX), "message")
    kind = _TYPES.get(fields.integer("code", 0, 255))
    if kind is None:
        raise UnsupportedError("message of unknown kind")
    message = kind.parse(fields)
    fields.end()
    return message
