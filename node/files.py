"""Atomic files and folders, whole or not there: written aside, synced if they must last, then renamed."""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gossamer.protocol.errors import DiskFullError, StorageError

log = logging.getLogger("gossamer.node")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that mean that there is no room left on a disk, or for this user."""

UNFINISHED_S = 60.0
"""A file that is still aside after this long was left by a crash."""

PRIVATE = 0o600
SHARED = 0o666
"""Modes of files: those that a node keeps for itself, and those for other programs, as far as the umask lets.
"""

_ASIDE = re.compile(r"\.(.+)-[a-z0-9_]{8}")
"""The names that `placed` gives to files."""


def cannot_write(path: Path, error: OSError, otherwise: str = "") -> StorageError:
    """The error to raise if a file or folder could not be made: DiskFullError if there is no room, else a
    StorageError that says `otherwise`."""
    if error.errno in FULL:
        return DiskFullError(f"cannot write {path}: the disk is full; free some space")
    return StorageError(otherwise or f"cannot write {path}: {error.strerror}")


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file or a folder, which replaces what is at `path` when the block ends.

    If the block fails, what is at `path` stays as it was, and nothing is left beside it. A link is followed.
    Raises OSError, also for what cannot be replaced: a device, a pipe, a mount point.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))
    path = Path(os.path.realpath(path))
    aside, old = (path.with_name(f".{path.name}-{secrets.token_hex(4)}") for _ in range(2))
    try:
        yield aside
        if path.is_dir() and any(path.iterdir()):  # no single rename replaces a folder
            os.rename(path, old)
            try:
                os.rename(aside, path)
            except BaseException:
                os.rename(old, path)
                raise
            shutil.rmtree(old)
        else:
            os.replace(aside, path)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path, *, durable: bool = False, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` when the block ends: whole, or not at all. Raises OSError."""
    with placed(path) as aside, open(aside, "xb", opener=lambda name, how: os.open(name, how, mode)) as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_folder(path.parent)


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file of mode 0600 so that it is there whole or not at all. Raises OSError."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def keep(path: Path, data: bytes, *, mode: int = PRIVATE) -> None:
    """Write a file for good, unless it has that content: then a full disk does not matter. Raises
    StorageError."""
    with suppress(OSError):  # one that cannot be read can be replaced
        if path.is_file() and path.read_bytes() == data:
            return
    try:
        with replacing(path, durable=True, mode=mode) as file:
            file.write(data)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_first(path: Path, data: bytes) -> None:
    """Write a file for good, unless there is one by now. Of several that are written, the first stays.

    Raises OSError.
    """
    claim = path.with_name(f".{path.name}.lock")  # not a hard link, which some file systems do not have
    fd = os.open(claim, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.path.lexists(path):
            write_atomically(path, data, durable=True)
        claim.unlink(missing_ok=True)  # a process that still waits for it will see the file
    finally:
        os.close(fd)


def remove_unfinished(files: Iterable[Path], is_ours: Callable[[str], object]) -> None:
    """Remove files and folders that a crash left aside unfinished, if their names are ours.

    No others are removed: a folder may hold its user's own files, such as ``.pre-commit-config.yaml``.
    """
    for file in files:
        aside = _ASIDE.fullmatch(file.name)
        if aside is None or not is_ours(aside[1]):
            continue
        with suppress(OSError):  # another process may be tidying up too
            if time.time() - file.stat().st_mtime > UNFINISHED_S:
                remove = shutil.rmtree if file.is_dir() else os.unlink
                remove(file)


def sync_folder(folder: Path) -> None:
    """Make what was renamed or made in a folder survive a power cut, if its file system can do that.

    Raises OSError.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        log.debug("cannot sync %s: %s", folder, error.strerror)
    finally:
        os.close(fd)
