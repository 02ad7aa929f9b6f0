"""Made-up histories: what members claim, and a node that looks at it."""

from gossamer.protocol.claims import Claim
from gossamer.protocol.history.joining import Witness
from gossamer.protocol.history.sealing import Sealing
from tests.protocol import builders

MANIFEST = builders.manifest(history={"seal_after": 4, "snapshot_every": 8, "retain": 16})


def claim(round_: int, tokens: int = 0, mark: int = 1) -> Claim:
    return Claim(round_, tokens, bytes([mark]) * 32, bytes([mark]) * 32)


def drive(sealing, start, seconds, clock=0, others=(), lacking=0.0):
    """Wake it twice a second; returns everything it asked for."""
    result = []
    for tick in range(int(seconds * 2) + 1):
        result += sealing.wake(start + tick / 2, clock, list(map(Witness, others)), lambda round_: lacking)
    return result


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def joined(*claims, floor=0, own_last=0):
    """As after an earlier run that has missed nothing."""
    sealing = Sealing(MANIFEST, is_first=False, own_last=lambda: own_last)
    sealing.restore(claims, floor, extent=10**6)
    return sealing
