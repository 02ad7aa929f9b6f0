"""Files and folders for other programs, which appear whole or not at all.

Unlike what a node keeps for itself (`home.write_atomically`), they have the permissions that the user's
umask gives, and may be too large to be held in memory.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """A place beside `path` for a file or a folder, which then becomes `path`, instead of what is there.

    If the block fails, what is at `path` stays as it was, and nothing is left beside it. Raises OSError.
    """
    aside = _beside(path)
    try:
        yield aside
        if path.is_dir() and any(path.iterdir()):
            _swap(aside, path)
        else:
            os.replace(aside, path)
    except BaseException:
        _remove(aside)
        raise


def put(path: Path, data: bytes) -> None:
    """Write a file, instead of one that is there. Raises OSError."""
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
    """A new file to write to, on disk for good when the block ends. Raises OSError."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _swap(aside: Path, path: Path) -> None:
    """Put a folder in the place of another: the one thing that no single rename does."""
    old = _beside(path)
    os.rename(path, old)
    try:
        os.rename(aside, path)
    except BaseException:
        os.rename(old, path)
        raise
    shutil.rmtree(old)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
