"""Made-up histories: what members claim, and a node that looks at their claims."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from gossamer.protocol.effects import Effect
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Holdings
from gossamer.protocol.history.claims import PeerClaim, genesis_claim
from gossamer.protocol.history.snapshots import Sealing
from gossamer.protocol.membership.member_records import NodeInfo
from gossamer.protocol.records import Claim, Claims
from tests.protocol import builders

MANIFEST = builders.manifest(history={"seal_after": 4, "snapshot_every": 8, "retain": 16})

GENESIS = genesis_claim(MANIFEST.genesis.root)


def claim(round_: int, tokens: int = 0, mark: int = 1) -> Claim:
    return Claim(round_, tokens, bytes([mark]) * 32, bytes([mark]) * 32)


@dataclass
class Told:
    """Made-up `PeerClaims`: unless `heard` is given, all members are contributors."""

    live: Sequence[PeerClaim] = ()
    heard: Sequence[Claims] | None = None
    known: int = 0
    """How many authors are known."""
    lacking: int = 1000
    """The first round whose payloads are not all here."""
    genesis: Claim = GENESIS
    delay_s: float = 0.0

    def members(self) -> Sequence[PeerClaim]:
        return self.live

    def contributors(self) -> Sequence[Claims]:
        return [member.claims for member in self.live] if self.heard is None else self.heard

    def authors(self) -> int:
        return self.known

    def lacks_payloads(self, round_: int, now: float) -> bool:
        return round_ >= self.lacking

    def unusable(self, root: bytes) -> None:
        pass


class Node:
    """A node that looks at members' claims. What its `Sealing` is asked for gives effects."""

    def __init__(self, *, is_first: bool = False, trusted: Sequence[bytes] = (), own_last: int = 0) -> None:
        info = NodeInfo(
            name="", trains=True, incarnation=1, bootstrap=() if is_first else ("a:1",), trusted=trusted
        )
        self.context = replace(builders.context(of=MANIFEST), info=info)
        self.told = Told()
        self.is_stalled = False
        fetcher = Fetcher(lambda blob, size: None, self.context.rng, self.context.outbox)
        fetcher.is_stalled = lambda key, now: self.is_stalled  # type: ignore[method-assign]
        author: Any = SimpleNamespace(last_round=own_last)
        self.sealing = Sealing(
            self.context, cast(Any, self.told), fetcher, Holdings(self.context, fetcher), author
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sealing, name)

    def wake(self, now: float, clock: int, told: Told, *, is_stalled: bool = False) -> list[Effect]:
        self.is_stalled = is_stalled
        vars(self.told).update(vars(told))
        self.sealing.wake(now, clock)
        return self.context.outbox.drain()


sealing_of = Node


def drive(sealing, start, seconds, clock=0, others=(), lacking=1000):
    """Wake it twice a second; returns all effects. `others` are members, or what they claim."""
    members = [one if isinstance(one, PeerClaim) else PeerClaim(one) for one in others]
    ticks = [start + tick / 2 for tick in range(int(seconds * 2) + 1)]
    return [effect for now in ticks for effect in sealing.wake(now, clock, Told(members, lacking=lacking))]


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def joined(*claims, floor=0, own_last=0, extent=10**6, is_first=False):
    """A node that holds claims of an earlier run, and has missed nothing since a round `extent`."""
    sealing = sealing_of(is_first=is_first, own_last=own_last)
    sealing.restore(claims, floor, extent=extent)
    return sealing
