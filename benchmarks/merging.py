"""Merge: parameter-records per second on one core, by rule and codec, the memory that it needs, and what the
averaged model adds."""

import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.goals import Goal
from benchmarks.measure import best_of, copy_seconds, delta_like
from benchmarks.tables import Table
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import codecs
from gossamer.protocol.history.average import points
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge.contributions import figures
from gossamer.protocol.merge.merge import Contribution, RoundMerge, measure
from gossamer.protocol.payloads import Fragment, Payload, TensorSpec, plan
from gossamer.protocol.rules import RULES

RECORDS = 8
CODECS = ("int8", "int4", "topk")


def run(*, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Measure merges of 8 records: speed, norms included, by rule and codec; memory by codec."""
    torch.set_num_threads(1)
    side, repeats = (256, 2) if quick else (2048, 7)
    model = transformer(128, 2, 1000) if quick else transformer(768, 12, 32_000)
    return {
        "speed": [_speed(rule, codec, side, repeats) for rule in RULES for codec in CODECS],
        "memory": [_memory(codec, model) for codec in CODECS],
        "average": [_average(codec, side, repeats) for codec in CODECS],
    }


def transformer(width: int, layers: int, vocabulary: int) -> Fragment:
    """The tensors of a Llama-shaped model, in one fragment: embeddings by `mean`, matrices by `rda`."""
    matrices = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width)}
    matrices |= {"gate": (3 * width, width), "up": (3 * width, width), "down": (width, 3 * width)}
    specs = [
        TensorSpec(f"{layer:02}.{name}", shape, "rda")
        for layer in range(layers)
        for name, shape in matrices.items()
    ]
    return plan([TensorSpec("embedding", (vocabulary, width), "mean"), *specs], 1).fragments[0]


def _contributions(codec: str, fragment: Fragment, deltas: int) -> list[Contribution]:
    """8 records, made of `deltas` different deltas."""
    found = []
    for seed in range(deltas):
        noise = delta_like(max(slot.numel for slot in fragment.slots), seed)
        data = b"".join(codecs.CODECS[codec].encode(noise[: slot.numel]) for slot in fragment.slots)
        payload = Payload(codec, fragment, data)
        found.append((payload, measure(payload)))
    return [
        Contribution(bytes([author]) * 32, 1000, 10, 0, measures.norms, payload.section, measures.sample)
        for author in range(RECORDS)
        for payload, measures in [found[author % deltas]]
    ]


def _merge(contributions: list[Contribution], fragment: Fragment, phi: np.ndarray) -> None:
    """Merge as `node.phi.state` does: into Phi in place, tensor by tensor."""
    merge = RoundMerge(contributions, fragment, Outer())
    for index, slot in enumerate(fragment.slots):
        merge.subtract(index, phi[slot.span])


def _speed(rule: str, codec: str, side: int, repeats: int) -> dict[str, Any]:
    fragment = plan([TensorSpec("w", (side, side), rule)], 1).fragments[0]
    phi = delta_like(fragment.numel)
    copy_s = copy_seconds(phi, repeats)
    contributions = _contributions(codec, fragment, RECORDS)
    data = codecs.CODECS[codec].encode(phi)
    payload, merge = Payload(codec, fragment, data), RoundMerge(contributions, fragment, Outer())
    merge_s = best_of(lambda: _merge(contributions, fragment, phi), repeats)
    total_s = merge_s + RECORDS * best_of(lambda: measure(payload), repeats)
    return {
        "rule": rule,
        "codec": codec,
        "records": RECORDS,
        "parameters": fragment.numel,
        "parameter_records_per_s": RECORDS * fragment.numel / total_s,
        "copies_per_record": total_s / RECORDS / copy_s,
        "figures_share": best_of(lambda: figures(merge), repeats) / total_s,
    }


def _memory(codec: str, fragment: Fragment) -> dict[str, Any]:
    """The peak allocation of a merge of a whole model, beside Phi's 4 bytes per parameter."""
    phi = np.zeros(fragment.numel, dtype=np.int32)
    contributions = _contributions(codec, fragment, 1)
    section_bytes = sum(len(contributions[0].tensor(i)) for i in range(len(fragment.slots)))
    tracemalloc.start()
    try:
        _merge(contributions, fragment, phi)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {
        "codec": codec,
        "parameters": fragment.numel,
        "largest_matrix_share": max(s.numel for s in fragment.slots[1:]) / fragment.numel,
        "peak_share": peak / phi.nbytes,
        "payloads_share": RECORDS * section_bytes / phi.nbytes,
    }


AT_ROUNDS = (256, 1024, 4096, 16384)
"""Rounds from which on the cost of the averaged model is stated: its points lie further and further apart."""


def _average(codec: str, side: int, repeats: int) -> dict[str, Any]:
    """What it takes to carry the sums of the averaged model over one point, from the last snapshot on disk to
    the next one, against merging all rounds from one point to the next."""
    tensors = (TensorSpec("w", (side, side), "rda"),)
    layout = plan(tensors, 1)
    [fragment] = layout.fragments
    phi = delta_like(fragment.numel)
    contributions = _contributions(codec, fragment, RECORDS)
    payload = Payload(codec, fragment, codecs.CODECS[codec].encode(phi))
    merge_s = best_of(lambda: _merge(contributions, fragment, phi), repeats)
    merge_s += RECORDS * best_of(lambda: measure(payload), repeats)
    with tempfile.TemporaryDirectory() as folder:
        chunks = ChunkStore(Path(folder) / "chunks")
        roots = [snapshots.store(phi, chunks) for _ in range(snapshots.SUMS)]
        took = []
        for _ in range(repeats):
            begun = time.process_time()  # without waiting for the disk
            sums = snapshots.read_sums(roots, fragment, layout.snapshot_bytes, chunks)
            sums.current[:] += phi
            for one in sums:
                snapshots.store(one, chunks)
            took.append(time.process_time() - begun)
    apart = {upto: upto - next(iter(points(0, upto - 1))) for upto in AT_ROUNDS}
    return {
        "codec": codec,
        "records": RECORDS,
        "parameters": fragment.numel,
        "shares": {str(upto): min(took) / (rounds * merge_s) for upto, rounds in apart.items()},
    }


def tables(found: dict[str, list[dict[str, Any]]]) -> list[Table]:
    """Speed by rule and codec, memory by codec."""
    speed = [
        (
            row["rule"],
            row["codec"],
            f"{row['parameter_records_per_s'] / 1e6:,.0f} M/s",
            f"{row['copies_per_record']:.1f}",
            f"{row['figures_share']:.1%}",
        )
        for row in found["speed"]
    ]
    memory = [
        (row["codec"], f"{row['peak_share']:.1%}", f"{row['payloads_share']:.0%}") for row in found["memory"]
    ]
    parameters = found["speed"][0]["parameters"] / 1e6
    whole = found["memory"][0]["parameters"] / 1e6
    return [
        Table(
            f"merge of {RECORDS} records of {parameters:.1f} M parameters, one core, norms included",
            ("rule", "codec", "parameter-records", "memory copies a record", "judging members adds"),
            speed,
            words=2,
        ),
        Table(
            f"memory in a merge of {RECORDS} records, transformer of {whole:.1f} M parameters, against Phi",
            ("codec", "merge at its peak", "their payloads, in one fragment"),
            memory,
        ),
        Table(
            f"processor time that the averaged model adds to merging {RECORDS} records a round, by round",
            ("codec", *(f"{upto:,}" for upto in AT_ROUNDS)),
            [
                (row["codec"], *(f"{row['shares'][str(upto)]:.1%}" for upto in AT_ROUNDS))
                for row in found["average"]
            ],
        ),
    ]


def _million_per_s(rule: str, codec: str, found: dict[str, Any]) -> float:
    row = next(row for row in found["speed"] if (row["rule"], row["codec"]) == (rule, codec))
    return float(row["parameter_records_per_s"]) / 1e6


GOALS = (
    Goal(
        what="merge 8 records of int4 (rda) on one core",
        at_least=250,
        unit="M parameter-records/s",
        measured=lambda found: _million_per_s("rda", "int4", found),
    ),
    Goal(
        what="merge 8 records of topk (rda) on one core",
        at_least=1000,
        unit="M parameter-records/s",
        measured=lambda found: _million_per_s("rda", "topk", found),
    ),
    Goal(
        what="memory of a merge beside the payloads, against the model",
        at_most=10,
        unit="%",
        measured=lambda found: 100 * max(row["peak_share"] for row in found["memory"]),
    ),
    Goal(
        what="processor time that the averaged model adds to merging, after 1,024 rounds, int4",
        at_most=5,
        unit="%",
        measured=lambda found: 100 * found["average"][CODECS.index("int4")]["shares"]["1024"],
    ),
)
