"""The memory that a node's daemon and trainer share: Phi goes one way, payloads the other.

The daemon creates an anonymous file and passes its descriptor over the control socket, so no name can be left
behind. Each part has one owner at any time, and messages hand it over:

* fragment `f` of Phi is the daemon's until it says ``Phi(f)``, then the trainer's until ``Applied(f)``;
* the payload area is the trainer's until it says ``Publish``, then the daemon's until ``Published``.
"""

import mmap
import os
import tempfile

import numpy as np

from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Fragment, length_in


class SharedMemory:
    """A mapping of the shared file. Each side makes one."""

    def __init__(self, manifest: Manifest, fd: int) -> None:
        """Takes ownership of `fd`. Raises OSError, after closing `fd`, if there is no memory."""
        layout, codec = manifest.plan(), manifest.outer.codec
        self._phi_bytes = layout.snapshot_bytes
        size = self._phi_bytes + max(length_in(f.index, codec, layout) for f in layout.fragments)
        self.fd = fd
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            self.close()
            raise

    @classmethod
    def create(cls, manifest: Manifest) -> "SharedMemory":
        """Make the file and map it (the daemon's side). Raises OSError if there is no room for it."""
        if hasattr(os, "memfd_create"):
            return cls(manifest, os.memfd_create("gossamer"))
        with tempfile.TemporaryFile() as file:  # macOS, and Pythons for old systems
            return cls(manifest, os.dup(file.fileno()))

    def phi(self, fragment: Fragment) -> Ints:
        """The area of one fragment: int32[fragment.numel], a view."""
        return np.frombuffer(self._map, dtype=np.int32, count=fragment.numel, offset=4 * fragment.offset)

    @property
    def whole(self) -> memoryview:
        """All of the mapping, writable."""
        return memoryview(self._map)

    @property
    def payload(self) -> memoryview:
        """The payload area, writable."""
        return memoryview(self._map)[self._phi_bytes :]

    def is_payload(self, area: memoryview) -> bool:
        """Whether an area is (the beginning of) the payload area of this mapping."""
        return area.obj is self._map

    def close(self) -> None:
        """Close the descriptor. The mapping lasts as long as any view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
