"""Every error Gossamer raises on purpose, in one tree.

The first split is whose mistake it is, because the reaction differs::

    GossamerError
    ├── LocalError              ours or our operator's: one clear line, exit status 2
    │   ├── ConfigError         a manifest, a flag, an address or a task is wrong
    │   ├── StorageError        a database, blob, key file or disk is unusable
    │   │   ├── DiskFullError       there is no room left: the node waits for some
    │   │   └── FolderGoneError     a node's folder is not where it was, or cannot be written to
    │   ├── DivergedError       training blew up: a parameter left the representable range
    │   └── UnreachableError    nobody useful answered where we were to look
    │       ├── NobodyThereError    nobody answered at all: the node there may not run yet
    │       └── NotAnsweredError    a node answered and turned us down: it says why
    └── PeerError               a peer misbehaved: one log line, a counter, and the node goes on
        ├── MalformedError      bytes that do not parse, or a value out of its bounds
        │   └── ImplausibleError    a value that only a wrong clock explains: the peer's, or ours
        ├── SignatureError      a signature or a key that does not hold
        ├── NoRoomError         a sound record for which we have no room: nobody is blamed
        ├── RefusedError        a handshake that one side turned down
        └── PayloadError        a payload or chunk that is not what its record promised

Library errors (msgpack, cryptography, zstandard, aiohttp, sqlite3) are mapped to these at the boundary where
they arise.
"""

from enum import Enum


class GossamerError(Exception):
    """Base of all errors raised on purpose."""


class LocalError(GossamerError):
    """Our own or our operator's mistake. The message says what to do."""


class ConfigError(LocalError):
    """A manifest, flag, address or task that cannot be used as it stands."""


class StorageError(LocalError):
    """A file, folder or database that cannot be read, written or trusted."""


class DiskFullError(StorageError):
    """There is no room for what has to be written. Once there is, the write can succeed."""


class FolderGoneError(StorageError):
    """A node's folder is not where it was, or cannot be written to. Once it is back, the node can go on."""


class DivergedError(LocalError):
    """A parameter left the range that fixed point can hold, as no healthy training does."""


class UnreachableError(LocalError):
    """No peer answered usefully where we were to look."""


class NobodyThereError(UnreachableError):
    """Nobody answered at all. This may pass: the machine may still be starting, its name not be known yet."""


class NotAnsweredError(UnreachableError):
    """A node turned our question down; the message holds its reason."""


class PeerError(GossamerError):
    """A peer sent something that it should not have. This costs the peer, never the run."""


class MalformedError(PeerError):
    """Bytes that do not parse, or a field outside its bounds."""


class ImplausibleError(MalformedError):
    """A value that the time rules out. A clock is wrong, and it may be our own."""


class SignatureError(PeerError):
    """A signature, or a public key, that does not hold."""


class NoRoomError(PeerError):
    """A sound record for which we have no room left. The peer that sent it is not to blame."""


class RefusedError(PeerError):
    """A handshake or a chunk that one side turned down; the message is the reason given."""


class PayloadError(PeerError):
    """A payload or chunk that differs from what its signed record promised."""


# --- What kinds of wrong a peer can do, and how much each weighs.
#
# The points of an offence depend on who can commit it. What only a liar or a broken build does weighs much.
# What a wrong clock does weighs next to nothing.


class Offence(Enum):
    """What kind of wrong a peer did, and how many points it costs."""

    SIGNATURE = ("bad signature", 20.0)
    """TLS lets no flipped bit through: somebody made the bad signature."""
    MALFORMED = ("malformed message", 35.0)
    """The link is closed each time."""
    RECORD = ("invalid record", 10.0)
    """Signed by the sender itself, yet invalid."""
    RELAYED = ("invalid record of another node", 0.25)
    """A node that relays a record has checked it, by the rules of its own release."""
    CHUNK = ("chunk that does not match its hash", 20.0)
    NONSENSE = ("request that makes no sense", 5.0)
    HANDSHAKE = ("failed handshake", 5.0)
    """Charged to an address, since no key was proven."""
    STALLED = ("stalled handshake", 0.25)
    """Charged to an address, too. A path that loses its longest packets does this to honest nodes."""
    IMPLAUSIBLE = ("round too early", 0.0)
    """The author's clock is wrong, or ours."""

    def __init__(self, _: str, points: float) -> None:
        # The words are for the reader. They also keep offences of equal weight apart: Enum would merge them.
        self.points = points


def offence_in_record(error: PeerError, *, relayed: bool) -> Offence:
    """The offence of a record that was refused with `error`. `relayed`: its sender is not its author."""
    match error:
        case SignatureError():
            return Offence.SIGNATURE
        case ImplausibleError():
            return Offence.IMPLAUSIBLE
    return Offence.RELAYED if relayed else Offence.RECORD
