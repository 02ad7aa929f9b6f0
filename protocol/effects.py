"""Effects: what comes out of the protocol core.

The core does nothing itself: it says what should be done. An adapter (the daemon, or a simulator) carries
effects out in order, and feeds back what happened as events (`events.py`).
"""

from dataclasses import dataclass

from gossamer.protocol.errors import Offence
from gossamer.protocol.messages import Message
from gossamer.protocol.records import Claim, Delta


@dataclass(slots=True)  # made for every message, and frozen ones take three times as long to make
class Send:
    """Queue a message on a link; if its queue is full, drop it."""

    link: int
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to an address; if `node_id` is given, only to that node, and only under its certificate."""

    address: str
    node_id: bytes | None
    fingerprint: bytes = b""
    """SHA-256 of the certificate that the node's record names; empty if we know none."""


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close a link once what is queued on it has gone out."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a delta record. If it is our `own`, keep it durably and answer with `Stored`; until then nobody
    hears of it."""

    delta: Delta
    own: bool


@dataclass(frozen=True, slots=True)
class StoreCredential:
    """Keep a grant or revocation, durably."""

    record_id: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Expelled:
    """We must not go on: an owner has revoked us, or another process has our key."""

    reason: str
    """In words, for this node's owner."""


@dataclass(frozen=True, slots=True)
class Get:
    """Fetch a chunk over HTTP from the peer of a link that we dialled."""

    link: int
    blob: bytes
    size: int
    """The most bytes that the chunk can have."""
    patience: float
    """Seconds after which the transfer is given up."""


@dataclass(frozen=True, slots=True)
class Put:
    """Send a chunk over HTTP to the peer of a link that we dialled, which asked for it."""

    link: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Keep:
    """Check and store a chunk that came along with its record; as after a `Get`, the core hears what came of
    it."""

    link: int
    blob: bytes
    size: int
    """Bytes of the chunk."""
    data: bytes
    """The chunk as it came: packed if this is shorter."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Make `deltas` the records that are merged of a round, and answer with `Merged`.

    One merge is asked for at a time. Once Phi is set to another snapshot (`Adopted`) it is not answered.
    """

    round: int
    deltas: tuple[Delta, ...]
    unless_outliers: bool
    """Whether to leave the round as it is if all these deltas are outliers, see `merge.schedule`."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """All chunks that were needed under `key` are here."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """Snapshot Phi of everything up to `round`, and answer with `Sealed`."""

    round: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget all rounds up to `round`: the records in `deltas`, and their payloads.

    Where a snapshot was adopted, these may be records of later rounds too, see `Holdings.begin_at`.
    """

    round: int
    deltas: tuple[Delta, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopt:
    """Fetch this snapshot and start from it (from genesis, for round 0).

    Answer with `Adopted`, or with `Unusable` if the snapshot turns out to be that.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to fetch this snapshot, in place of any other: an `Adopt` of it may follow.

    Answer with `Unusable` if the snapshot turns out to be that.
    """

    claim: Claim


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer misbehaved: count it, log it, and turn the peer away if it goes on (see `Greylist`)."""

    link: int
    reason: str
    offence: Offence


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person may want to know."""

    text: str
    culprit: str = ""
    """The label of the node that did it, if any key can: what is said of such nodes has to be bounded."""


ToPeers = Send | Dial | Hangup | Get | Put | Keep | Blame
ToDisk = Store | StoreCredential | Close
ToPhi = Merge | Fetched | Seal | Adopt | Prefetch
Effect = ToPeers | ToDisk | ToPhi | Expelled | Notice


class Outbox(list[Effect]):
    """The effects of one event, in order. All machines of the core append to the same one."""

    def send(self, link: int, message: Message) -> None:
        self.append(Send(link, message))

    def drain(self) -> list[Effect]:
        """Take out everything."""
        effects = list(self)
        self.clear()
        return effects
