"""Text from this machine's own files, as bytes, split into a part to train on and a held-out part.

The default is the source of Python's standard library: some ten megabytes of real text that every machine
with Gossamer already has. Its tests are left out, since many systems package them separately.

Held-out rule: a file is held out if SHA-256 of its path, relative to the named folder and with forward
slashes, is 0 modulo 20. So no text is in both parts, and two machines whose files differ a little agree about
all files that they share. If that does not split the text sensibly (fewer than 20 files, or a held-out part
outside 1 % to 20 % of the bytes), the last 5 % of the bytes are held out instead, and at least one window.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossamer.models import TaskError

CORPUS_BYTES_MAX = 4 << 30
"""The whole corpus is held in memory; more than this is refused."""
HELD_OUT_ONE_IN = 20

_STDLIB = Path(sysconfig.get_path("stdlib"))
# `_sysconfigdata*` differs between machines; the others do not belong to the library, or are not everywhere.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"


class Corpus(NamedTuple):
    """Two disjoint byte arrays, uint8, one-dimensional."""

    train: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]


def load_corpus(paths: Sequence[Path], context: int) -> Corpus:
    """Read the files, and the text files under the folders, or the standard library when `paths` is empty.

    In folders, hidden entries, links to folders, and files that are empty, unreadable or hold a NUL byte are
    skipped. A file that several paths lead to is taken once, under the first. Files are in the order of their
    relative paths. Takes as much memory as the files, and twice as much while it reads.

    Args:
        paths: files and folders.
        context: both parts will have at least `context + 1` bytes, one window with its target.

    Raises:
        TaskError: a path does not exist or may not be read, a named file is not readable text, or there is
            no text, too little of it, or more than `CORPUS_BYTES_MAX`.
    """
    files: dict[Path, tuple[str, Path]] = {}
    for relative, path in _walk(paths):
        # Of the library every file is taken: how its files are linked depends on the machine.
        files.setdefault(path.resolve() if paths else path, (relative, path))
    if sum(path.stat().st_size for path in files) > CORPUS_BYTES_MAX:
        raise TaskError(
            f"more than {CORPUS_BYTES_MAX >> 30} GiB of data: the corpus is held in memory; "
            "name fewer files, a different part on each node"
        )
    texts = [(relative, data) for relative, path in files.values() if (data := _read(path, path in paths))]
    total = sum(len(data) for _, data in texts)
    held_out = sum(len(data) for relative, data in texts if is_held_out(relative))
    where = ", ".join(map(str, paths)) or f"the standard library ({_STDLIB})"
    if not total:
        raise TaskError(f"no text in {where}: name files or folders that contain some")
    window = context + 1
    if total < 2 * window:
        raise TaskError(
            f"{where} has {total} bytes of text, but a context of {context} needs at least "
            f"{2 * window}: add text or choose a smaller context"
        )
    by_file = len(texts) >= HELD_OUT_ONE_IN and 0.01 * total <= held_out <= 0.20 * total
    # Held-out files come last, so that both parts are views of one buffer.
    texts.sort(key=lambda text: (by_file and is_held_out(text[0]), text[0]))
    joined = np.frombuffer(bytearray().join(data for _, data in texts), dtype=np.uint8)
    if not by_file or not window <= held_out <= total - window:
        held_out = max(total // HELD_OUT_ONE_IN, window)
    return Corpus(joined[: total - held_out], joined[total - held_out :])


def is_held_out(relative: str) -> bool:
    """Whether the held-out rule takes this file, by its relative path with forward slashes."""
    digest = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def _walk(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The files that may hold text, each with its relative path. Raises TaskError."""
    skipped = frozenset() if paths else _STDLIB_SKIPPED_FOLDERS
    for root in paths or (_STDLIB,):
        try:
            if root.is_dir():
                os.scandir(root).close()  # os.walk says nothing of a folder that may not be read
            mode = root.stat().st_mode
        except FileNotFoundError:
            raise TaskError(f"data path {root} does not exist: check its spelling") from None
        except OSError as error:
            raise TaskError(f"cannot read data path {root}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            yield root.name, root
        elif not stat.S_ISDIR(mode):
            raise TaskError(f"data path {root} is neither a file nor a folder: name text files or folders")
        # os.walk does not descend into links to folders, so there are no loops; in a file it finds nothing.
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
            for name in names:
                is_wanted = paths or (name.endswith(".py") and not name.startswith(_STDLIB_SKIPPED_PREFIX))
                path = Path(folder, name)
                # Only regular files: opening a pipe would wait for ever.
                if is_wanted and not name.startswith(".") and os.path.isfile(path):
                    yield path.relative_to(root).as_posix(), path


def _read(path: Path, is_named: bool) -> bytes:
    """The file's text; empty for one that is no readable text, unless the user has named it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        data, problem = b"", error.strerror
    else:
        problem = "it is not text (it holds NUL bytes); name text files" if b"\0" in data else None
    if problem and is_named:
        raise TaskError(f"cannot read data file {path}: {problem}")
    return b"" if problem else data
