"""The cost of a call, whatever else the machine does, for tests of work that must not grow."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls(function: Callable[[], object]) -> int:
    """How many Python calls, resumptions of generators included, one call makes.

    Without garbage collection: Hypothesis has it call a function of its own.
    """
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before, was_collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        if was_collecting:
            gc.enable()
    return count
