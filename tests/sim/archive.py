"""One node's past: carries out what the core decides about it (adopt and seal snapshots, close rounds).

It does in virtual time what the daemon's archive does in a worker. A snapshot is Phi with the later rounds
taken back. When a record arrives late for a sealed round, the snapshot is written again after a moment. The
snapshot is on disk, unsynced, before the claim to it is, synced.
"""

from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.average import Sums, mean
from gossamer.protocol.history.folds import folds_bytes
from gossamer.protocol.limits import CLAIMS_MAX
from gossamer.protocol.payloads import HASH_BYTES, root_of
from gossamer.protocol.records import Claim, Delta
from tests.sim.disk import DamagedChunkError
from tests.sim.fold import Base, Fold, Rounds

if TYPE_CHECKING:
    from tests.sim.node import Node

LATE_SETTLE_S = 2.0
LEASE_S = 60.0
RETRY_S = 0.5


class Archive:
    """Carries out Seal, Close, Adopt and Prefetch for one life of a node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self.claims: tuple[Claim, ...] = ()
        self._wanted: Claim | None = None
        self._seal_round = 0
        self._late = 0
        self.sealed: Rounds = {}
        """The records in the newest snapshot, above the base."""
        self._used: dict[bytes, float] = {}

    # -- at the start

    def restore(self, stored: list[Delta]) -> Fold | None:
        """The fold at the newest snapshot on disk; None if there is none, or it is damaged."""
        disk, audit = self._node.disk, self._node.stage.audit
        if not disk.claims:
            return None
        newest = disk.claims[0]
        rounds: Rounds = {}
        for delta in sorted(stored, key=lambda d: (d.round, d.author)):
            if delta.record_id in disk.covered:
                rounds[delta.round] = (*rounds.get(delta.round, ()), delta)
        try:
            phi = self._load(newest.root)
        except DamagedChunkError:
            return None
        fold = self._fold(phi, disk.base, rounds, audit.history(disk.base.chain))
        if fold.chain(newest.round) != newest.digest:
            return None
        self.claims, self.sealed = disk.claims, rounds
        if self._lacking(newest)[1]:
            self._wanted = newest
        return fold

    @property
    def is_whole(self) -> bool:
        """Whether the newest snapshot is here with its sums."""
        return self._wanted is None or self._wanted not in self.claims

    def _load(self, root: bytes) -> Ints:
        disk = self._node.disk
        return np.frombuffer(disk.get(disk.get(root)[:HASH_BYTES]), dtype=np.int32)

    def sums(self) -> Sums:
        """Those of the newest snapshot. Raises DamagedChunkError."""
        disk, claim = self._node.disk, self.claims[0]
        index = disk.get(claim.root)
        if not claim.round:
            nothing = np.zeros(self._node.stage.layout.numel, np.int32)
            return Sums(nothing, nothing.copy())
        blobs = (index[at : at + HASH_BYTES] for at in (HASH_BYTES, 2 * HASH_BYTES))
        return Sums(*(np.frombuffer(disk.get(blob), dtype=np.int32) for blob in blobs))

    def _fold(self, phi: Ints, base: Base, rounds: Rounds, below: Rounds) -> Fold:
        stage, join = self._node.stage, self._node.disk.join
        return Fold(stage.manifest, phi, join, stage.merge_round, base=base, rounds=rounds, below=below)

    # -- adopting

    def fetch(self, claim: Claim) -> None:
        """Fetch a snapshot, and start from it once the core adopts it."""
        self._wanted = claim
        self.look()

    def look(self) -> None:
        """Go on with whatever work can go on now."""
        if self._wanted is not None and self._wanted != self._node.core.sealing.sought:
            self._wanted = self._node.core.sealing.sought  # no member has it any more: our own goes on
        if self._wanted is not None:
            self._go_on_with(self._wanted)
        else:
            self._seal_if_settled()

    def _go_on_with(self, claim: Claim) -> None:
        """Ask for what is missing of a snapshot; start from it once its Phi is here, and claim it once all
        of it is."""
        is_phi_here, lacking = self._lacking(claim)
        if lacking:
            self._node.soon(RETRY_S, self._retry, claim)
            self._node.dispatch(ev.Need(claim.key, lacking))
        elif claim in self.claims:
            self._wanted = None
            self._node.dispatch(ev.Sealed(self.claims))
        if is_phi_here and claim not in self.claims and claim == self._node.core.sealing.adopting:
            self._begin_at(claim)

    def _lacking(self, claim: Claim) -> tuple[bool, tuple[tuple[bytes, int], ...]]:
        """Whether a snapshot's Phi is here, and what is missing: its index, its Phi, or else its sums. Each
        is a chunk."""
        disk, size = self._node.disk, self._node.stage.layout.snapshot_bytes
        length = HASH_BYTES + (2 * HASH_BYTES + folds_bytes(self._node.stage.manifest) if claim.round else 0)
        if not disk.fits(claim.root, length):
            return False, ((claim.root, length),)
        index = disk.get(claim.root)
        blobs = [
            index[at : at + HASH_BYTES] for at in range(0, HASH_BYTES * (3 if claim.round else 1), HASH_BYTES)
        ]
        lacking = {blob: size for blob in blobs if not disk.fits(blob, size)}
        if blobs[0] in lacking:
            return False, ((blobs[0], size),)
        return True, tuple(lacking.items())

    def _retry(self, claim: Claim) -> None:
        if claim == self._wanted:
            self.look()

    def _begin_at(self, claim: Claim) -> None:
        node = self._node
        phi = self._load(claim.root)
        base = Base(claim.round, claim.digest, claim.tokens, node.disk.get(claim.root)[3 * HASH_BYTES :])
        self._seal_round, self._late = claim.round, 0
        self.claims, self.sealed = (claim,), {}
        node.disk.begin_at(claim, base, node.core.own_last)
        below = node.stage.audit.adopted(node, claim, node.stage.manifest.genesis.root)
        node.adopted_at = node.stage.loop.now
        node.begin(self._fold(phi, base, {}, below))
        node.dispatch(ev.Adopted(claim))
        self.look()

    # -- sealing

    def seal(self, round_: int) -> None:
        """Snapshot everything up to a round, once all changed rounds up to it are merged."""
        self._seal_round = round_
        self._seal_if_settled()

    def merged(self, round_: int) -> None:
        """A round was merged. If it was sealed already, its snapshot is soon written again."""
        node = self._node
        if node.core.merges.reach > max(node.disk.reach, node.core.ledger.horizon):
            node.disk.reach = node.core.merges.reach
        if self.claims and round_ <= self.claims[0].round:
            self._late += 1
            self._node.soon(LATE_SETTLE_S, self._reseal, self._late)

    def _reseal(self, late: int) -> None:
        if late == self._late and self.claims and self._wanted is None:
            self._seal(self.claims[0].round)

    def _seal_if_settled(self) -> None:
        ready = self._wanted is None and self.claims and self._seal_round > self.claims[0].round
        if ready and not self._node.core.merges.waiting(self._seal_round):
            self._seal(self._seal_round)

    def _seal(self, round_: int) -> None:
        node, now = self._node, self._node.stage.loop.now
        if node.fold is None:
            return
        if node.core.merges.waiting(round_):
            node.soon(RETRY_S, self._reseal, self._late)
            return
        try:
            prefix = node.fold.prefix(round_)
            sums = prefix.sums(round_, self.claims[0].round, self.sealed, self.sums())
        except DamagedChunkError as error:
            node.chunk_damaged(error.blob)
            node.dispatch(ev.Need(self.claims[0].key, self._lacking(self.claims[0])[1]))
            node.soon(RETRY_S, self._reseal, self._late)
            return
        files = [one.tobytes() for one in (prefix.phi, *sums)]
        hashes = [sha256(data).digest() for data in files]
        index = [*hashes, prefix.folds(round_).pack(node.stage.manifest)]
        claim = Claim(round_, prefix.tokens(), prefix.chain(round_), root_of(index))
        node.stage.audit.sealed(node, claim, prefix)
        if claim == self.claims[0]:
            return
        for blob, data in zip(hashes, files, strict=True):
            node.disk.put(blob, data, now)
        node.disk.put(claim.root, b"".join(index), now)
        self.claims, self.sealed = (claim, *self._kept(claim, now)), dict(prefix.rounds)
        node.disk.add_snapshot(
            self.claims, (d.record_id for deltas in prefix.rounds.values() for d in deltas)
        )
        node.dispatch(ev.Sealed(self.claims))

    def average(self, upto: int) -> Ints:
        """The averaged model as of the newest round merged, `upto`. Raises DamagedChunkError."""
        assert self._node.fold is not None
        prefix = self._node.fold.prefix(upto)
        sums = prefix.sums(upto, self.claims[0].round, self.sealed, self.sums())
        return mean(prefix.phi, sums, upto)

    def _kept(self, claim: Claim, now: float) -> list[Claim]:
        older = [known for known in self.claims if known.root != claim.root]
        return [
            known
            for place, known in enumerate(older)
            if (place == 0 and known.round < claim.round)
            or now - self._used.get(known.root, -LEASE_S) < LEASE_S
        ][: CLAIMS_MAX - 1]

    def touch(self, blob: bytes) -> None:
        """A chunk was asked for."""
        self._used[blob] = self._node.stage.loop.now

    # -- closing

    def close(self, effect: fx.Close) -> None:
        """Drop the rounds that are closed."""
        node = self._node
        if node.fold is None:
            return
        if effect.round > node.fold.base.round:
            node.fold.close_up_to(effect.round)
            node.stage.audit.closed(node.fold)
            node.disk.close_up_to(node.fold.base, node.core.own_last)
        node.disk.forget(delta for delta in effect.deltas if delta.round > effect.round)
        # Chunks are named by their content, and an open record may have the same ones as a closed record.
        needed = {blob for delta in node.core.ledger for blob in delta.body.chunks}
        for blob in {blob for delta in effect.deltas for blob in delta.body.chunks} - needed:
            node.disk.drop(blob)
