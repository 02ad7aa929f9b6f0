"""The socket at which a trainer finds its daemon: in the node's folder or, if that path is too long, in the
system's folder for temporary files."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from gossamer.protocol.errors import StorageError

PATH_BYTES_MAX = 100
"""Unix socket paths are limited to 104 to 108 bytes, depending on the system."""


def of(root: Path, mark: str = "") -> str:
    """Path of the socket of the node in `root`, or of another one for each mark. Raises StorageError."""
    mark = mark and f"-{mark}"
    inside = str(_inside(root, mark).absolute())
    if len(os.fsencode(inside)) <= PATH_BYTES_MAX:
        return inside
    try:
        outside = _outside(root, mark)
        folder = outside.parent
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StorageError(
            f"the path of {root} is too long for a socket, and none can be made elsewhere"
            f" ({error.strerror}); set TMPDIR to a folder of your own"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{folder} is open to somebody else; set TMPDIR to a folder of your own")
    if len(os.fsencode(outside)) > PATH_BYTES_MAX:
        raise StorageError(
            f"the paths of {root} and of {folder} are both too long for a socket; set TMPDIR to a shorter one"
        )
    return str(outside)


def marked(root: Path) -> Iterator[Path]:
    """The sockets that are there, of any mark."""
    patterns = [_inside(root, "-*")]
    with suppress(OSError):
        patterns.append(_outside(root, "-*"))
    for pattern in patterns:
        yield from pattern.parent.glob(pattern.name)


def _inside(root: Path, mark: str) -> Path:
    return root / f"trainer{mark}.sock"


def _outside(root: Path, mark: str) -> Path:
    """Raises OSError if the system has no folder for temporary files."""
    ours = sha256(os.fsencode(_inside(root, "").absolute())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"gossamer-{os.getuid()}" / f"{ours}{mark}.sock"
