"""Made-up histories: what members claim, and a node that looks at their claims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.protocol.claims import Claim, Claims
from gossamer.protocol.history.peer_claims import PeerClaim
from gossamer.protocol.history.snapshots import Sealing
from tests.protocol import builders

MANIFEST = builders.manifest(history={"seal_after": 4, "snapshot_every": 8, "retain": 16})


def claim(round_: int, tokens: int = 0, mark: int = 1) -> Claim:
    return Claim(round_, tokens, bytes([mark]) * 32, bytes([mark]) * 32)


@dataclass
class Told:
    """Made-up `PeerClaims`: unless `heard` is given, all members are contributors."""

    live: Sequence[PeerClaim] = ()
    heard: Sequence[Claims] | None = None
    known: int = 0
    """How many authors are known."""
    lacking: Callable[[int], float] = lambda round_: 0.0

    def members(self) -> Sequence[PeerClaim]:
        return self.live

    def contributors(self) -> Sequence[Claims]:
        return [member.claims for member in self.live] if self.heard is None else self.heard

    def authors(self) -> int:
        return self.known

    def share_lacking(self, round_: int, now: float) -> float:
        return self.lacking(round_)


def sealing_of(*, is_first=False, trusted=(), own_last=0):
    return Sealing(MANIFEST, is_first=is_first, trusted=trusted, own_last=lambda: own_last)


def drive(sealing, start, seconds, clock=0, others=(), lacking=0.0):
    """Wake it twice a second; returns all effects."""
    result = []
    for tick in range(int(seconds * 2) + 1):
        result += sealing.wake(
            start + tick / 2, clock, Told(list(map(PeerClaim, others)), lacking=lambda round_: lacking)
        )
    return result


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def joined(*claims, floor=0, own_last=0):
    """A node that holds claims of an earlier run, and has missed nothing since."""
    sealing = sealing_of(is_first=False, own_last=own_last)
    sealing.restore(claims, floor, extent=10**6)
    return sealing
