"""What would survive a power cut: the files and folders that were synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Synced:
    """Contains a path if it was synced, at its present size, since this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: set[tuple[int, int]] = set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def __contains__(self, path: Path) -> bool:
        found = path.stat()
        return (found.st_ino, found.st_size) in self._found

    def _note(self, fd: int) -> None:
        found = os.fstat(fd)
        self._found.add((found.st_ino, found.st_size))
        self._fsync(fd)
