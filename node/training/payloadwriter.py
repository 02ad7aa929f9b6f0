"""From the values of a fragment's tensors to its payload, in the daemon's memory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.node.training.buckets import Bucket
from gossamer.node.training.encoders import SectionWriter, check_codec
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.layout import Fragment


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
        self._out = np.frombuffer(out, dtype=np.uint8)
        self._places = torch.from_numpy(self._out[:needed]).split(self._sizes) if needed else ()
        """Where each tensor's section goes."""
        self._aside: list[tuple[Sequence[int], Tensor, Sequence[int]]] = []
        """What is written elsewhere first: of which tensors, their sections, and how long each is."""

    def section(self, place: int, device: torch.device) -> SectionWriter:
        """Begin the fragment's tensor `place`, which lies on `device`."""
        target = self._places[place]
        if device.type != "cpu":
            target = torch.empty_like(target, device=device)
            self._aside.append(([place], target, [target.numel()]))
        return SectionWriter(self._codec, target)

    def bucket(self, places: Sequence[int], bucket: Bucket) -> "BucketWriter":
        """Begin several tensors, which go together."""
        return BucketWriter(self, places, bucket)

    def add(self, places: Sequence[int], sections: Tensor, sizes: Sequence[int]) -> None:
        """Take the sections of several tensors, uint8[sum of sizes]."""
        self._aside.append((places, sections, sizes))

    def finish(self) -> int:
        """Have all of it in `out`, of which no reference is kept; returns the payload's length in bytes."""
        # Copied at the end: the first copy waits for its device, and by now all the work is queued.
        for places, sections, sizes in self._aside:
            torch._foreach_copy_([self._places[i] for i in places], sections.cpu().split(list(sizes)))
        del self._out, self._places, self._aside
        return sum(self._sizes)


class BucketWriter:
    """Encodes a bucket's tensors."""

    def __init__(self, payload: PayloadWriter, places: Sequence[int], bucket: Bucket) -> None:
        self._payload = payload
        self._places = places
        self._bucket = bucket

    def write(self, values: Tensor, decoded: Tensor) -> None:
        """Encode all `values`, int32[n], and leave in `decoded`, int32[n], what receivers will read."""
        self._payload.add(self._places, self._bucket.encode(values, decoded), self._bucket.section_bytes)
