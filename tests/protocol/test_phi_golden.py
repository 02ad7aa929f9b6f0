"""Phi of a recorded ledger, to the bit: every codec, every averaging rule, windows of unequal length.

A change of these digests splits every swarm that is running: nodes with the same records would hold
different models. They are never written anew for a refactoring.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from gossamer.protocol.history.claims import chain, round_digest
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import merge_round
from gossamer.protocol.payloads import TensorSpec
from gossamer.protocol.records import Delta
from tests.protocol import builders

TENSORS = (
    TensorSpec("embedding", (40, 10), "mean"),
    TensorSpec("matrix", (64, 33), "rda"),
    TensorSpec("hostile", (16, 9), "centered-clip"),
    TensorSpec("norm", (7,), "mean"),
    TensorSpec("scale", (), "rda"),
)
ROUNDS, AUTHORS = 8, 4

GOLDEN = {
    "exact": "666af1d7fb0f54eb",
    "int8": "fb7012ad8608aef1",
    "int4": "aa0da85ebea35751",
    "int2": "d0407fb6669064ee",
    "topk8": "830910afffd9abc6",
    "topk16": "3a93750b9b7bc012",
    "topk": "5e71ae4cfb805f51",
}
RECORDS = "68e39241d324b8b2"


def ledger(codec: str) -> tuple[list[tuple[Delta, bytes]], Manifest]:
    """The recorded ledger: `AUTHORS` deltas a round with their payloads, all from fixed seeds."""
    manifest = builders.manifest(TENSORS, 2, outer=builders.one_rung(codec))
    rng = np.random.Generator(np.random.PCG64(7))
    deltas = [
        builders.random_delta(
            rng,
            builders.identity(author),
            round_,
            of=manifest,
            codec=codec,
            magnitude=1 << (10 + author),
            tokens=1000 + 370 * author,
            steps=3 + author,
            base=max(-(round_ % 2), round_ - 2 * (1 + author % 3)),
        )
        for round_ in range(1, ROUNDS + 1)
        for author in range(AUTHORS)
    ]
    return deltas, manifest


@pytest.mark.parametrize("codec", GOLDEN)
def test_the_model_of_a_recorded_ledger(codec: str) -> None:
    deltas, manifest = ledger(codec)
    layout = manifest.plan()
    phi = np.arange(layout.numel, dtype=np.int32) * 65_537
    for round_ in range(1, ROUNDS + 1):
        fragment = layout.of_round(round_)
        contributions = [
            builders.contribution(delta, payload, layout)
            for delta, payload in deltas
            if delta.round == round_
        ]
        view = phi[fragment.offset : fragment.offset + fragment.numel]
        view -= merge_round(contributions, fragment, manifest.outer)
    assert sha256(phi.astype("<i4").tobytes()).hexdigest()[:16] == GOLDEN[codec]


def test_the_digest_of_a_recorded_ledger() -> None:
    """Ed25519 signs deterministically, so record ids and the chain over them are pinned too."""
    deltas, _ = ledger("int8")
    digest = bytes(32)
    for round_ in range(1, ROUNDS + 1):
        digest = chain(digest, round_, round_digest(d.record_id for d, _ in deltas if d.round == round_))
    assert digest.hex()[:16] == RECORDS
