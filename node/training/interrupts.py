"""Ctrl-C that waits until what is under way is whole.

Whoever interrupts a cell of a notebook goes on with the next one. Of a delta that is half made, or of a Phi
that is half taken over, the other half would be lost, or be published as progress.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, Ctrl-C is noted, and comes when this is left. Only the main thread ever gets one."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[object, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])  # type: ignore[arg-type]
