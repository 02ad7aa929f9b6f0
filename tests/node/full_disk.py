"""Disks that take nothing more."""

from __future__ import annotations

import errno


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
