"""Chunks on disk, by hash.

A chunk is written aside and renamed, and its hash is checked whenever it is read, so that a torn write or
a flipped bit is found before anyone uses it: the file is removed and the chunk counts as missing again.
"""

import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from gossamer.node.storage.home import remove_unfinished, write_atomically
from gossamer.protocol.errors import StorageError

_HASH_NAME = re.compile("[0-9a-f]{64}")


class MissingChunkError(StorageError):
    """A chunk that should be on disk is not there or is damaged; fetch it again."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(f"chunk {blob.hex()[:12]} is missing or damaged; it will be fetched again")
        self.blob = blob


class ChunkStore:
    """Content-addressed files under one folder. Blocking: call it from a worker thread."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        """Open or create the folder; `read_only` leaves it as it is, for those who only look at a node's.

        Raises StorageError.
        """
        self._root = root
        self._read_only = read_only
        try:
            if not read_only:
                self._root.mkdir(mode=0o700, exist_ok=True)
            self._known = {
                bytes.fromhex(file.name)
                for folder in os.scandir(root)
                if folder.is_dir()
                for file in os.scandir(folder)
                if _HASH_NAME.fullmatch(file.name)
            }
            if not read_only:
                remove_unfinished(root.glob("*/.*-*"))
        except OSError as error:
            raise StorageError(f"cannot use {root}: {error.strerror}") from None

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._known

    def __len__(self) -> int:
        return len(self._known)

    def _path(self, blob: bytes) -> Path:
        name = blob.hex()
        return self._root / name[:2] / name

    def put(self, blob: bytes, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Store bytes whose SHA-256 the caller has checked to be `blob`. Raises OSError (disk full, ...)."""
        path = self._path(blob)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, data if isinstance(data, bytes) else bytes(data), durable=durable)
        self._known.add(blob)

    def drop(self, blob: bytes) -> None:
        """Remove a chunk that nobody needs any more."""
        self._known.discard(blob)
        self._path(blob).unlink(missing_ok=True)

    def sweep(self, needed: set[bytes]) -> int:
        """Remove all chunks but these: what a crash left behind. Returns how many there were."""
        orphans = self._known - needed
        for blob in orphans:
            self.drop(blob)
        return len(orphans)

    def get(self, blob: bytes) -> bytes:
        """Read a chunk and check it. Raises MissingChunkError."""
        try:
            data = self._path(blob).read_bytes()
        except OSError:
            data = b""
        if sha256(data).digest() != blob:
            if not self._read_only:
                self.drop(blob)
            raise MissingChunkError(blob)
        return data

    def join(self, blobs: Iterable[bytes]) -> bytes:
        """Read chunks one after another. Raises MissingChunkError, for one of them, once all that are damaged
        have been removed: so they can be fetched again together."""
        found: list[bytes] = []
        missing: MissingChunkError | None = None
        for blob in blobs:
            try:
                found.append(self.get(blob))
            except MissingChunkError as error:
                missing = error
        if missing is not None:
            raise missing
        return b"".join(found)
