"""One daemon per folder: a lock on a file in it and on the folder itself, which ends with the process."""

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from gossamer.node.storage.wholefile import cannot_write
from gossamer.protocol.errors import FolderGoneError, StorageError

LOCK_S = 0.2
"""How long another process may hold a folder's lock before we conclude that a node runs there."""

LOCK_POLL_S = 0.005

log = logging.getLogger("gossamer.node")


class FolderLock:
    """The lock of one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / "lock"
        self._file = self._folder = -1

    def take(self) -> None:
        """Make sure that no other daemon uses this folder as long as this process lives.

        Raises StorageError, or FolderGoneError if the folder cannot be written to any more (it could be when
        the node was started).

        The folder itself is locked too, if its file system can do that, since the file may be removed.
        """
        try:
            self._file = self._opened()
            _lock_soon(self._file)
            self._folder = os.open(self._root, os.O_RDONLY)
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                log.debug("cannot lock %s: %s", self._root, error.strerror)
        except BlockingIOError:
            raise StorageError(
                f"another node is running in {self._root}; stop it or choose another --dir"
            ) from None
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise FolderGoneError(
                    f"cannot write to {self._root} ({error.strerror}): give it back to this user, make its"
                    " disk writable, or stop this node"
                ) from None
            raise cannot_write(
                self._path, error, f"cannot use {self._path}: {error.strerror}; choose another --dir"
            ) from None

    def let_go(self) -> None:
        """Release the lock, as the end of our process does."""
        os.close(self._file)
        os.close(self._folder)

    def is_free(self) -> bool:
        """Whether no daemon uses this folder now. Raises StorageError."""
        try:
            file = self._opened()
        except OSError as error:
            raise StorageError(f"cannot use {self._root}: {error.strerror}; choose another --dir") from None
        return not _is_locked(file)

    def is_taken(self) -> bool:
        """Whether a daemon holds the lock. Makes no file in the folder."""
        try:
            return _is_locked(os.open(self._path, os.O_RDONLY))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def is_elsewhere(self) -> bool:
        """Whether the folder that we locked is no longer where it was: moved, removed, or unmounted."""
        try:
            return self._folder >= 0 and not os.path.samestat(os.fstat(self._folder), os.stat(self._root))
        except OSError:
            return True

    def _opened(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)


def _is_locked(file: int) -> bool:
    """Whether a process has locked a file, which is closed here."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and let go again
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _lock_soon(file: int) -> None:
    """Lock a file, with some patience: a process that asks whether a folder is free holds its lock for a
    moment. Raises OSError."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOCK_POLL_S)
