"""Events that go into the protocol core, and effects that come out of it.

The core never does anything: it says what should be done. An adapter (the daemon, or a simulator) carries
effects out in order and feeds back what happened. A *link* is one authenticated connection to a peer,
known by a number that its adapter never uses twice.
"""

from dataclasses import dataclass
from typing import Protocol

from gossamer.protocol.claims import Claim
from gossamer.protocol.messages import Message
from gossamer.protocol.offence import Offence
from gossamer.protocol.records import Delta, DeltaBody


class RandomSource(Protocol):
    """The part of `random.Random` that the core uses; handed in, so that a seed replays everything."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A handshake succeeded. `outbound` says that we dialled, and at which `address`.

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


@dataclass(slots=True)  # one for every message: frozen ones take three times as long to make
class Received:
    """Bytes of one message from a link."""

    link: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """Our trainer closed a window; its payload's chunks are stored. `previous` is filled in by the core."""

    body: DeltaBody


@dataclass(frozen=True, slots=True)
class Stored:
    """Our own record is on disk: it may be spoken of now."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing can be stored, as on a full disk: until the next `Stored` we have no say in the clock."""


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
    """A Get or Ask did not bring its chunk."""

    link: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """What our trainer reports of itself; it goes into our peer row."""

    inner_steps: int
    tokens: int
    tokens_per_s: float
    loss: float
    device: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The snapshots that we hold now, newest first; what the newest covers is the sealed prefix."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """Phi has been set to the snapshot that `Adopt` named (or to genesis, for round 0)."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Unusable:
    """The snapshot that `Adopt` or `Prefetch` named cannot be: its index does not describe this model.

    A root names its bytes, so whoever else claims it, it never can be.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Deliver:
    """Somebody handed us a grant or a revocation, which needs no trust but its owner's signature."""

    data: bytes


@dataclass(frozen=True, slots=True)
class TimeSet:
    """The machine's clock was set, or it slept: Unix time less `now` is something else from here on."""

    unix_offset_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    """We are about to stop."""


@dataclass(frozen=True, slots=True)
class Wake:
    """The time that `next_wake` named has come."""


Event = (
    LinkUp
    | LinkDown
    | DialFailed
    | Received
    | Publish
    | Stored
    | Paused
    | Need
    | ChunkArrived
    | ChunkFailed
    | Progress
    | Sealed
    | Adopted
    | Unusable
    | Deliver
    | TimeSet
    | Leave
    | Wake
)


# --- effects ----------------------------------------------------------------------------------------


@dataclass(slots=True)  # likewise
class Send:
    """Queue a message on a link; if its queue is full, drop it."""

    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to an address; if `node_id` is given, to nobody else, and with no other certificate."""

    address: str
    node_id: bytes | None
    fingerprint: bytes = b""
    """SHA-256 of the certificate that its row names; empty if we know none."""


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close a link once what is queued on it has gone out."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a delta record. If `own`, durably, and answer with `Stored` before anything else is said."""

    delta: Delta
    own: bool


@dataclass(frozen=True, slots=True)
class StoreCredential:
    """Keep a grant or revocation, durably."""

    record_id: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Expelled:
    """An owner has revoked us: there is nothing left for us to do here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch a chunk over HTTP from the peer of a link that we dialled."""

    link: int
    blob: bytes
    size: int
    """The most bytes that it can have."""
    patience: float
    """Seconds after which it is given up."""


@dataclass(frozen=True, slots=True)
class Put:
    """Send a chunk over HTTP to the peer of a link that we dialled, which asked for it."""

    link: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """A delta and all of its payload are here, or its round lost a record: merge the round anew."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Fetched:
    """All chunks asked for under `key` are here."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """Snapshot Phi of everything up to `round`, and answer with `Sealed`."""

    round: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget all rounds up to `round`: these records, and their payloads."""

    round: int
    deltas: tuple[Delta, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopt:
    """Fetch this snapshot and start from it (from genesis, for round 0).

    Answer with `Adopted`, or with `Unusable` if it turns out so.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to fetch this snapshot, in place of any other: an `Adopt` of it may follow.

    Answer with `Unusable` if it turns out so.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer misbehaved: count it, log it, and turn the peer away if it goes on (see `greylist`)."""

    link: int
    reason: str
    offence: Offence


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person may want to know."""

    text: str


Effect = (
    Send
    | Dial
    | Hangup
    | Store
    | StoreCredential
    | Expelled
    | Get
    | Put
    | Ready
    | Fetched
    | Seal
    | Close
    | Adopt
    | Prefetch
    | Blame
    | Notice
)
