"""Whether a file is the one that it was, or a copy of it that has been put back.

Its file system has given every file a number, and a copy has another. But the number of one that was removed
may be given again, and what is put back may be written into the file that was there. So beside it lies one
that is never written to again, `MARK_NAME`, and when that was last changed is told too: nobody can set that
time, and whatever puts the folder back changes it.
"""

import os
from contextlib import suppress
from pathlib import Path

from gossamer.node.storage.wholefile import sync_folder

MARK_NAME = "original"
"""What tells a node's folder from a copy of it: an empty file."""


def whereabouts(path: Path) -> str:
    """Which file this is, and when the mark beside it was last changed; made if need be. Raises OSError."""
    mark = path.with_name(MARK_NAME)
    with suppress(FileExistsError):
        fd = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.fsync(fd)
            sync_folder(mark.parent)
        finally:
            os.close(fd)
    found = mark.stat()
    return f"{path.stat().st_ino} {found.st_ino} {found.st_ctime_ns}"


def is_original(known: str, here: str) -> bool:
    """Whether `known` was said of what is `here` now, by any version: the first of all had no mark."""
    return known in (here, here.split(maxsplit=1)[0])
