"""Where a local swarm's result is written: a file, or an existing pipe, terminal or device.

A file appears whole or not at all. Anything else is written into, as by a shell's ``>``, and never replaced.
"""

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from gossamer.node.storage.placing import put
from gossamer.protocol.errors import ConfigError, StorageError

STDOUT = 1

_NAMED_FD = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,6})")
_STANDARD = {"/dev/stdout": STDOUT, "/dev/stderr": 2}


class ResultFile:
    """The path given with ``--json``."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if nothing can be written there, since that is better known before the run."""
        self._path = path
        self._place = path.absolute()
        self._fd = _fd_named(self._place)
        try:
            self._check()
        except OSError as error:
            raise ConfigError(f"--json {path}: {error.strerror}") from None

    @property
    def is_stdout(self) -> bool:
        """Whether it is standard output. The display should then go elsewhere."""
        return self._fd == STDOUT

    def write(self, data: bytes) -> None:
        """Write the result. Raises StorageError."""
        try:
            if self._fd is not None:
                _write_all(self._fd, data)
            elif self._is_stream():
                with open(self._place, "wb") as stream:
                    stream.write(data)
            else:
                put(self._place, data)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from None

    def _check(self) -> None:
        path, folder = self._place, Path(os.path.realpath(self._place)).parent
        if self._fd is not None:
            if fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise ConfigError(f"--json {self._path} is only open for reading")
        elif path.is_dir():
            raise ConfigError(f"--json {self._path} is a folder; name a file")
        elif self._is_stream():
            if not os.access(path, os.W_OK):
                raise ConfigError(f"--json {self._path} is not writable")
        elif path.exists() and not path.is_file():
            raise ConfigError(f"--json {self._path} is neither a file nor a pipe; name a file")
        elif not folder.is_dir():
            raise ConfigError(f"--json {self._path}: there is no folder {folder}")
        elif not os.access(folder, os.W_OK):
            raise ConfigError(f"--json {self._path}: the folder {folder} is not writable")

    def _is_stream(self) -> bool:
        with suppress(OSError):
            mode = os.stat(self._place).st_mode
            return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        return False


def _fd_named(path: Path) -> int | None:
    """The file descriptor of ours that a path names, as with a shell's ``>(...)``; None if it names none."""
    named = _NAMED_FD.fullmatch(str(path))
    return int(named[1]) if named else _STANDARD.get(str(path))


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
