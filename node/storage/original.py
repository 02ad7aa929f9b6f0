"""Whether a file is still the original, or a copy of it that has been put back.

A file system gives every file a number (the inode), and a copy has another number. But the number of a
removed file may be given again, and a backup may be written into the file that was there. So beside the file
lies a mark, `MARK_NAME`, which is never written to again, and its time of last change (ctime) is noted too.
Nobody can set that time, and whatever restores the folder changes it.
"""

import os
from contextlib import suppress
from pathlib import Path

from gossamer.node.storage.wholefile import sync_folder

MARK_NAME = "original"
"""An empty file that tells a node's folder from a copy of it."""


def file_identity(path: Path) -> str:
    """Which file this is, and when its mark was last changed. Makes the mark if need be. Raises OSError."""
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
    """Whether `known`, as noted by any version, is of the file that is `here`. The first had no mark."""
    return known in (here, here.split(maxsplit=1)[0])
