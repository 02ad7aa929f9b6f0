"""Chunks on disk, by hash, as they travel: packed if that makes them smaller.

Every chunk is packed here, even one that came packed: we do not pass on what another node's release of the
library made of it.

A chunk is written aside and renamed, and its hash is checked whenever it is read, so a torn write or a
flipped bit is found before anyone uses it. The file is then removed, and the chunk counts as missing again. A
chunk whose file is not there, or cannot be read from the disk, counts as missing too, but is looked for
again: the disk may have been away for a moment.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from gossamer.node.files import (
    SameFolder,
    cannot_write,
    leads_nowhere,
    remove_unfinished,
    sync_folder,
    write_atomically,
)
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.errors import PayloadError, StorageError
from gossamer.protocol.payloads.chunks import Chunk, unpack_chunk

_NAME = re.compile(r"([0-9a-f]{64})(?:\.([0-9]+)\.([0-9]+))?")
"""Name of a chunk's file: its hash and, if it holds a zstd frame, the lengths of chunk and frame."""
_FOLDER_NAME = re.compile("[0-9a-f]{2}")
"""Name of a folder of chunks. There may be others beside them: a disk of its own has a ``lost+found``."""


class MissingChunkError(StorageError):
    """A chunk that should be on disk is not there or is damaged; fetch it again."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(f"chunk {blob.hex()[:12]} is missing or damaged; it will be fetched again")
        self.blob = blob


class _File(NamedTuple):
    """The file that holds a chunk."""

    name: str
    size: int
    """Bytes of the chunk; 0 if the file is torn, so that this is unknown."""
    length: int
    """Bytes of the file."""

    @property
    def is_packed(self) -> bool:
        return "." in self.name

    @classmethod
    def of(cls, blob: bytes, chunk: Chunk) -> "_File":
        size, length = len(chunk.data), len(chunk.as_it_travels)
        return cls(blob.hex() if chunk.frame is None else f"{blob.hex()}.{size}.{length}", size, length)


class ChunkStore:
    """Content-addressed files under one folder. Blocking: call it from a worker thread."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        """Open or create the folder; `read_only` leaves it as it is, to only look at a node's chunks.

        Raises StorageError.
        """
        self._root = root
        self._read_only = read_only
        self._counting = Lock()
        self._making_folders = Lock()
        self._reserving = Lock()
        self._reserved: set[bytes] = set()
        """Chunks of a record that is about to be signed: nothing else shows yet that they are needed."""
        self._is_synced = False
        """Whether all folders of chunks survive a power cut. Unknown for those found at the start."""
        try:
            if not read_only:
                self._make_root()
            self._home = SameFolder(root.parent)
            self._files = dict(_found_in(root))
            if not read_only:
                remove_unfinished(root.glob("[0-9a-f][0-9a-f]/.*-*"), _NAME.fullmatch)
        except OSError as error:
            otherwise = leads_nowhere(root) or f"cannot use {root}: {error.strerror}"
            raise cannot_write(root, error, otherwise) from None
        self._unchecked = set(self._files)
        """Chunks that a power cut may have torn: found here at the start, and not read since."""
        self._mislaid: dict[bytes, _File] = {}
        """Chunks that could not be read, and may be readable again later."""
        self._held = sum(file.length for file in self._files.values())
        self._came = 0

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def blobs(self) -> set[bytes]:
        """All chunks that are here now."""
        with self._counting:
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
        """Whether a chunk that is here has `size` bytes; None if it is not here, or cannot be read.

        Only a chunk that seems to have another size is read, once: a file torn by a power cut tells nothing
        about the size that its hash stands for.
        """
        file = self._files.get(blob)
        if file is None:
            return None
        if file.size == size or blob not in self._unchecked:
            return file.size == size
        try:
            return len(self.get(blob)) == size
        except StorageError:
            return None

    def _path(self, blob: bytes, file: _File) -> Path:
        return self._root / blob.hex()[:2] / file.name

    def put(self, blob: bytes, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Store bytes whose SHA-256 is `blob`, as the caller has checked. Raises OSError (disk full, ...)."""
        chunk, before = Chunk.of(bytes(data)), self._known(blob)
        file = _File.of(blob, chunk)
        path = self._path(blob, file)
        self._home.check()
        self._make_folder(path.parent, durable=durable)
        write_atomically(path, chunk.as_it_travels, durable=durable)
        with self._counting:
            fresh = file.length - self.length(blob)
            self._files[blob] = file
            self._held += fresh
            self._came += max(0, fresh)
            self._unchecked.discard(blob)
            self._mislaid.pop(blob, None)
        if before is not None and before.name != file.name:  # packed by an earlier release, ours or zstd's
            with suppress(OSError):
                self._path(blob, before).unlink()

    def _known(self, blob: bytes) -> _File | None:
        return self._files.get(blob) or self._mislaid.get(blob)

    def _make_root(self) -> None:
        """Make the folder of all chunks unless it is there, but not the node's own folder. Raises OSError."""
        if not self._root.is_dir():
            self._root.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._root.parent)

    def _make_folder(self, folder: Path, *, durable: bool) -> None:
        """Make the folder for a chunk, unless it is there. Raises OSError."""
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
        file = self._known(blob)
        if file is not None:  # forgotten only once it is gone: if that fails, a caller tries again
            self._path(blob, file).unlink(missing_ok=True)
            self._forget(blob)

    def reserve(self, blob: bytes) -> bool:
        """Mark a chunk as needed from now on, whether it is here or about to be put.

        Returns whether it was not reserved before.
        """
        with self._reserving:
            is_new = blob not in self._reserved
            self._reserved.add(blob)
            return is_new

    def release(self, blobs: Iterable[bytes]) -> None:
        """Release chunks that may be reserved: their record is known by now, or will never be signed."""
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
            self._held -= self.length(blob)
            self._files.pop(blob, None)
            self._unchecked.discard(blob)
            self._mislaid.pop(blob, None)

    def _mislay(self, blob: bytes) -> None:
        """A chunk cannot be read: it counts as missing until `find_again` finds it, unless it was dropped."""
        with self._counting:
            if not self._read_only and blob in self._files:
                self._held -= self.length(blob)
                self._unchecked.discard(blob)
                self._mislaid[blob] = self._files.pop(blob)

    @property
    def has_mislaid(self) -> bool:
        """Whether there is anything for `find_again` to look for."""
        return bool(self._mislaid)

    def find_again(self) -> list[bytes]:
        """Look for chunks that could not be read; returns those that can be read now."""
        found = []
        for blob in list(self._mislaid):
            with suppress(StorageError):
                self.get(blob)
                with self._counting:
                    if blob in self._mislaid:  # not put or dropped meanwhile
                        self._files[blob] = self._mislaid.pop(blob)
                        self._held += self.length(blob)
                        found.append(blob)
        return found

    def get(self, blob: bytes) -> bytes:
        """Read a chunk's bytes, as `read` does."""
        return self.read(blob).data

    def read(self, blob: bytes) -> Chunk:
        """Read a chunk and check it. Raises MissingChunkError; StorageError if it cannot be read just now."""
        file = self._known(blob) or self._now(blob)
        if file is None:
            raise MissingChunkError(blob)
        try:
            data = self._path(blob, file).read_bytes()
        except OSError as error:
            now = self._now(blob)
            if now is not None and now.name != file.name:
                self._files[blob] = now
                return self.read(blob)
            if not self._is_lost(error):
                raise StorageError(f"cannot read {self._path(blob, file)}: {error.strerror}") from None
            self._mislay(blob)
            raise MissingChunkError(blob) from None
        chunk = _chunk_in(data, file)
        if chunk is None or sha256(chunk.data).digest() != blob:
            if not self._read_only:
                try:
                    self.drop(blob)
                except OSError:  # the chunk counts as missing even if its file cannot be removed
                    self._forget(blob)
            raise MissingChunkError(blob)
        self._unchecked.discard(blob)
        return chunk

    def _now(self, blob: bytes) -> _File | None:
        """The file that holds a chunk by now: a daemon may have put the chunk into the folder that we only
        look at, or put it again under another name."""
        if not self._read_only:
            return self._files.get(blob)
        with suppress(OSError):
            return dict(_files_in(self._root / blob.hex()[:2])).get(blob)
        return None

    def _is_lost(self, error: OSError) -> bool:
        """Whether a file's content has to be fetched again: too many open files are no reason, nor is a
        folder that is away altogether."""
        return error.errno == errno.EIO or (error.errno == errno.ENOENT and self._root.is_dir())

    def join(self, blobs: Iterable[bytes]) -> bytes:
        """Read chunks and join them. Raises MissingChunkError for one of them, but only after all damaged
        ones have been removed, so that they can be fetched again together."""
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


def _chunk_in(data: bytes, file: _File) -> Chunk | None:
    """The chunk that a file holds, None if the file is damaged."""
    if not file.is_packed:
        return Chunk(data, None)
    with suppress(PayloadError):
        if len(chunk := unpack_chunk(data)) == file.size:
            return Chunk(chunk, data)
    return None


def _found_in(root: Path) -> Iterator[tuple[bytes, _File]]:
    """Every chunk under a folder, with its hash. Raises OSError."""
    for folder in os.scandir(root):
        if _FOLDER_NAME.fullmatch(folder.name) and folder.is_dir():
            yield from _files_in(folder)


def _files_in(folder: os.PathLike[str]) -> Iterator[tuple[bytes, _File]]:
    """The chunks directly in one folder. A daemon may drop some meanwhile. Raises OSError."""
    for entry in os.scandir(folder):
        if (name := _NAME.fullmatch(entry.name)) is not None:
            with suppress(FileNotFoundError):
                length = entry.stat().st_size
                size, expected = (length, length) if name[2] is None else (int(name[2]), int(name[3]))
                found = _File(entry.name, size if length == expected else 0, length)
                yield bytes.fromhex(name[1]), found
