"""What passes between a node's daemon and trainer: messages over their Unix socket, and memory that both map.

Each message is length-prefixed msgpack of one small dataclass. Both ends belong to the same user and should
be of the same release. A message that does not parse ends the connection.

Bulk data goes through the shared memory: Phi one way, payloads the other. The daemon creates an anonymous
file and passes its descriptor with `Welcome`, so no name can be left behind. Each part has one owner at any
time, and messages hand it over:

* fragment `f` of Phi is the daemon's until it says ``Phi(f)``, then the trainer's until ``Applied(f)``;
* the payload area is the trainer's until it says ``Publish``, then the daemon's until ``Published``.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass, fields
from typing import BinaryIO, NamedTuple

import numpy as np

from gossamer.protocol.errors import MalformedError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Fragment
from gossamer.protocol.sampling import EVERY_ROUND
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
    has trained on, the number of our links, the number of rounds still to be merged, the codec to publish in
    ("": as before, and the finest at first), and of the round to come the steps in a window and how often
    members contribute (see `sampling.is_drawn`)."""

    round: int
    swarm_tokens: int
    links: int = 0
    unmerged: int = 0
    codec: str = ""
    window: int = 0
    turn: int = EVERY_ROUND


@dataclass(frozen=True, slots=True)
class Data:
    """Daemon: which blocks of the data are taken, see `data_claims.Taken`. Comes before the first `Phi`."""

    taken: bytes


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
    epoch: int = 0
    blocks: bytes = b""
    """What is claimed of the data."""
    turn: int = EVERY_ROUND
    """As in the `Clock` by which the round was chosen."""


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
    val_loss_average: float | None
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
    """Of the live model."""
    val_loss_average: float | None = None
    """Of the averaged model; None if it was not measured, as while it is not here yet."""
    val_loss_start: float | None = None
    """Of Phi_0."""
    version: int = -1
    round: int = 0


NOT_EVALUATED = Evaluation()

JOINING = "joining"
"""The state of a trainer that waits for the swarm's model, and resumes its progress only then."""

ControlMessage = Welcome | Phi | Published | Clock | Data | Stop | Publish | Applied | Report

_KINDS: dict[int, type[ControlMessage]] = dict(
    enumerate((Welcome, Phi, Published, Clock, Data, Stop, Publish, Applied, Report))
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


class SharedMemory:
    """A mapping of the shared file. Each side makes one."""

    def __init__(self, manifest: Manifest, fd: int) -> None:
        """Takes ownership of `fd`. Raises OSError, after closing `fd`, if there is no memory."""
        self._phi_bytes = manifest.plan().snapshot_bytes
        size = self._phi_bytes + manifest.payload_max
        self.fd = fd
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            self.close()
            raise

    @classmethod
    def create(cls, manifest: Manifest) -> "SharedMemory":
        """Make the file and map it (the daemon's side). Raises OSError if there is no room for it."""
        if hasattr(os, "memfd_create"):
            return cls(manifest, os.memfd_create("gossamer"))
        with tempfile.TemporaryFile() as file:  # macOS, and Pythons for old systems
            return cls(manifest, os.dup(file.fileno()))

    def phi(self, fragment: Fragment) -> Ints:
        """The area of one fragment: int32[fragment.numel], a view."""
        return np.frombuffer(self._map, dtype=np.int32, count=fragment.numel, offset=4 * fragment.offset)

    @property
    def whole(self) -> memoryview:
        """All of the mapping, writable."""
        return memoryview(self._map)

    @property
    def payload(self) -> memoryview:
        """The payload area, writable."""
        return memoryview(self._map)[self._phi_bytes :]

    def is_payload(self, area: memoryview) -> bool:
        """Whether an area is (the beginning of) the payload area of this mapping."""
        return area.obj is self._map

    def close(self) -> None:
        """Close the descriptor. The mapping lasts as long as any view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
