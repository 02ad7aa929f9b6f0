"""Events: what goes into the protocol core.

An adapter (the daemon, or a simulator) feeds in what happened, and carries out the effects that come back
(`effects.py`). A *link* is one authenticated connection to a peer, known by a number that its adapter never
uses twice.
"""

from dataclasses import dataclass
from enum import Enum, auto

from gossamer.protocol.records import Claim, Delta, DeltaBody


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A handshake succeeded. `outbound` says whether we dialled, and `address` where.

    `group` names the part of the internet that the peer is in (see `Links`); None on loopback and in a LAN.
    """

    link: int
    node_id: bytes
    outbound: bool
    address: str | None
    credential: bytes = b""
    """The grant that the peer showed, if any; the handshake has judged it."""
    group: str | None = None


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A link ended, for whatever reason."""

    link: int


@dataclass(frozen=True, slots=True)
class DialFailed:
    """A Dial did not lead to a link."""

    address: str


@dataclass(slots=True)  # made for every message, and frozen ones take three times as long to make
class Received:
    """Bytes of one message from a link."""

    link: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """Our trainer closed a window. `previous` is filled in by the core; on `Store` the payload is stored,
    too."""

    body: DeltaBody


@dataclass(frozen=True, slots=True)
class Stored:
    """Our own record is on disk: others may hear of it now."""

    delta: Delta
    chunk: bytes = b""
    """Its payload as it travels, if that is a single chunk at hand."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing can be stored, as on a full disk. Until the next `Stored` we have no say in the clock."""


@dataclass(frozen=True, slots=True)
class Need:
    """Fetch these chunks (hash, size) under one key; `Fetched` tells when all are here."""

    key: bytes
    chunks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk we lacked is stored, its hash checked."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """A Get or Want did not bring its chunk."""

    link: int
    blob: bytes


class MergeOutcome(Enum):
    """What became of a `Merge`."""

    CHANGED = auto()
    SAME = auto()
    """Phi held these records already."""
    OUTLIERS = auto()
    """All deltas are outliers, and nothing was merged."""
    FAILED = auto()
    """A payload turned out damaged, or could not be read."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The round that `Merge` named was merged, or was not."""

    round: int
    outcome: MergeOutcome
    agreement: int = 1000
    """Mean cosine of the round's deltas, in thousandths; 1000 where fewer than two can be compared."""


@dataclass(frozen=True, slots=True)
class Paced:
    """The pace that the records merged set now, see `pace.Windows`."""

    window: int
    """Steps; 0 if windows are counted in seconds."""
    turn: int
    since: int
    """The round after which they hold."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What our trainer reports of itself; it goes into our record."""

    inner_steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    device: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The snapshots that we hold now, newest first; the newest one covers the sealed prefix."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """Phi has been set to the snapshot that `Adopt` named (or to genesis, for round 0)."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Unusable:
    """The snapshot that `Adopt` or `Prefetch` named cannot exist: its index does not describe this model.

    A root names its bytes, so this holds for good, whoever else claims the snapshot.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Deliver:
    """Somebody handed us a grant or a revocation. It needs no trust but its owner's signature."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TimeSet:
    """The machine's clock was set, or the machine slept: Unix time minus `now` has changed."""

    unix_offset_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    """We are about to stop."""


@dataclass(frozen=True, slots=True)
class Wake:
    """The time that `next_wake` named has come."""


FromPeers = LinkUp | LinkDown | DialFailed | Received | ChunkArrived | ChunkFailed
FromTrainer = Publish | Paused | Progress
FromPhi = Need | Merged | Paced | Sealed | Adopted | Unusable
Event = FromPeers | FromTrainer | FromPhi | Stored | Deliver | TimeSet | Leave | Wake
