"""An archive beside a state, and one of a model whose snapshots are fetched chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.archive import Archive
from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.node.daemon.phi.snapshots import SnapshotShelf
from gossamer.node.daemon.phi.state import PhiState, Snapshot
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import GENESIS, Rounds
from gossamer.protocol.effects import Adopt, Seal
from gossamer.protocol.events import Event
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.average import Sums
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.payloads import Fragment, TensorSpec, root_of
from gossamer.protocol.records import Claim
from tests.node.full_disk import disk_of
from tests.node.world import OWN, World
from tests.protocol.builders import SMALL, manifest


def delta(*chunks: bytes) -> Any:
    """A stand-in for a delta of round 1."""
    body = SimpleNamespace(chunks=tuple(sha256(chunk).digest() for chunk in chunks))
    return SimpleNamespace(body=body, round=1, record_id=b"".join(body.chunks))


NOTHING_ELSE: dict[str, Any] = {
    "holdings": SimpleNamespace(revoked=[]),
    "sealing": SimpleNamespace(adopting=None, sought=None, joined=True, is_in_a_hurry=False),
    "merges": SimpleNamespace(reach=0, unmerged=0, behind=0, ready=True, waiting=lambda upto: []),
}
"""Attributes of a core that has joined."""


def core_with(ledger: Ledger, **changes: Any) -> Any:
    """A stand-in for a core that has joined, with what an archive and a real `MergeLoop` look at."""
    usual = {
        "manifest": SMALL,
        "layout": SMALL.plan(),
        "own_last": 0,
        "identity": SimpleNamespace(node_id=OWN),
        "roster": Roster(OWN),
        "fetcher": SimpleNamespace(wants=SimpleNamespace(any_has_holder=0)),
        **NOTHING_ELSE,
    }
    return SimpleNamespace(ledger=ledger, **{**usual, **changes})


def merging_of(core: Any) -> MergeLoop:
    """A merge loop without a trainer."""
    nobody: Any = SimpleNamespace(is_free=lambda fragment: False)
    return MergeLoop(
        core,
        nobody,
        lambda event: None,
        lambda blob: None,
        lambda merge, found, has_changed: None,
        lambda: None,
    )


class Sealing:
    """An archive, and the state that it asks for one fragment after another."""

    def __init__(self, state: PhiState, chunks: ChunkStore, of: Manifest = SMALL) -> None:
        self.state = state
        self.base = state.base
        self.is_reached = True
        """Whether the swarm has reached all rounds that wait to be merged."""
        self.between: Callable[[Fragment], None] = lambda fragment: None
        """Called after each fragment that the archive asked for."""
        self.told: list[Event] = []
        self.covered: list[list[bytes]] = []
        self.shelf = SnapshotShelf(chunks, of.plan().snapshot_bytes)
        self.shelf.restore([Claim(0, 0, GENESIS.chain, snapshots.store(state.phi, chunks))])
        records = SimpleNamespace(
            add_snapshot=lambda claim, covered, keep: self.covered.append(
                sorted(delta.record_id for delta in covered)
            )
        )
        records.close_up_to = lambda base, own_last, gone: None
        self.core: Any = SimpleNamespace(
            manifest=of,
            layout=of.plan(),
            ledger=Ledger(),
            own_last=0,
            holdings=SimpleNamespace(revoked=[]),
            sealing=SimpleNamespace(adopting=None, sought=None, joined=True, is_in_a_hurry=False),
            merges=SimpleNamespace(reach=0),
        )
        self.disk = disk_of(chunks._root)
        self.archive = Archive(
            self.core,
            self,  # type: ignore[arg-type]
            chunks,
            records,  # type: ignore[arg-type]
            self.disk,
            self.shelf,
            self.told.append,
        )

    @classmethod
    def of_world(cls, world: World) -> Sealing:
        """One whose ledger has all of a world's records; none is merged yet."""
        sealing = cls(world.state(), world.chunks)
        for one in world.deltas:
            sealing.core.ledger.add(one)
        return sealing

    async def look(self) -> None:
        """Have the archive do one thing, if there is any, and sweep."""
        for _ in range(2):
            await self.archive._one_thing()

    async def settled(self, round_: int) -> bool:
        return self.is_reached

    async def prefix(self, fragment: Fragment, upto: int) -> tuple[Ints, Rounds, Sums | None]:
        phi, rounds = self.state.prefix(fragment, upto)
        sums = self.state.sums(fragment, upto, phi, rounds)
        self.between(fragment)
        return phi, rounds, sums

    def note_sealed(self, sealed: Snapshot) -> None:
        self.state.note_sealed(sealed)

    async def close_up_to(self, floor: int, may_close: Callable[[], bool]) -> bool:
        if is_closed := may_close():
            self.state.close_up_to(floor)
            self.base = self.state.base
        return is_closed

    def adopt(self, claim: Claim | None) -> None:
        """Have the core want this snapshot, or none any more."""
        self.core.sealing.adopting = self.core.sealing.sought = claim
        if claim is not None:
            self.archive.carry_out(Adopt(claim))

    async def seal(self, round_: int) -> Claim:
        self.archive.carry_out(Seal(round_))
        await self.archive._one_thing()
        return self.shelf.claims[0]


def merge_all(state: PhiState, deltas: list[Any]) -> None:
    for round_ in sorted({delta.round for delta in deltas}):
        state.merge(round_, tuple(d for d in deltas if d.round == round_))


LARGE = manifest((TensorSpec("w", (3 * CHUNK_BYTES_MAX // 4,), "mean"),), fragments=1)
"""A manifest of a model whose snapshots have three chunks."""


class Fetching(Sealing):
    """An archive of a model whose snapshots are fetched chunk by chunk."""

    def __init__(self, chunks: ChunkStore) -> None:
        self.chunks = chunks
        super().__init__(PhiState(LARGE, np.zeros(LARGE.plan().numel, np.int32), chunks, OWN), chunks, LARGE)

    def claim(self, *letters: bytes, index: bool = True) -> Claim:
        """A claim of a snapshot whose chunks hold one letter each; those in upper case are here already."""
        pieces = [letter.lower() * CHUNK_BYTES_MAX for letter in letters]
        hashes = [sha256(piece).digest() for piece in pieces]
        sums = snapshots.store(np.ones(LARGE.plan().numel, np.int32), self.chunks)
        for letter, blob, piece in zip(letters, hashes, pieces, strict=True):
            if letter.isupper():
                self.chunks.put(blob, piece)
        hashes += [sums, sums]
        if index:
            self.chunks.put(root_of(hashes), b"".join(hashes))
        return Claim(8, 1, bytes(32), root_of(hashes))

    def here(self) -> str:
        """The letters of the chunks on disk."""
        return "".join(x for x in "abcdefg" if sha256(x.encode() * CHUNK_BYTES_MAX).digest() in self.chunks)
