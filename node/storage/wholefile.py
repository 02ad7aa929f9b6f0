"""Files that are whole or not there: written aside, synced where they must last, then renamed."""

import errno
import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gossamer.protocol.errors import DiskFullError, StorageError

log = logging.getLogger("gossamer.node")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What says that there is no room left on a disk, or for this user."""

UNFINISHED_S = 60.0
"""A file that is still aside after this long was left there by a crash."""

_ASIDE = re.compile(r"\.(.+)-[a-z0-9_]{8}")
"""What `open_aside` calls a file; tempfile chooses the last eight characters."""


def cannot_write(path: Path, error: OSError, otherwise: str = "") -> StorageError:
    """What to raise where a file or folder could not be made: DiskFullError where there is no room for it,
    else what says `otherwise`."""
    if error.errno in FULL:
        return disk_full(path)
    return StorageError(otherwise or f"cannot write {path}: {error.strerror}")


def leads_nowhere(path: Path) -> str | None:
    """What to say of a link to what is not there; None of anything else."""
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {os.readlink(path)}, and nothing is there: is its disk mounted?"
    return None


def misplaced(path: Path) -> str | None:
    """What to say where something that is no file is in a file's place; None if that is not so."""
    if path.is_dir():
        return f"{path} is a folder, where a file should be: move it away, or put the file back"
    return leads_nowhere(path)


def writable_once(error: OSError) -> str:
    """What has to come true before what failed so can be written again, for who waits for that."""
    if error.errno in FULL:
        return "there is space"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "fewer files are open"
    return "the folder can be written to"


def disk_full(path: Path) -> DiskFullError:
    """What to raise where there is no room for a file or folder."""
    return DiskFullError(f"cannot write {path}: the disk is full; free some space")


def open_aside(path: Path) -> tuple[int, str]:
    """A new file of mode 0600 beside `path`, to be renamed to it: its descriptor and name. Raises OSError."""
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file of mode 0600 so that it is there whole or not at all. Raises OSError."""
    fd, aside = open_aside(path)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        with suppress(FileNotFoundError):  # renamed, and then not synced
            os.unlink(aside)
        raise


def keep(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file, unless it holds that already, which a full disk does not hinder. Raises StorageError."""
    with suppress(OSError):  # one that cannot be read can be replaced
        if path.is_file() and path.read_bytes() == data:
            return
    try:
        write_atomically(path, data, durable=durable)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_first(path: Path, data: bytes) -> None:
    """Write a file for good, unless there is one by now: of several who do, all find the first one's.

    Raises OSError.
    """
    claim = path.with_name(f".{path.name}.lock")  # not a hard link, which some file systems do not have
    fd = os.open(claim, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.path.lexists(path):
            write_atomically(path, data, durable=True)
        claim.unlink(missing_ok=True)  # who still waits for this one will see that the file is there
    finally:
        os.close(fd)


def remove_unfinished(files: Iterable[Path], is_ours: Callable[[str], object]) -> None:
    """Remove files, and folders, that were left aside when a crash cut them short, if their names are ours.

    No others: a folder may hold its user's own, such as ``.pre-commit-config.yaml``.
    """
    for file in files:
        aside = _ASIDE.fullmatch(file.name)
        if aside is None or not is_ours(aside[1]):
            continue
        with suppress(OSError):  # somebody else may be tidying up, too
            if time.time() - file.stat().st_mtime > UNFINISHED_S:
                remove = shutil.rmtree if file.is_dir() else os.unlink
                remove(file)


def sync_folder(folder: Path) -> None:
    """Make what has been renamed or made in a folder survive a power cut, where its file system can do that.

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
