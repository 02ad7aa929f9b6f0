"""Packing on one core: what it saves of all that travels, how fast it is, and where it pays.

Phi and its sums are those of a model that has been trained for some steps: fewer of their bytes can be saved
than of its first parameters. From the ratio and the speeds follows on which lines a packer has the bytes at
the receiver soonest, unpacked.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.measure import best_of, delta_like
from benchmarks.tables import Table
from gossamer.models.registry import build_task
from gossamer.models.task import DataStream
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import to_fixed
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads import FORMS, Form, pack_chunk, split, unpack_chunk

CHUNKS = 8
"""At most, of each kind."""

STEPS = 160
EVERY = 20
"""Steps between two points of the sums."""

RATES = [1e5 * 10 ** (n / 50) for n in range(250)]
"""Of lines, in bytes per second: 0.8 Mbit/s to 77 Gbit/s."""


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Pack and unpack chunks of all kinds: a row for each form that makes them smaller, and one for none."""
    contents = _contents("tiny", EVERY) if quick else _contents("small", STEPS)
    return [row for content, data in contents.items() for row in _rows(content, data, 2 if quick else 7)]


def _contents(preset: str, steps: int) -> dict[str, bytes]:
    """Of all that travels, some chunks each; Phi is a model's of this preset after so many steps."""
    torch.set_num_threads(1)
    task = build_task("text", {"preset": preset, "batch_size": 8, "context": 64})
    model = task.build_model(0)
    made = task.build_optimizer(model)
    optimizers = made if isinstance(made, list | tuple) else [made]
    stream = task.batches(DataStream(seed=0, node_id=b"node"))
    phi = sums = np.empty(0, np.int32)
    for step in range(steps):
        task.loss(model, next(stream)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == 0:
            phi = to_fixed(np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]))
            sums = sums + phi if sums.size else phi
    numel = CHUNK_BYTES_MAX
    noise = to_fixed(np.random.default_rng(0).normal(0, 0.02, numel))
    deltas = {name: CODECS[name].encode(delta_like(numel)) for name in ("int4", "topk", "exact")}
    return {
        "Phi, trained": phi.astype("<i4").tobytes(),
        "Phi, noise": noise.astype("<i4").tobytes(),
        "sums": sums.astype("<i4").tobytes(),
        **deltas,
        "zeros": bytes(4 * numel),
    }


def _rows(content: str, data: bytes, repeats: int) -> list[dict[str, Any]]:
    chunks = [bytes(chunk) for chunk in split(data)][:CHUNKS]
    size = sum(map(len, chunks))
    rows = [{"content": content, "packer": "none", "ratio": 1.0, "pack_s": 0.0, "unpack_s": 0.0}]
    for form in FORMS.values():
        frames = [frame for chunk in chunks if (frame := pack_chunk(chunk, form)) is not None]
        if len(frames) == len(chunks):
            row = {"content": content, "packer": form.packer + (", planes" if form.has_planes else "")}
            row["ratio"] = sum(map(len, frames)) / size
            row["pack_s"] = best_of(partial(_pack, chunks, form), repeats) / size
            row["unpack_s"] = best_of(partial(_unpack, frames), repeats) / size
            rows.append(row)
    for row in rows:
        rates = [rate for rate in RATES if min(rows, key=partial(_takes, rate)) is row]
        row["soonest"] = [rates[0], rates[-1]] if rates else []
    return rows


def _pack(chunks: list[bytes], form: Form) -> None:
    for chunk in chunks:
        pack_chunk(chunk, form)


def _unpack(frames: list[bytes]) -> None:
    for frame in frames:
        unpack_chunk(frame)


def _takes(rate: float, row: dict[str, Any]) -> float:
    """Seconds a byte on a line of so many bytes a second."""
    return float(row["pack_s"] + row["unpack_s"] + row["ratio"] / rate)


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Packers, by what they pack, that some line wants."""
    lines = [
        (
            row["content"],
            row["packer"],
            f"{row['ratio']:.3f}",
            *(f"{1e-6 / s:,.0f} MB/s" if (s := row[key]) else "-" for key in ("pack_s", "unpack_s")),
            _span(row["soonest"]),
        )
        for row in rows
        if row["soonest"]
    ]
    columns = ("chunks of", "packer", "of their size", "pack", "unpack", "soonest on lines")
    return [Table("chunks of 1 MiB, one core", columns, lines, words=2)]


def _span(rates: list[float]) -> str:
    """Bits per second, from the slowest line to the fastest."""
    low, high = (f"{rate * 8e-9:.2g}" for rate in rates)
    if rates[1] == RATES[-1]:
        return "all" if rates[0] == RATES[0] else f"over {low} Gbit/s"
    return f"up to {high} Gbit/s" if rates[0] == RATES[0] else f"{low} to {high} Gbit/s"
