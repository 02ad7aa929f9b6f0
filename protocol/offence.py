"""What kinds of wrong a peer can do, and how much each weighs.

The points of an offence depend on who can commit it. What only a liar or a broken build does weighs much.
What a wrong clock or another release does weighs next to nothing: no peer is turned away for either.
"""

from enum import Enum

from gossamer.protocol.errors import ImplausibleError, PeerError, SignatureError, UnsupportedError


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
    UNSUPPORTED = ("unknown kind of message or record", 0.25)
    """Perhaps of a later release."""
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
        case UnsupportedError():
            return Offence.UNSUPPORTED
    return Offence.RELAYED if relayed else Offence.RECORD
