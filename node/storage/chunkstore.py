"""Chunks on disk, by hash.

A chunk is written aside and renamed, and its hash is checked whenever it is read, so that a torn write or
a flipped bit is found before anyone uses it: the file is removed and the chunk counts as missing again.
One whose file is not there, or that the disk does not give out, counts as missing too; but it is looked for
again, since the disk may have been away for a moment.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock

from gossamer.node.storage.wholefile import cannot_write, remove_unfinished, sync_folder, write_atomically
from gossamer.protocol.errors import StorageError
from gossamer.protocol.rations import Stock

_HASH_NAME = re.compile("[0-9a-f]{64}")
_FOLDER_NAME = re.compile("[0-9a-f]{2}")
"""Of those that chunks lie in: a disk of its own has a ``lost+found`` beside them."""


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
        self._counting = Lock()
        self._making_folders = Lock()
        self._reserving = Lock()
        self._reserved: set[bytes] = set()
        """Those that somebody is about to sign a record for: nothing else shows yet that they are needed."""
        self._is_synced = False
        """Whether all folders of chunks survive a power cut; not known of those found at the start."""
        try:
            if not read_only:
                self._make_root()
            self._sizes = dict(_found_in(root))
            if not read_only:
                remove_unfinished(root.glob("[0-9a-f][0-9a-f]/.*-*"), _HASH_NAME.fullmatch)
        except OSError as error:
            raise cannot_write(root, error, f"cannot use {root}: {error.strerror}") from None
        self._unchecked = set(self._sizes)
        """Those that a power cut may have torn: found here at the start, and not read since."""
        self._mislaid: set[bytes] = set()
        """Those that could not be read, and may be again."""
        self._held = sum(self._sizes.values())
        self._came = 0

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def stock(self) -> Stock:
        """How much is here, and has come since the start."""
        return Stock(self._held, self._came)

    def size(self, blob: bytes) -> int:
        """Bytes of a chunk, 0 for one that is not here."""
        return self._sizes.get(blob, 0)

    def fits(self, blob: bytes, size: int) -> bool | None:
        """Whether a chunk that is here has so many bytes; None if it is not here, or cannot be read.

        Only one of another size is read for it, once: a file that a power cut has torn says nothing of its
        hash.
        """
        known = self._sizes.get(blob)
        if known is None:
            return None
        if known == size or blob not in self._unchecked:
            return known == size
        try:
            return len(self.get(blob)) == size
        except StorageError:
            return None

    def _path(self, blob: bytes) -> Path:
        name = blob.hex()
        return self._root / name[:2] / name

    def put(self, blob: bytes, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Store bytes whose SHA-256 the caller has checked to be `blob`. Raises OSError (disk full, ...)."""
        path = self._path(blob)
        self._make_folder(path.parent, durable=durable)
        data = bytes(data)
        write_atomically(path, data, durable=durable)
        with self._counting:
            fresh = len(data) - self._sizes.get(blob, 0)
            self._sizes[blob] = len(data)
            self._held += fresh
            self._came += fresh
            self._unchecked.discard(blob)
            self._mislaid.discard(blob)

    def _make_root(self) -> None:
        """All chunks' folder, unless it is there; the node's own is not ours to make. Raises OSError."""
        if not self._root.is_dir():
            self._root.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._root.parent)

    def _make_folder(self, folder: Path, *, durable: bool) -> None:
        """Where a chunk is to lie, unless it is there. Raises OSError."""
        with self._making_folders:
            if not folder.is_dir():
                self._make_root()
                folder.mkdir(mode=0o700, exist_ok=True)
                self._is_synced = False
            if durable and not self._is_synced:
                sync_folder(self._root)
                self._is_synced = True

    def drop(self, blob: bytes) -> None:
        """Remove a chunk that nobody needs any more. Raises OSError."""
        self._forget(blob)
        self._path(blob).unlink(missing_ok=True)

    def reserve(self, blob: bytes) -> bool:
        """From now on a chunk is needed, whether it is here or is about to be put.

        Returns whether that is new.
        """
        with self._reserving:
            is_new = blob not in self._reserved
            self._reserved.add(blob)
            return is_new

    def release(self, blobs: Iterable[bytes]) -> None:
        """Chunks that may have been reserved are of known records by now, or of none that will be."""
        if self._reserved:
            with self._reserving:
                self._reserved.difference_update(blobs)

    def drop_unreserved(self, blob: bytes) -> None:
        """Remove a chunk that no known record needs any more, unless it is reserved. Raises OSError."""
        with self._reserving:
            if blob not in self._reserved:
                self.drop(blob)

    def _forget(self, blob: bytes) -> None:
        with self._counting:
            self._held -= self._sizes.pop(blob, 0)
            self._unchecked.discard(blob)
            self._mislaid.discard(blob)

    def _mislay(self, blob: bytes) -> None:
        """A chunk cannot be read: it counts as missing until `find_again` finds it, unless it was dropped."""
        with self._counting:
            if not self._read_only and (blob in self._sizes or blob in self._mislaid):
                self._held -= self._sizes.pop(blob, 0)
                self._unchecked.discard(blob)
                self._mislaid.add(blob)

    @property
    def has_mislaid(self) -> bool:
        """Whether there is any use in `find_again`."""
        return bool(self._mislaid)

    def find_again(self) -> list[bytes]:
        """Look for the chunks that could not be read; returns those that can be now."""
        found = []
        for blob in list(self._mislaid):
            with suppress(StorageError):
                data = self.get(blob)
                with self._counting:
                    if blob in self._mislaid:  # and nobody has put or dropped it meanwhile
                        self._mislaid.discard(blob)
                        self._sizes[blob] = len(data)
                        self._held += len(data)
                        found.append(blob)
        return found

    def sweep(self, needed: set[bytes]) -> int:
        """Remove all chunks but these: what a crash left behind. Returns how many. Raises OSError."""
        orphans = self._sizes.keys() - needed
        for blob in orphans:
            self.drop(blob)
        return len(orphans)

    def get(self, blob: bytes) -> bytes:
        """Read a chunk and check it. Raises MissingChunkError; StorageError if it cannot be read just now."""
        try:
            data = self._path(blob).read_bytes()
        except OSError as error:
            if not self._is_lost(error):
                raise StorageError(f"cannot read {self._path(blob)}: {error.strerror}") from None
            self._mislay(blob)
            raise MissingChunkError(blob) from None
        if sha256(data).digest() != blob:
            if not self._read_only:
                with suppress(OSError):  # it counts as missing also where nothing can be removed
                    self.drop(blob)
            raise MissingChunkError(blob)
        self._unchecked.discard(blob)
        return data

    def _is_lost(self, error: OSError) -> bool:
        """Whether a file's content has to be got elsewhere: too many open files do not say so, nor does a
        folder that is away altogether."""
        return error.errno == errno.EIO or (error.errno == errno.ENOENT and self._root.is_dir())

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


def _found_in(root: Path) -> Iterator[tuple[bytes, int]]:
    """Hash and size of every chunk in a folder; a daemon may drop some meanwhile. Raises OSError."""
    for folder in os.scandir(root):
        if not _FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir():
            continue
        for file in os.scandir(folder):
            if _HASH_NAME.fullmatch(file.name):
                with suppress(FileNotFoundError):
                    yield bytes.fromhex(file.name), file.stat().st_size
