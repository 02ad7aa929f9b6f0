"""What kinds of wrong a peer can do, and how much each weighs.

The points of an offence are chosen by who can commit it. What only a liar or a broken build does weighs much;
what a wrong clock or another release does weighs next to nothing, so that neither is ever turned away for it.
"""

from enum import Enum

from gossamer.protocol.errors import ImplausibleError, PeerError, SignatureError, UnsupportedError


class Offence(Enum):
    """What kind of wrong a peer did, and how many points it costs."""

    SIGNATURE = ("bad signature", 20.0)
    """TLS lets no flipped bit through: somebody made it."""
    MALFORMED = ("malformed message", 35.0)
    """Its link is closed each time."""
    RECORD = ("invalid record", 10.0)
    """Signed by the sender itself, and not what a record may be."""
    RELAYED = ("invalid record of another node", 0.25)
    """Whoever relays has checked it, by the rules of its own release."""
    CHUNK = ("chunk that does not match its hash", 20.0)
    NONSENSE = ("request that makes no sense", 5.0)
    HANDSHAKE = ("failed handshake", 5.0)
    """Of an address, since no key was proven."""
    STALLED = ("handshake that came to a standstill", 0.25)
    """Of an address, too. A path that loses its longest packets does that to honest nodes."""
    UNSUPPORTED = ("unknown kind of message or record", 0.25)
    """Of a later release, perhaps."""
    IMPLAUSIBLE = ("round too early", 0.0)
    """Its clock is wrong, or ours."""

    def __init__(self, _: str, points: float) -> None:
        # The words are for the reader, and keep apart what weighs the same: else it would be one offence.
        self.points = points


def offence_in_record(error: PeerError, *, relayed: bool) -> Offence:
    """Which offence a record is that was refused with `error`. `relayed`: another than its author sent it."""
    match error:
        case SignatureError():
            return Offence.SIGNATURE
        case ImplausibleError():
            return Offence.IMPLAUSIBLE
        case UnsupportedError():
            return Offence.UNSUPPORTED
    return Offence.RELAYED if relayed else Offence.RECORD
