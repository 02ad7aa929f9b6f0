"""The state machine of `history`: when to seal, what to forget, and from which snapshot to start.

It sees its own claims and those of the live members, and asks its adapter for work: `Seal`, `Close`,
`Adopt`. A node that has not joined yet has no claims; its first one is what it adopted.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Close, Effect, Notice, Prefetch, Seal
from gossamer.protocol.history import Claim, agreed, closable_round, contest, genesis_claim, sealed_round
from gossamer.protocol.manifest import Manifest

LOOK_INTERVAL_S = 1.0
JOINING_LOOK_S = 0.1
PREFETCHES_MAX = 3
"""Snapshots that a joiner begins to fetch before enough members agree on one: who changes its claim all the
time cannot make it fetch for ever."""

GONE_AFTER_S = 10.0
"""A snapshot that nobody has claimed for this long is not worth waiting for."""

REMIND_S = 15.0

Claims = tuple[Claim, ...]


class Sealing:
    """Decides about the sealed past of one node."""

    def __init__(self, manifest: Manifest, is_first: bool) -> None:
        """`is_first`: there is nobody to join, so history begins here, with genesis."""
        self._section = manifest.history
        self._genesis = genesis_claim(manifest.genesis.root)
        self._is_first = is_first
        self.claims: Claims = ()
        """The snapshots that we hold, newest first; empty until we have joined."""
        self.adopting: Claim | None = None
        self.floor = 0
        self._asked_to_seal = 0
        self._clocks: deque[tuple[float, int]] = deque()
        self._heard_since: float | None = None
        self._prefetching: Claim | None = None
        self._prefetches = 0
        self._claimed_at = 0.0
        self._differs_since: float | None = None
        self._reminded_at = 0.0
        self._next_look = 0.0

    @property
    def joined(self) -> bool:
        return bool(self.claims)

    def restore(self, claims: Claims, floor: int) -> None:
        """Take over what a previous run held."""
        self.claims = claims
        self.floor = floor

    def sealed(self, claims: Claims) -> None:
        """Our snapshots have changed."""
        self.claims = claims

    def adopted(self, claim: Claim) -> None:
        """Phi is now that snapshot: our history begins there."""
        self.claims = (claim,)
        self.floor = claim.round
        self.adopting = None
        self._asked_to_seal = claim.round
        self._differs_since = None

    def deadline(self) -> float:
        return self._next_look

    def wake(
        self,
        now: float,
        clock: int,
        others: Sequence[Claims],
        quiet: bool,
        contributors: Callable[[], Sequence[Claims]] | None = None,
    ) -> list[Effect]:
        """Look at the members' claims. `quiet`: no payload that we know of is missing here.

        `contributors` gives the claims of those whose deltas are here; without it, all count as such.
        """
        if now < self._next_look:
            return []
        is_choosing = not self.joined and self.adopting is None
        self._next_look = now + (JOINING_LOOK_S if is_choosing else LOOK_INTERVAL_S)
        if self.adopting is not None:
            self._give_up_if_gone(self.adopting, others, now)
            return []
        if not self.joined:
            return self._join(others, now)
        return [
            *self._seal(clock, now),
            *self._close(clock, others),
            *self._settle_difference(others, contributors or (lambda: others), quiet, now),
        ]

    # -- joining

    def _join(self, others: Sequence[Claims], now: float) -> list[Effect]:
        if self._is_first:
            return self._adopt(self._genesis, now)
        witnesses = [claims for claims in others if claims]
        if not witnesses:
            return []
        if self._heard_since is None:
            self._heard_since = now
        if now < self._heard_since + limits.ROSTER_PATIENCE_S:
            return self._prefetch(witnesses, now)
        best = agreed((claim for claims in witnesses for claim in claims), len(witnesses))
        if best is not None:
            return self._adopt(best, now)
        if now - self._reminded_at < REMIND_S:
            return []
        self._reminded_at = now
        return [Notice(f"waiting for {len(witnesses)} members to agree on a snapshot to start from")]

    def _prefetch(self, witnesses: Sequence[Claims], now: float) -> list[Effect]:
        """Begin to fetch what most members claim while we hear of more of them.

        It is adopted only once enough agree on it. If they agree on another, some bytes came for nothing.
        """
        assert self._heard_since is not None
        if now < self._heard_since + limits.PREFETCH_AFTER_S or self._prefetches >= PREFETCHES_MAX:
            return []
        counts = Counter(claim for claims in witnesses for claim in claims)
        best = max(counts, key=lambda claim: (counts[claim], claim))
        before = self._prefetching
        if before is not None and counts[before] and (counts[before] >= counts[best] or best == before):
            return []
        self._prefetching = best
        self._prefetches += 1
        return [Prefetch(best)]

    def _adopt(self, claim: Claim, now: float) -> list[Effect]:
        self.adopting = claim
        self._claimed_at = now
        return [Adopt(claim)]

    def _give_up_if_gone(self, claim: Claim, others: Sequence[Claims], now: float) -> None:
        if self._is_first or any(claim in claims for claims in others):
            self._claimed_at = now
        elif now - self._claimed_at > GONE_AFTER_S:
            self.adopting = None

    # -- once joined

    def _seal(self, clock: int, now: float) -> list[Effect]:
        """A snapshot is due by where the clock stood some seconds ago."""
        self._clocks.append((now, clock))
        settled = 0
        while self._clocks and self._clocks[0][0] <= now - limits.SEAL_SETTLE_S:
            settled = self._clocks.popleft()[1]
        target = sealed_round(settled, self._section)
        if target <= max(self._asked_to_seal, self.claims[0].round):
            return []
        self._asked_to_seal = target
        return [Seal(target)]

    def _close(self, clock: int, others: Sequence[Claims]) -> list[Effect]:
        # Costs little and is most often the end of it: others can only agree on less than what we claim.
        if closable_round(self.claims[0].round, clock, self._section) <= self.floor:
            return []
        everyone = [self.claims, *(claims for claims in others if claims)]
        newest = agreed((claim for claims in everyone for claim in claims), len(everyone))
        if newest is None:
            return []
        floor = closable_round(min(newest.round, self.claims[0].round), clock, self._section)
        if floor <= self.floor:
            return []
        self.floor = floor
        return [Close(floor)]

    def _settle_difference(
        self, others: Sequence[Claims], contributors: Callable[[], Sequence[Claims]], quiet: bool, now: float
    ) -> list[Effect]:
        """Two lineages: ours yields if another claim for our round outweighs it and stays.

        Names are free in an open swarm, so those who never contributed have no voice against our history.
        """
        winner = contest(self.claims[0], (claim for claims in others for claim in claims))
        if winner is None:
            self._differs_since = None
            return []
        if self._differs_since is None:
            self._differs_since = now
        if not quiet or now - self._differs_since < limits.LINEAGE_PATIENCE_S:
            return []
        if contest(self.claims[0], (claim for claims in contributors() for claim in claims)) != winner:
            return []
        text = (
            f"TWO LINEAGES: the swarm's history up to round {winner.round} holds {winner.tokens} tokens, ours"
            f" {self.claims[0].tokens}; starting again from the swarm's snapshot, keeping the open window"
        )
        return [Notice(text), *self._adopt(winner, now)]
