"""Chunks on disk, by hash, as they travel: packed if that makes them smaller.

Every chunk is packed here, even one that came packed: we do not pass on what another node's release of the
library made of it. A chunk is written aside and renamed, and its hash is checked whenever it is read, so a
torn write or a flipped bit is found before anyone uses it. A chunk that is damaged, or cannot be read from
the disk, counts as missing from then on, and is fetched again.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from gossamer.node.daemon.storage.packing import Choice, Packing
from gossamer.node.files import cannot_write, remove_unfinished, sync_folder, write_atomically
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.payloads import Chunk

_NAME = re.compile(r"([0-9a-f]{64})\.([0-9]+)\.([0-9]+)")
"""Name of a chunk's file: its hash, and the lengths of the chunk and of the file. If they differ, it is
packed. A file of another length was torn by a power cut."""
_FOLDER_NAMES = [f"{first:02x}" for first in range(256)]
"""A folder for each first byte of a hash."""


class MissingChunkError(StorageError):
    """A chunk that should be on disk is not there or is damaged; fetch it again."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(f"chunk {blob.hex()[:12]} is missing or damaged; it will be fetched again")
        self.blob = blob


RECENT_BYTES = 8 * 1024 * 1024
"""Size of the chunks that are kept in memory until they are read, as payloads are right after they came."""


class _File(NamedTuple):
    """The file that holds a chunk."""

    size: int
    """Bytes of the chunk."""
    length: int
    """Bytes of the file."""


class ChunkStore:
    """Content-addressed files under one folder. Blocking: call it from a worker thread."""

    def __init__(self, root: Path, *, read_only: bool = False, packing: Choice = "auto") -> None:
        """Open or create the folder; `read_only` leaves it as it is, to only look at a node's chunks.

        Raises StorageError.
        """
        self._root = root
        self.packing = Packing(packing)
        self._read_only = read_only
        self._lock = RLock()
        self._reserved: set[bytes] = set()
        """Chunks of a record that is about to be signed: nothing else shows yet that they are needed."""
        try:
            if not read_only:
                for name in ("", *_FOLDER_NAMES):
                    (root / name).mkdir(mode=0o700, exist_ok=True)
                sync_folder(root.parent)
                sync_folder(root)
                remove_unfinished(root.glob("[0-9a-f][0-9a-f]/.*-*"), _NAME.fullmatch)
            self._files = {blob: file for name in _FOLDER_NAMES for blob, file in _files_in(root / name)}
        except OSError as error:
            raise cannot_write(root, error, f"cannot use {root}: {error.strerror}") from None
        self._recent: dict[bytes, bytes] = {}
        """Chunks that are expected to be read soon, oldest first."""
        self._held = sum(file.length for file in self._files.values())
        self._came = 0

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._files

    @property
    def blobs(self) -> set[bytes]:
        """All chunks that are here now."""
        with self._lock:
            return set(self._files)

    @property
    def stock(self) -> Stock:
        """How many bytes are here, and how many have come since the start."""
        return Stock(self._held, self._came)

    def length(self, blob: bytes) -> int:
        """Bytes of a chunk as it is stored and travels, 0 for one that is not here."""
        file = self._files.get(blob)
        return 0 if file is None else file.length

    def fits(self, blob: bytes, size: int) -> bool | None:
        """Whether a chunk that is here has `size` bytes; None if it is not here."""
        file = self._files.get(blob)
        return None if file is None else file.size == size

    def put(
        self, blob: bytes, data: bytes | memoryview, *, durable: bool = False, is_read_next: bool = False
    ) -> bytes:
        """Store bytes whose SHA-256 is `blob`, as the caller has checked; returns them as they travel. Those
        that are read next are kept in memory until `get` takes them.

        Raises OSError (disk full, ...).
        """
        chunk = self.packing.pack(bytes(data))
        file = _File(len(chunk.data), len(chunk.as_it_travels))
        write_atomically(self._path(blob, file), chunk.as_it_travels, durable=durable)
        with self._lock:
            fresh = file.length - self.length(blob)
            self._files[blob] = file
            self._held += fresh
            self._came += max(0, fresh)
            if is_read_next:
                self._recent[blob] = chunk.data
                while sum(map(len, self._recent.values())) > RECENT_BYTES:
                    del self._recent[next(iter(self._recent))]
        return chunk.as_it_travels

    def _path(self, blob: bytes, file: _File) -> Path:
        name = blob.hex()
        return self._root / name[:2] / f"{name}.{file.size}.{file.length}"

    def reserve(self, blob: bytes) -> None:
        """Keep a chunk, whether it is here or about to be put, until it is released."""
        with self._lock:
            self._reserved.add(blob)

    def release(self, blobs: Iterable[bytes]) -> None:
        """Release chunks that may be reserved: their record is known by now, or will never be signed."""
        with self._lock:
            self._reserved.difference_update(blobs)

    def drop(self, blob: bytes) -> None:
        """Remove a chunk that no known record needs any more, unless it is reserved. Raises OSError."""
        with self._lock:
            if (file := self._files.get(blob)) is not None and blob not in self._reserved:
                # Forgotten only once it is gone: if that fails, a caller tries again.
                self._path(blob, file).unlink(missing_ok=True)
                self._forget(blob)

    def _forget(self, blob: bytes) -> None:
        with self._lock:
            self._held -= self.length(blob)
            self._files.pop(blob, None)
            self._recent.pop(blob, None)

    def get(self, blob: bytes) -> bytes:
        """A chunk's bytes: from memory if they were put to be read next, else as `read` does."""
        with self._lock:
            data = self._recent.pop(blob, None)
        return self.read(blob).data if data is None else data

    def to_send(self, blob: bytes, rate: float) -> Chunk:
        """A chunk as it goes soonest over a link of so many bytes a second. Raises as `read`."""
        return self.packing.to_send(self.read(blob), rate)

    def read(self, blob: bytes) -> Chunk:
        """Read a chunk and check it. Raises MissingChunkError; StorageError if it cannot be read just now."""
        file = self._files.get(blob)
        if file is None:
            raise MissingChunkError(blob)
        path = self._path(blob, file)
        try:
            data = path.read_bytes()
            chunk = Chunk(data, None) if file.size == file.length else Chunk(self.packing.unpack(data), data)
        except PayloadError:
            chunk = None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOENT):  # too many open files, say: it passes
                raise StorageError(f"cannot read {path}: {error.strerror}") from None
            chunk = None
        if chunk is None or sha256(chunk.data).digest() != blob:
            if not self._read_only:
                with suppress(OSError):  # the chunk counts as missing even if its file cannot be removed
                    path.unlink()
                self._forget(blob)
            raise MissingChunkError(blob)
        return chunk


def _files_in(folder: Path) -> Iterator[tuple[bytes, _File]]:
    """The whole chunks in one folder. A daemon may drop some meanwhile. Raises OSError."""
    for entry in os.scandir(folder):
        if (name := _NAME.fullmatch(entry.name)) is not None:
            with suppress(FileNotFoundError):
                file = _File(int(name[2]), int(name[3]))
                if entry.stat().st_size == file.length:
                    yield bytes.fromhex(name[1]), file
