"""A safetensors file of torch tensors that come one after another, in any order, and its metadata last.

By hand, not with the library: that wants all tensors in memory, and makes one string of bytes of them before
it writes the first. The format is a header's length in 8 bytes, little endian; the header, JSON padded with
spaces; and the tensors' bytes one after another (https://huggingface.co/docs/safetensors).
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What can be written, and what safetensors calls it."""

_LENGTH_BYTES = 8


class StateFile:
    """Written aside and renamed: the file before it stays whole until this one is.

    `put` and `finish` raise OSError.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], growth: int
    ) -> None:
        """`tensors` say which will come, of which shapes and dtypes, all of them in `DTYPES`; their values
        are not looked at. `metadata` is what `finish` will get, or up to `growth` characters shorter."""
        self._path = path
        self._aside = path.with_name(f".{path.name}-new")
        self._header: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        end = 0
        # The widest first: so all of them are aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
            self._places[name] = end
            self._header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        header_bytes = -(-(len(self._text(metadata)) + growth) // _LENGTH_BYTES) * _LENGTH_BYTES
        self._header_bytes = header_bytes
        self.size = _LENGTH_BYTES + header_bytes + end
        """Bytes of the whole file."""
        self._file: BinaryIO | None = None

    def _text(self, metadata: Mapping[str, str]) -> bytes:
        return json.dumps({"__metadata__": dict(metadata), **self._header}, separators=(",", ":")).encode()

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Write some of the tensors, on the CPU and contiguous; one that came before is replaced."""
        file = self._open()
        for name, tensor in tensors.items():
            file.seek(_LENGTH_BYTES + self._header_bytes + self._places[name])
            file.write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """All tensors are there: put the file in its place."""
        file = self._open()
        text = self._text(metadata)
        assert len(text) <= self._header_bytes, "it would run into the first tensor"
        file.seek(0)
        file.write(self._header_bytes.to_bytes(_LENGTH_BYTES, "little"))
        file.write(text.ljust(self._header_bytes))
        file.truncate(self.size)
        file.close()
        os.replace(self._aside, self._path)

    def discard(self) -> None:
        """Leave nothing behind but the file that is in place. Raises nothing."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        with suppress(OSError):
            self._aside.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        if self._file is None:
            fd = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = os.fdopen(fd, "wb")
        return self._file
