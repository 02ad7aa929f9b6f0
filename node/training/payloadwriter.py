"""From the values of a fragment's tensors to its payload, in the daemon's memory."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from gossamer.node.training.buckets import Bucket
from gossamer.node.training.encoders import SectionWriter, check_codec
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.payloads.layout import Fragment


class PayloadWriter:
    """Encodes a fragment's tensors, in any order and on whatever devices, as one payload."""

    def __init__(self, codec: str, fragment: Fragment, out: memoryview) -> None:
        """`out` is writable and has `payload_length` bytes or more.

        Raises ConfigError for an unknown codec, ValueError if `out` is too small.
        """
        check_codec(codec)
        self._codec = codec
        self._sizes = [CODECS[codec].section_bytes(slot.numel) for slot in fragment.slots]
        needed, room = sum(self._sizes), 0 if out.readonly else out.nbytes
        if room < needed:
            raise ValueError(f"a payload needs {needed} writable bytes, and there are {room}")
        cpu = torch.device("cpu")
        self._payloads = {cpu: torch.from_numpy(np.frombuffer(out, dtype=np.uint8)[:needed])}
        """The payload by device. The CPU's is `out`; what is written in another's is copied there at the
        end."""
        self._places = {cpu: self._payloads[cpu].split(self._sizes) if needed else ()}
        """By device, where each tensor's section goes."""
        self._devices = [cpu] * len(self._sizes)
        """The device on which each section was written."""

    def section(self, place: int, device: torch.device) -> SectionWriter:
        """Begin the fragment's tensor `place`, which lies on `device`."""
        return SectionWriter(self._codec, self._targets([place], device)[0])

    def bucket(self, places: Sequence[int], bucket: Bucket) -> "BucketWriter":
        """Begin the tensors of a bucket."""
        return BucketWriter(self, places, bucket)

    def add(self, places: Sequence[int], sections: Tensor, sizes: Sequence[int]) -> None:
        """Take the sections of several tensors, uint8[sum of sizes]."""
        torch._foreach_copy_(self._targets(places, sections.device), sections.split(list(sizes)))

    def finish(self) -> int:
        """Complete the payload in `out` and drop all references to it; returns its length in bytes."""
        if len(self._payloads) > 1:
            self._collect()
        del self._payloads, self._places
        return sum(self._sizes)

    def _targets(self, places: Sequence[int], device: torch.device) -> list[Tensor]:
        if device not in self._payloads:
            payload = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
            self._payloads[device], self._places[device] = payload, payload.split(self._sizes)
        if device.type != "cpu":
            for place in places:
                self._devices[place] = device
        return [self._places[device][place] for place in places]

    def _collect(self) -> None:
        """Copy adjacent sections together, and wait for the devices once all copies are queued."""
        out = self._payloads[torch.device("cpu")]
        bounds = list(accumulate(self._sizes, initial=0))
        for device, run in groupby(range(len(self._sizes)), self._devices.__getitem__):
            if device.type == "cpu":
                continue
            places = list(run)
            part = slice(bounds[places[0]], bounds[places[-1] + 1])
            out[part].copy_(self._payloads[device][part], non_blocking=device.type == "cuda")
        for device in self._payloads:
            if device.type == "cuda":  # copies into pinned memory were not waited for
                torch.cuda.current_stream(device).synchronize()


class BucketWriter:
    """Encodes a bucket's tensors."""

    def __init__(self, payload: PayloadWriter, places: Sequence[int], bucket: Bucket) -> None:
        self._payload = payload
        self._places = places
        self._bucket = bucket

    def write(self, values: Tensor, decoded: Tensor) -> None:
        """Encode all `values`, int32[n], and write to `decoded`, int32[n], what receivers will read."""
        self._payload.add(self._places, self._bucket.encode(values, decoded), self._bucket.section_bytes)
