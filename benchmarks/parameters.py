"""Scale by parameters: what the arrays of one node cost as its model grows.

Real arrays, in 16 fragments: how long publishing, merging and applying one fragment take on one core, and how
much memory is resident. Phi is a file of its full size, mapped into memory. The trainer's arrays are those of
one fragment, since it works on one at a time. Each size runs in a process of its own.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import plots
from benchmarks.goals import amount
from benchmarks.growth import bends, in_fresh_process
from benchmarks.tables import Table
from gossamer.bootstrap import manifests
from gossamer.models.task import named_tensors
from gossamer.node.daemon.phi import snapshots
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Outer
from gossamer.protocol.merge.merge import Contribution, RoundMerge, measure
from gossamer.protocol.payloads import Fragment, Payload, payload_length

SIZES, QUICK = (10**6, 10**7, 10**8, 10**9), (10**5,)
FRAGMENTS = 16
RECORDS = 4
COSTS = {"publish_s": "publish", "merge_s": "merge", "apply_s": "apply"}


def run(*, quick: bool) -> list[dict[str, Any]]:
    """One row for each number of parameters."""
    return [in_fresh_process(row, count) for count in (QUICK if quick else SIZES)]


def row(parameters: int) -> dict[str, Any]:
    """Take one fragment of a model of this many parameters through a round."""
    torch.set_num_threads(1)
    resident = psutil.Process().memory_info().rss
    side = min(1024, isqrt(parameters // FRAGMENTS))
    layers = round(parameters / FRAGMENTS / side**2)
    model = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False) for _ in range(layers))
    manifest = manifests.describe(model, name="scale", fragments=1)
    fragment = manifest.plan().fragments[0]
    outer = OuterLoop(dict(named_tensors(model)), manifest)
    room = memoryview(bytearray(payload_length(CODECS[manifest.outer.codecs[0].name], fragment)))
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        phi = np.memmap(Path(folder) / "phi", dtype=np.int32, mode="w+", shape=(fragment.numel * FRAGMENTS,))
        view: Ints = phi[: fragment.numel]
        found: dict[str, float] = {}
        for round_ in (1, 2):  # in the second all memory is there already
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.add_(1e-3)
            outer.step(1, 1.0)
            publish = partial(outer.publish, 0, round_, room)
            found["publish_s"] = _seconds(publish)
            payload = Payload(manifest.outer.codecs[0].name, fragment, bytes(room))
            merge = partial(_merge, payload, fragment, manifest.outer, view)
            found["merge_s"] = _seconds(merge) / RECORDS
            found["apply_s"] = _seconds(partial(outer.apply, 0, view, round_))
        digest = partial(snapshots.digest, phi)
        found["digest_s"] = min(_seconds(digest), _seconds(digest))  # the first reads pages of the file
        resident = psutil.Process().memory_info().rss - resident
    return {
        "parameters": fragment.numel * FRAGMENTS,
        "fragment": fragment.numel,
        "payload_bytes": payload.size,
        "resident_bytes": resident,
        **found,
    }


def _merge(payload: Payload, fragment: Fragment, outer: Outer, view: Ints) -> None:
    """Merge records that are read for the first time."""
    found = [measure(payload) for _ in range(RECORDS)]
    contributions = [
        Contribution(bytes([author]) * 32, 1000, 10, 0, measures.norms, payload.section, measures.sample)
        for author, measures in enumerate(found)
    ]
    merge = RoundMerge(contributions, fragment, outer)
    for index, slot in enumerate(fragment.slots):
        merge.subtract(index, view[slot.span])


def _seconds(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Costs by parameters, and where they bend."""
    lines = [
        (
            amount(row["parameters"] / 1e6, "M"),
            f"{row['payload_bytes'] / 1e6:,.2f} MB",
            *(f"{1000 * row[cost]:,.1f} ms ({1e9 * row[cost] / row['fragment']:.1f})" for cost in COSTS),
            f"{row['digest_s']:,.2f} s",
            f"{row['resident_bytes'] / 2**20:,.0f} MiB",
        )
        for row in rows
    ]
    title = (
        f"one of {FRAGMENTS} fragments through a round (ns a parameter); {bends(rows, 'parameters', COSTS)}"
    )
    columns = ("parameters", "payload", "publish", "merge a record", "apply", "digest of Phi", "resident")
    return [Table(title, columns, lines)]


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Costs per parameter over parameters."""
    figure, (axes,) = plots.axes(height=2.8)
    for key, name in COSTS.items():
        times = [1e9 * row[key] / row["fragment"] for row in rows]
        axes.semilogx([row["parameters"] for row in rows], times, "o-", label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters")
    axes.set_ylabel("ns a parameter")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "parameters.svg")
