"""Disks that are full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gossamer.node import files as wholefile
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.disk import Disk


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def disk_of(*folders: Path, on_closed: Callable[[], object] = lambda: None) -> Disk:
    """The gate before some folders, which are made if need be."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return Disk(*folders, on_closed=on_closed)


def no_room_in(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file can be created in folders with this name, or below them; elsewhere it can."""
    placed = wholefile.placed

    def only_elsewhere(path: Path) -> AbstractContextManager[Path]:
        if folder in path.parts:
            full()
        return placed(path)

    monkeypatch.setattr(wholefile, "placed", only_elsewhere)


class FullDisk:
    """Makes the next `times` puts of a chunk store fail."""

    def __init__(
        self, store: ChunkStore, times: int, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC
    ) -> None:
        self.left = times
        self._code = code
        self._put: Callable[..., bytes] = store.put
        monkeypatch.setattr(store, "put", self.put)

    def put(self, *args: object, **kwargs: object) -> bytes:
        if self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._put(*args, **kwargs)
