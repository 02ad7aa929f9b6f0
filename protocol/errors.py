"""Every error Gossamer raises on purpose, in one tree.

The first split is whose mistake it is, because the reaction differs::

    GossamerError
    ├── LocalError              ours or our operator's: one clear line, exit status 2
    │   ├── ConfigError         a manifest, a flag, an address or a task is wrong
    │   ├── StorageError        a database, blob, key file or disk is unusable
    │   │   ├── DiskFullError       there is no room left: the node waits for some
    │   │   └── FolderGoneError     a node's folder is not where it was, or cannot be written to
    │   ├── DivergedError       training blew up: a parameter left the representable range
    │   └── UnreachableError    nobody useful answered where we were told to look
    │       ├── NobodyThereError    nobody answered at all: the node there may not run yet
    │       └── NotAnsweredError    a node answered and turned us down: it says why
    └── PeerError               a peer misbehaved: one log line, a counter, and the node goes on
        ├── MalformedError      bytes that do not parse, or a value out of its bounds
        │   ├── ImplausibleError    a value that only a wrong clock explains: the peer's, or ours
        │   └── UnsupportedError    a message, record or manifest of a kind that this release does not know
        ├── SignatureError      a signature or a key that does not hold
        ├── NoRoomError         a sound record for which we have no room: nobody is blamed
        ├── RefusedError        a handshake that one side turned down
        └── PayloadError        a payload or chunk that is not what its record promised

Library errors (msgpack, cryptography, zstandard, aiohttp, sqlite3) are mapped to these at the boundary where
they arise.
"""


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
    """No peer answered usefully where we were told to look."""


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


class UnsupportedError(MalformedError):
    """A message, record or manifest of a kind that this release does not know; another release may."""


class SignatureError(PeerError):
    """A signature, or a public key, that does not hold."""


class NoRoomError(PeerError):
    """A sound record for which we have no room left. The peer that sent it is not to blame."""


class RefusedError(PeerError):
    """A handshake that one side turned down; the message is the reason given."""


class PayloadError(PeerError):
    """A payload or chunk that differs from what its signed record promised."""
