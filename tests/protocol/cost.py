"""What a call costs, whatever the machine does besides: for tests of work that must not grow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls(function: Callable[[], object]) -> int:
    """How many calls of Python functions, and parts of generators, one call makes."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
