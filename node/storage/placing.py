"""Files and folders for other programs, which appear whole or not at all.

Unlike the files that a node keeps for itself (`wholefile.write_atomically`), these have the permissions that
the user's umask gives, and may be too large to be held in memory.
"""

import errno
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from psutil import disk_partitions

LOST_AND_FOUND = "lost+found"
"""In the root of every ext4 file system, and not a user's."""


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file or a folder, which replaces what is at `path` when the block ends.

    If the block fails, or a signal ends this process in it, what is at `path` stays as it was, and nothing is
    left beside it. A folder that is a mount point stays: the place is then inside it, and its files are
    replaced one by one. Raises OSError.
    """
    path = _end_of_links(path)
    mounted = path.is_dir() and is_mount_point(path)
    aside = _beside(path / path.name if mounted else path)
    with _ended_by_no_signal():
        try:
            yield aside
            if mounted:
                _refill(path, aside)
            elif path.is_dir() and any(path.iterdir()):
                _swap(aside, path)
            else:
                os.replace(aside, path)
        except BaseException:
            _remove(aside)
            raise


@contextmanager
def _ended_by_no_signal() -> Iterator[None]:
    """A signal that would end this process at once, such as that of a terminal that closes, raises SystemExit
    inside the block, and ends the process after it."""
    ended_by: list[int] = []

    def leave(number: int, _: object) -> NoReturn:
        ended_by.append(number)
        raise SystemExit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    numbers = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if in_main and signal.getsignal(n) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        for by in ended_by:
            signal.raise_signal(by)


def put(path: Path, data: bytes) -> None:
    """Write a file, replacing one that is there. Raises OSError."""
    path = _end_of_links(path)
    aside = _beside(path)
    try:
        with written(aside) as file:
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        _remove(aside)
        raise


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, synced to disk when the block ends. Raises OSError."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _end_of_links(path: Path) -> Path:
    """The path that `path` leads to, so that no link is replaced. Raises OSError if that is a device, a pipe
    or a socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file", str(path))
    return Path(os.path.realpath(path))


def _swap(aside: Path, path: Path) -> None:
    """Put a folder in the place of another, which no single rename can do."""
    old = _beside(path)
    os.rename(path, old)
    try:
        os.rename(aside, path)
    except BaseException:
        os.rename(old, path)
        raise
    shutil.rmtree(old)


def is_mount_point(path: Path) -> bool:
    """Whether an absolute path is a mount point, such as a container's volume, which cannot be replaced.

    `os.path.ismount` does not see a mount of the same file system.
    """
    return os.path.ismount(path) or str(path) in {part.mountpoint for part in disk_partitions(all=True)}


def is_of_mount(folder: Path, name: str) -> bool:
    """Whether `name` in a mount point is its file system's, or was left by a process that was killed."""
    is_left = re.fullmatch(rf"\.{re.escape(folder.name)}-[0-9a-f]{{8}}", name)
    return (name == LOST_AND_FOUND or is_left is not None) and is_mount_point(folder)


def _refill(folder: Path, aside: Path) -> None:
    """Replace everything else in `folder` by what is in `aside`, a folder in it."""
    old = _beside(aside)
    there = [path for path in folder.iterdir() if path != aside and path.name != LOST_AND_FOUND]
    old.mkdir()
    moves = [(path, old / path.name) for path in there]
    moves += [(path, folder / path.name) for path in aside.iterdir()]
    done = 0
    try:
        for source, target in moves:
            os.rename(source, target)
            done += 1
    except BaseException:
        for source, target in reversed(moves[:done]):
            os.rename(target, source)
        old.rmdir()
        raise
    aside.rmdir()
    shutil.rmtree(old)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
