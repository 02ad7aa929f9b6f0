"""Phi as a safetensors file, written tensor by tensor.

This does not use the safetensors library, which needs all tensors in memory at once and writes the metadata
in a different order each time. Here the same Phi gives the same bytes. The format is the header's length in 8
bytes, little endian; the header, JSON padded with spaces; and the tensors' bytes one after another
(https://huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gossamer.protocol.fixedpoint import Ints, to_float
from gossamer.protocol.payloads.layout import Layout

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Dtype:
    """How each number is stored."""

    code: str
    """What safetensors calls it."""
    itemsize: int
    """Bytes per number."""
    convert: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]
    """Converts to an array with these bytes, little endian."""


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded half to even, as torch does; there are no NaNs in Phi."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


DTYPES = {
    "float32": Dtype("F32", 4, lambda values: values.astype("<f4", copy=False)),
    "bfloat16": Dtype("BF16", 2, _bfloat16),
    "float16": Dtype("F16", 2, lambda values: values.astype("<f2")),
}


def write(file: BinaryIO, layout: Layout, phi: Ints, dtype: Dtype, metadata: Mapping[str, str]) -> None:
    """Write Phi, int32[layout.numel], as tensors of the layout's names and shapes. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for spec, span in layout.tensors():
        header[spec.name] = {
            "dtype": dtype.code,
            "shape": spec.shape,
            "data_offsets": [span.start * dtype.itemsize, span.stop * dtype.itemsize],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, span in layout.tensors():
        file.write(dtype.convert(to_float(phi[span])).data)
