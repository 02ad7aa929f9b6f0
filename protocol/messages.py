"""What two linked nodes say to each other: one small dataclass per message, positional msgpack on the wire.

`decode` returns a validated message or raises MalformedError; `encode` is its inverse. A field's type says
within which bounds it is read (see `wire`). Adding a message means adding a class here, its name
in `Message` and a handler in `replica`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from gossamer.protocol import limits
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.identity import NODE_ID_BYTES
from gossamer.protocol.payloads import HASH_BYTES
from gossamer.protocol.records import HEADER_BYTES
from gossamer.protocol.wire import array, blob, boolean, integer, pack, read, row, unpack, values

_COMPARED_MAX = limits.COMPARED_PARENTS_MAX * limits.RANGE_FANOUT

_hash, _round, _number = blob(HASH_BYTES), integer(0, limits.ROUND_MAX), integer(0, limits.COUNTER_MAX)

Flag = Annotated[bool, boolean]
Number = Annotated[int, _number]
Round = Annotated[int, _round]
Hash = Annotated[bytes, _hash]
NodeId = Annotated[bytes, blob(NODE_ID_BYTES)]
RecordIdList = Annotated[tuple[bytes, ...], array(_hash, limits.IDS_PER_MESSAGE_MAX)]


def _entry(item: Any) -> tuple[bytes, bool]:
    """An envelope and its flag. Checked by hand for speed, since most of what a link carries is envelopes."""
    if type(item) is list and len(item) == 2:
        envelope, held = item
        if type(envelope) is bytes and type(held) is bool:
            if HEADER_BYTES <= len(envelope) <= limits.RECORD_BYTES_MAX:
                return envelope, held
    raise ValueError("holds what is not an envelope and a flag")


@dataclass(frozen=True, slots=True)
class Records:
    """Signed envelopes, each with a flag: whether the sender holds its payload too."""

    entries: Annotated[tuple[tuple[bytes, bool], ...], array(_entry, limits.RECORDS_PER_MESSAGE_MAX)]

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

    level: Annotated[int, integer(0, limits.RANGE_LEVEL_MAX)]
    ranges: Annotated[tuple[tuple[int, bytes], ...], array(row(_round, _hash), _COMPARED_MAX)]
    """The index of each range at its level, and its digest."""
    whole: Flag = False
    above: Round = 0


@dataclass(frozen=True, slots=True)
class RecordIds:
    """All record ids that the sender has for some rounds on which the two ledgers differ."""

    rounds: Annotated[
        tuple[tuple[int, tuple[bytes, ...]], ...],
        array(row(_round, array(_hash, limits.IDS_PER_ROUND_MAX)), _COMPARED_MAX),
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
        array(row(blob(NODE_ID_BYTES), _number, _number), limits.MEMBERS_MAX),
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
    record_ids: Annotated[tuple[bytes, ...], array(_hash, 2 * limits.ACL_NODES_MAX)] = ()
    answer: Flag = False
    """Whether this answers a list of ids, and so wants none back."""


@dataclass(frozen=True, slots=True)
class HaveChunks:
    """The sender now holds these chunks of a delta's payload, numbered from 0."""

    record_id: Hash
    places: Annotated[
        tuple[int, ...], array(integer(0, limits.PAYLOAD_CHUNKS_MAX - 1), limits.PAYLOAD_CHUNKS_MAX)
    ]


@dataclass(frozen=True, slots=True)
class NewDelta:
    """A delta that the sender has just signed, with its payload, a single chunk: nobody has either yet."""

    envelope: Annotated[bytes, blob(HEADER_BYTES, limits.RECORD_BYTES_MAX)]
    chunk: Annotated[bytes, blob(1, limits.SENT_ALONG_BYTES_MAX)]
    """As it travels: packed if it is shorter than its record says."""


_OfLedgers = Records | Have | Digest | RecordIds | GetRecords
_OfMembers = RosterSummary | Ping | Ack | PingFor | Suspect
Message = _OfLedgers | _OfMembers | Want | Decline | AclSummary | HaveChunks | NewDelta
KINDS: tuple[type[Message], ...] = get_args(Message)
"""By code on the wire, which begins at 1."""
_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}
_KINDS = dict(enumerate(KINDS, 1))


def encode(message: Message) -> bytes:
    """Serialise a message."""
    return pack([_CODES[type(message)], *values(message)])


def decode(data: bytes) -> Message:
    """Parse and check a message. Raises MalformedError."""
    value = unpack(data, limits.MESSAGE_BYTES_MAX)
    if type(value) is not list or not value or type(value[0]) is not int or value[0] not in _KINDS:
        raise MalformedError("message of unknown kind")
    kind = _KINDS[value[0]]
    return read(kind, value[1:], kind.__name__)
