"""Codecs: size, error and speed on one core, and what lz4 would add to them."""

from typing import Any

import lz4.block
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import best_of, copy_seconds, delta_like
from gossamer.node.encoders import encode_tensor
from gossamer.protocol.codecs import CODECS


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure every codec on one tensor; prints a table and returns its rows."""
    torch.set_num_threads(1)
    numel, repeats = (1 << 18, 2) if quick else (1 << 23, 5)
    values = delta_like(numel)
    copy_s = copy_seconds(values, repeats)
    rows = []
    for name, codec in CODECS.items():
        section = memoryview(codec.encode(values))
        tensor = torch.from_numpy(values)
        decoded = codec.decode(section, numel)
        encode_s = best_of(lambda name=name, tensor=tensor: encode_tensor(name, tensor), repeats)
        decode_s = best_of(lambda codec=codec, section=section: codec.decode(section, numel), repeats)
        error = np.linalg.norm((decoded - values).astype(np.float64)) / np.linalg.norm(
            values.astype(np.float64)
        )
        rows.append(
            {
                "codec": name,
                "bits_per_parameter": 8 * len(section) / numel,
                "lz4_size_ratio": len(lz4.block.compress(bytes(section))) / len(section),
                "relative_error": float(error),
                "encode_parameters_per_s": numel / encode_s,
                "decode_parameters_per_s": numel / decode_s,
                "encode_copies": encode_s / copy_s,
                "decode_copies": decode_s / copy_s,
            }
        )
    _show(rows, numel)
    return rows


def _show(rows: list[dict[str, Any]], numel: int) -> None:
    table = Table(title=f"codecs, {numel / 1e6:.1f} M parameters, one core", title_justify="left")
    for column in ("codec", "bits", "after lz4", "error", "encode", "decode", "in memory copies"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["codec"],
            f"{row['bits_per_parameter']:.2f}",
            f"{row['lz4_size_ratio']:.0%}",
            f"{row['relative_error']:.3f}",
            f"{row['encode_parameters_per_s'] / 1e6:,.0f} M/s",
            f"{row['decode_parameters_per_s'] / 1e6:,.0f} M/s",
            f"{row['encode_copies']:.1f} / {row['decode_copies']:.1f}",
        )
    Console().print(table)
