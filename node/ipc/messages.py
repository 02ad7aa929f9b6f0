"""The messages that a node's daemon and trainer exchange over their Unix socket.

Each message is length-prefixed msgpack of one small dataclass; bulk data goes through `shared_memory`. Both
ends belong to the same user and should be of the same release. A message that does not parse ends the
connection.
"""

from dataclasses import dataclass, fields
from typing import BinaryIO, NamedTuple

from gossamer.protocol.errors import MalformedError
from gossamer.protocol.wire import pack, unpack

FRAME_BYTES_MAX = 64 * 1024
LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Welcome:
    """Daemon: who we are. The shared memory's descriptor travels with the frame."""

    node_id: bytes
    own_last: int
    """The last round for which a delta is signed or was handed in."""
    clock: int
    handed_in: int
    """The last round for which this daemon was handed in a delta."""
    acknowledged: int
    """The last round whose delta needs nothing more from a trainer."""


@dataclass(frozen=True, slots=True)
class Phi:
    """Daemon: fragment `fragment` of Phi is in shared memory.

    `merged_round` is the highest round merged into it, `own_round` the highest of our own among them,
    `version` counts the merges of all fragments.
    """

    fragment: int
    merged_round: int
    own_round: int
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """Daemon: the delta for this round is stored and signed. The payload area is the trainer's again."""

    round: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Daemon: the swarm's round clock (-1: there is none to publish by just now), the tokens that the swarm
    has trained on, the number of our links, and the number of rounds still to be merged."""

    round: int
    swarm_tokens: int
    links: int = 0
    unmerged: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Daemon: the node is stopping. Publish what there is, and end."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Trainer: a delta of `payload_bytes` is in the payload area."""

    round: int
    base: int
    tokens: int
    steps: int
    loss: float
    codec: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Applied:
    """Trainer: fragment `fragment` has been read. Its area is the daemon's again."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Report:
    """Trainer: how it is doing, for peers and displays."""

    state: str
    inner_steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    val_loss: float | None
    val_loss_start: float | None
    evaluated_version: int
    evaluated_round: int
    """The node's last round at that evaluation."""
    wait_fraction: float
    """Fraction of the training loop's wall time lost to inner steps: to publish and to apply."""
    device: str


class Evaluation(NamedTuple):
    """What a trainer last measured on held-out data; in a `Report`, one field after the other."""

    val_loss: float | None = None
    val_loss_start: float | None = None
    version: int = -1
    round: int = 0


NOT_EVALUATED = Evaluation()

JOINING = "joining"
"""The state of a trainer that waits for the swarm's model, and resumes its progress only then."""

ControlMessage = Welcome | Phi | Published | Clock | Stop | Publish | Applied | Report

_KINDS: dict[int, type[ControlMessage]] = dict(
    enumerate((Welcome, Phi, Published, Clock, Stop, Publish, Applied, Report))
)
_CODES = {kind: code for code, kind in _KINDS.items()}
_NAMES = {kind: [field.name for field in fields(kind)] for kind in _CODES}


def encode(message: ControlMessage) -> bytes:
    """One frame."""
    kind = type(message)
    # Not `astuple`, which copies deeply and takes ten times as long.
    body = pack([_CODES[kind], *[getattr(message, name) for name in _NAMES[kind]]])
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode(body: bytes) -> ControlMessage:
    """Inverse of `encode`, without the length. Raises MalformedError."""
    value = unpack(body, FRAME_BYTES_MAX)
    if not isinstance(value, list) or not value or type(value[0]) is not int or value[0] not in _KINDS:
        raise MalformedError("control message of unknown kind")
    try:
        return _KINDS[value[0]](*value[1:])
    except TypeError:
        raise MalformedError("control message with the wrong fields") from None


def frame_length(prefix: bytes) -> int:
    """Length of the body that follows. Raises MalformedError."""
    length = int.from_bytes(prefix, "big")
    if length > FRAME_BYTES_MAX:
        raise MalformedError(f"control frame of {length} bytes")
    return length


def receive_exactly(stream: BinaryIO, count: int) -> bytes:
    """Read `count` bytes of a blocking connection. Raises ConnectionError at its end."""
    data = stream.read(count)
    if len(data) < count:
        raise ConnectionError("the daemon closed the connection")
    return data


def receive(stream: BinaryIO) -> ControlMessage:
    """Read one message of a blocking connection. Raises ConnectionError, OSError or MalformedError."""
    return decode(receive_exactly(stream, frame_length(receive_exactly(stream, LENGTH_BYTES))))
