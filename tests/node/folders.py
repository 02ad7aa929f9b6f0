"""Nodes' folders as a daemon leaves them, made without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gossamer.bootstrap import manifests
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.restore import replay
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import GENESIS, Base, RecordStore
from gossamer.node.home import Home
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import split_payload
from gossamer.protocol.records import Claim, Delta
from tests.protocol.builders import identity, random_delta


def text_model(*, context: int = 16, fragments: int = 1, seed: int = 0) -> tuple[Manifest, Ints]:
    """The manifest of a small text swarm and its first model, int32[numel]."""
    return manifests.create(
        name="n",
        task="text",
        options={"preset": "tiny", "context": context},
        codec="int8",
        every_steps=4,
        every_seconds=0.0,
        fragments=fragments,
        seed=seed,
    )


class Folder:
    """A node's folder that holds the swarm's first model, int32[numel]."""

    def __init__(self, root: Path, manifest: Manifest, phi: Ints) -> None:
        self.manifest = manifest
        self.home = Home(root)
        self.home.create()
        self.home.adopt(manifest)
        self.chunks = ChunkStore(self.home.chunks_path)
        self.deltas: list[Delta] = []
        with self.records() as store:
            store.add_snapshot(Claim(0, 0, GENESIS.chain, snapshots.store(phi, self.chunks)), (), ())

    @contextmanager
    def records(self) -> Iterator[RecordStore]:
        store = RecordStore(self.home.ledger_path, self.manifest.swarm_id)
        try:
            yield store
        finally:
            store.close()

    def add(self, *made: tuple[Delta, bytes]) -> None:
        """Store deltas with their payloads."""
        for delta, payload in made:
            for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
                self.chunks.put(blob, bytes(piece))
            self.deltas.append(delta)
        with self.records() as store:
            store.add([delta for delta, _ in made])

    def state(self, *, upto: int) -> PhiState:
        """A state with all deltas up to a round merged."""
        state = replay(self.home)[1]
        for round_ in {delta.round for delta in self.deltas if delta.round > upto}:
            state.merge(round_, ())
        return state

    def seal(self, round_: int) -> Claim:
        """Write the snapshot of a round, and keep the one before, as the archive does: commit, then drop."""
        state = self.state(upto=round_)
        with self.records() as store:
            before = store.load_history().claims
            claim = Claim(round_, state.tokens, state.chain(), sealed(state, round_, before[0], self.chunks))
            merged = set(state.merged_ids())
            covered = [delta for delta in self.deltas if delta.record_id in merged]
            store.add_snapshot(claim, covered, [old.root for old in before[:1]])
        for old in before[1:]:
            hashes, *_ = snapshots.read_index(old.root, self.manifest.plan().snapshot_bytes, self.chunks)
            for blob in (old.root, *hashes):
                self.chunks.drop(blob)
        return claim

    def close(self, round_: int) -> None:
        """Drop the records up to a round, and their payloads."""
        state = self.state(upto=round_)
        with self.records() as store:
            store.close_up_to(Base(round_, state.chain(), state.tokens), own_last=0)
        for delta in self.deltas:
            if delta.round <= round_:
                for blob in delta.body.chunks:
                    self.chunks.drop(blob)

    def begin_at(self, claim: Claim, other: Folder) -> None:
        """Start from the snapshot in another node's folder, as a joiner does."""
        for blob in other.chunks.blobs:
            self.chunks.put(blob, other.chunks.get(blob))
        with self.records() as store:
            store.begin_at(claim, own_last=0)


def sealed(state: PhiState, round_: int, before: Claim, chunks: ChunkStore) -> bytes:
    """Write the snapshot of a round, after the one before, as the archive does; returns its root."""
    layout = state._manifest.plan()
    _, sums, _ = snapshots.read_index(before.root, layout.snapshot_bytes, chunks)
    writer = snapshots.SnapshotWriter(sums, layout, chunks)
    for fragment in layout.fragments:
        phi, rounds = state.prefix(fragment, round_)
        sums = state.sums(fragment, round_, phi, rounds)
        writer.add(fragment, phi, sums)
    merged = {number: deltas for number, deltas in state._merged.items() if number <= round_}
    return writer.finish(round_, state.base.folds_with(round_, merged, state._manifest))


def some_deltas(rng: np.random.Generator, manifest: Manifest, rounds: int) -> list[tuple[Delta, bytes]]:
    """Three members' deltas for each round from 1 on, with their payloads."""
    return [
        random_delta(rng, identity(author), round_, of=manifest)
        for round_ in range(1, rounds + 1)
        for author in range(3)
    ]
