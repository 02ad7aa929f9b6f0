"""What two linked nodes say to each other: one small dataclass per message, positional msgpack on the wire.

`decode` returns a validated message or raises MalformedError; `encode` is its inverse. A field's type says
how it is read and within which bounds (see `wire`). Adding a message means adding a class here, its name
in `Message` and a handler in `replica`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from gossamer.protocol import limits
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.identity import NODE_ID_BYTES
from gossamer.protocol.payloads import HASH_BYTES
from gossamer.protocol.range_digests import FANOUT, LEVEL_MAX
from gossamer.protocol.records import HEADER_BYTES
from gossamer.protocol.wire import Fields, Reader, blob, blobs, boolean, integer, pack, read, unpack, values

_COMPARED_MAX = limits.COMPARED_PARENTS_MAX * FANOUT

Flag = Annotated[bool, boolean]
Number = Annotated[int, integer(0, limits.COUNTER_MAX)]
Round = Annotated[int, integer(0, limits.ROUND_MAX)]
Hash = Annotated[bytes, blob(HASH_BYTES)]
NodeId = Annotated[bytes, blob(NODE_ID_BYTES)]
RecordIdList = Annotated[tuple[bytes, ...], blobs(HASH_BYTES, limits.IDS_PER_MESSAGE_MAX)]


def _entry(item: Any) -> tuple[bytes, bool]:
    """An envelope and its flag. Checked by hand for speed, since most of what a link carries is envelopes."""
    if type(item) is list and len(item) == 2:
        envelope, held = item
        if type(envelope) is bytes and type(held) is bool:
            if HEADER_BYTES <= len(envelope) <= limits.RECORD_BYTES_MAX:
                return envelope, held
    raise MalformedError("records: not an envelope and a flag")


def _entries(fields: Fields, name: str) -> tuple[tuple[bytes, bool], ...]:
    return tuple([_entry(item) for item in fields.array(name, limits.RECORDS_PER_MESSAGE_MAX)])


def _table(most: int, **columns: Reader) -> Reader:
    """At most so many tuples of these fields."""

    def table(fields: Fields, name: str) -> tuple[tuple[Any, ...], ...]:
        result = []
        for item in [Fields(item, name) for item in fields.array(name, most)]:
            result.append(tuple([column(item, of) for of, column in columns.items()]))
            item.end()
        return tuple(result)

    return table


def _places(fields: Fields, name: str) -> tuple[int, ...]:
    places = fields.array(name, limits.PAYLOAD_CHUNKS_MAX)
    if not all(type(place) is int and 0 <= place < limits.PAYLOAD_CHUNKS_MAX for place in places):
        raise MalformedError("places: not the numbers of chunks")
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Records:
    """Signed envelopes, each with a flag: whether the sender holds its payload too."""

    entries: Annotated[tuple[tuple[bytes, bool], ...], _entries]

    @classmethod
    def batches(cls, entries: Sequence[tuple[bytes, bool]]) -> Iterator[Self]:
        """Cut envelopes into messages that fit."""
        for start in range(0, len(entries), limits.RECORDS_PER_MESSAGE_MAX):
            yield cls(tuple(entries[start : start + limits.RECORDS_PER_MESSAGE_MAX]))


@dataclass(frozen=True, slots=True)
class Have:
    """The sender now holds the payloads of these deltas."""

    record_ids: RecordIdList


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of ranges of the sender's ledger at one level: answer with what differs, one level down.

    `whole` marks the opening of an exchange: these ranges cover all that the sender has. Rounds up to
    `above` are left out, since one of the two has closed them. No ranges at all is the answer "we are
    equal".
    """

    level: Annotated[int, integer(0, LEVEL_MAX)]
    ranges: Annotated[
        tuple[tuple[int, bytes], ...],
        _table(_COMPARED_MAX, index=integer(0, limits.ROUND_MAX), digest=blob(HASH_BYTES)),
    ]
    whole: Flag = False
    above: Round = 0


@dataclass(frozen=True, slots=True)
class RecordIds:
    """All record ids that the sender has for some rounds on which the two ledgers differ."""

    rounds: Annotated[
        tuple[tuple[int, tuple[bytes, ...]], ...],
        _table(
            _COMPARED_MAX,
            round=integer(0, limits.ROUND_MAX),
            record_ids=blobs(HASH_BYTES, limits.IDS_PER_ROUND_MAX),
        ),
    ]


@dataclass(frozen=True, slots=True)
class GetRecords:
    """Send me these records."""

    record_ids: RecordIdList


@dataclass(frozen=True, slots=True)
class RosterSummary:
    """Which member records the sender has, and how new: (node id, incarnation, heartbeat)."""

    ages: Annotated[
        tuple[tuple[bytes, int, int], ...],
        _table(
            limits.MEMBERS_MAX,
            node_id=blob(NODE_ID_BYTES),
            incarnation=integer(0, limits.COUNTER_MAX),
            heartbeat=integer(0, limits.COUNTER_MAX),
        ),
    ]
    answer: Flag
    """Whether this answers another summary, and so wants none back."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""

    number: Number


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to a Ping, or to a PingFor whose target answered."""

    number: Number


@dataclass(frozen=True, slots=True)
class PingFor:
    """I cannot reach this node: ping it for me, and acknowledge `number` if you can vouch for it."""

    number: Number
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node seems to have been dead since this record of its own; a newer one refutes that."""

    node_id: NodeId
    incarnation: Number
    heartbeat: Number


@dataclass(frozen=True, slots=True)
class Want:
    """Send me this chunk by PUT: you dialled me, so I may not be able to GET it from you."""

    blob: Hash


@dataclass(frozen=True, slots=True)
class Decline:
    """I cannot send that chunk."""

    blob: Hash


@dataclass(frozen=True, slots=True)
class AclSummary:
    """Digest of the sender's access list (see `acl`) and, where it differed, the ids of all records in it."""

    digest: Hash
    record_ids: Annotated[tuple[bytes, ...], blobs(HASH_BYTES, limits.ACL_RECORDS_MAX)] = ()
    answer: Flag = False
    """Whether this answers a list of ids, and so wants none back."""


@dataclass(frozen=True, slots=True)
class HaveChunks:
    """The sender now holds these chunks of a delta's payload, numbered from 0."""

    record_id: Hash
    places: Annotated[tuple[int, ...], _places]


_OfLedgers = Records | Have | Digest | RecordIds | GetRecords
_OfMembers = RosterSummary | Ping | Ack | PingFor | Suspect
Message = _OfLedgers | _OfMembers | Want | Decline | AclSummary | HaveChunks
KINDS: tuple[type[Message], ...] = get_args(Message)
"""By code on the wire, which begins at 1."""
_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}


def encode(message: Message) -> bytes:
    """Serialise a message."""
    return pack([_CODES[type(message)], *values(message)])


def decode(data: bytes) -> Message:
    """Parse and check a message. Raises MalformedError."""
    fields = Fields(unpack(data, limits.MESSAGE_BYTES_MAX), "message")
    code = fields.integer("code", 0, 255)
    if not 1 <= code <= len(KINDS):
        raise MalformedError("message of unknown kind")
    message = read(KINDS[code - 1], fields)
    fields.end()
    return message
