"""Codecs: size, error and speed on one core, and size after packing."""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.goals import Goal
from benchmarks.measure import best_of, copy_seconds, delta_like
from benchmarks.tables import Table
from gossamer.node.trainer.encoders import encode_piece, piece_numel
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.codecs.base import Codec
from gossamer.protocol.payloads import pack_chunk, split_payload, unpack_chunk
from gossamer.protocol.rules.base import PART


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure every codec on one tensor of fixed-point values, against copying that: one row per codec."""
    torch.set_num_threads(1)
    numel, repeats = (1 << 18, 2) if quick else (1 << 23, 7)
    values = delta_like(numel)
    return [_row(name, values, copy_seconds(values, repeats), repeats) for name in CODECS]


def _row(name: str, values: np.ndarray, copy_s: float, repeats: int) -> dict[str, Any]:
    codec = CODECS[name]
    section = memoryview(codec.encode(values))
    decoded = codec.decode(section, values.size, 0, values.size)
    encode_s = _encode_seconds(name, values, "cpu", repeats)
    decode_s = best_of(lambda: _decode_in_parts(codec, section, values.size), repeats)
    chunks = list(map(bytes, split_payload(section)))
    pack_s = best_of(lambda: _packed(chunks), repeats)
    frames = [frame for chunk in chunks if (frame := pack_chunk(chunk)) is not None]
    unpack_s = best_of(lambda: [unpack_chunk(frame) for frame in frames], repeats)
    wrong = np.linalg.norm((decoded - values).astype(np.float64)) / np.linalg.norm(values.astype(np.float64))
    return {
        "codec": name,
        "parameters": values.size,
        "bits_per_parameter": 8 * len(section) / values.size,
        "packed_bits_per_parameter": 8 * sum(map(len, _packed(chunks))) / values.size,
        "relative_error": float(wrong),
        "encode_parameters_per_s": values.size / encode_s,
        "decode_parameters_per_s": values.size / decode_s,
        "encode_copies": encode_s / copy_s,
        "decode_copies": decode_s / copy_s,
        "pack_parameters_per_s": values.size / pack_s,
        "unpack_parameters_per_s": values.size / unpack_s if frames else None,
        **_on_device(name, values, repeats),
    }


def _decode_in_parts(codec: Codec, section: memoryview, numel: int) -> None:
    """Decode as a merge does."""
    for start in range(0, numel, PART):
        codec.decode(section, numel, start, min(start + PART, numel))


def _packed(chunks: list[bytes]) -> list[bytes]:
    """Chunks packed, as they are sent."""
    return [pack_chunk(chunk) or chunk for chunk in chunks]


def _on_device(name: str, values: np.ndarray, repeats: int) -> dict[str, float]:
    """Encoding on a CUDA device, if there is one; `exact` encodes only on the CPU."""
    if not torch.cuda.is_available() or name == "exact":
        return {}
    return {"cuda_encode_parameters_per_s": values.size / _encode_seconds(name, values, "cuda", repeats)}


def _encode_seconds(name: str, values: np.ndarray, device: str, repeats: int) -> float:
    """Encode as the outer step does, into memory that it keeps: new pages would cost more than the work."""
    tensor = torch.from_numpy(values).to(device)
    section = torch.empty(CODECS[name].section_bytes(values.size), dtype=torch.uint8, device=device)
    decoded = torch.empty_like(tensor)
    size = piece_numel([name], tensor)
    pieces = list(zip(tensor.split(size), decoded.split(size), strict=True))

    def encode() -> None:
        for number, (piece, result) in enumerate(pieces):
            encode_piece(name, piece, number * size, section, result)
        if device == "cuda":
            torch.cuda.synchronize()

    return best_of(encode, repeats, *([time.perf_counter] if device == "cuda" else []))


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """All figures, by codec."""
    columns = ["codec", "bits", "packed", "error", "encode", "decode", "in memory copies", "pack", "unpack"]
    lines = [
        [
            row["codec"],
            f"{row['bits_per_parameter']:.2f}",
            f"{row['packed_bits_per_parameter']:.2f}",
            f"{row['relative_error']:.3f}",
            f"{row['encode_parameters_per_s'] / 1e6:,.0f} M/s",
            f"{row['decode_parameters_per_s'] / 1e6:,.0f} M/s",
            f"{row['encode_copies']:.1f} / {row['decode_copies']:.1f}",
            f"{row['pack_parameters_per_s'] / 1e6:,.0f} M/s",
            f"{speed / 1e6:,.0f} M/s" if (speed := row["unpack_parameters_per_s"]) else "-",
        ]
        for row in rows
    ]
    if any("cuda_encode_parameters_per_s" in row for row in rows):
        columns.append("encode, CUDA")
        for line, row in zip(lines, rows, strict=True):
            line.append(f"{row.get('cuda_encode_parameters_per_s', 0) / 1e6:,.0f} M/s")
    return [Table(f"codecs, {rows[0]['parameters'] / 1e6:.1f} M parameters, one core", columns, lines)]


def _encode_speed(codec: str, rows: list[dict[str, Any]]) -> float:
    found: float = next(row["encode_parameters_per_s"] for row in rows if row["codec"] == codec)
    return found / 1e6


GOALS = (
    Goal(
        what="encode int4 on one core",
        at_least=300,
        unit="M parameters/s",
        measured=lambda rows: _encode_speed("int4", rows),
    ),
    Goal(
        what="encode topk on one core",
        at_least=60,
        unit="M parameters/s",
        measured=lambda rows: _encode_speed("topk", rows),
    ),
)
