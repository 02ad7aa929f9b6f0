"""A first model, random records of several authors, their payloads on disk, and the Phi that results."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge.merge import merge_round
from gossamer.protocol.payloads import split_payload
from gossamer.protocol.records import Delta
from tests.protocol.builders import LAYOUT, SMALL, contribution, identity, random_delta

ROUNDS = range(1, 7)
AUTHORS = range(4)
OWN = identity(0).node_id


class World:
    """A random Phi_0, and random deltas of several authors and rounds, with their payloads on disk."""

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self.phi_0 = rng.integers(-(1 << 22), 1 << 22, LAYOUT.numel).astype(np.int32)
        self.chunks = ChunkStore(folder)
        self.payloads: dict[bytes, bytes] = {}
        self.deltas = [self.make(rng, author, round_) for round_ in ROUNDS for author in AUTHORS]

    def make(self, rng: np.random.Generator, author: int, round_: int, **changes: object) -> Delta:
        """Make a delta, and put its payload on disk."""
        delta, payload = random_delta(
            rng, identity(author), round_, steps=int(rng.integers(1, 30)), codec="int4", **changes
        )
        self.keep(delta, payload)
        return delta

    def keep(self, delta: Delta, payload: bytes) -> None:
        self.payloads[delta.record_id] = payload
        for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
            self.chunks.put(blob, piece)

    def state(self) -> PhiState:
        return PhiState(SMALL, self.phi_0.copy(), self.chunks, OWN)

    def fold(self, deltas: list[Delta]) -> Ints:
        """Phi of a set of records from scratch, by the protocol's own `merge_round`."""
        ledger = Ledger()
        for delta in deltas:
            ledger.add(delta)
        phi = self.phi_0.copy()
        for round_ in ledger.rounds():
            fragment = LAYOUT.of_round(round_)
            counted = []
            for delta in ledger.valid(round_):
                try:
                    counted.append(contribution(delta, self.payloads[delta.record_id], LAYOUT))
                except PayloadError:
                    pass
            phi[fragment.offset : fragment.offset + fragment.numel] -= merge_round(
                counted, fragment, SMALL.outer
            )
        return phi


def arrive(state: PhiState, ledger: Ledger, deltas: list[Delta]) -> None:
    """Add records one after another, and merge each at once."""
    for delta in deltas:
        ledger.add(delta)
        state.merge(delta.round, tuple(ledger.valid(delta.round)))
