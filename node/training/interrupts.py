"""Ctrl-C, and whatever else a script's handlers of signals raise, waits until what is under way is whole.

Whoever interrupts a cell of a notebook goes on with the next one, and whoever has a watchdog with its next
step. Of a delta that is half made, or of a Phi that is half taken over, the other half would be lost, or be
published as progress.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

HANDLED = tuple(number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP))
"""Signals that may have a handler."""

_held: dict[int, Handler] = {}
"""The handlers of those that the main thread holds back: what is called inside need not do so again."""


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, signals with handlers in Python are noted; those are called in the order in which they came,
    when this is left. Only the main thread ever gets any."""
    if threading.current_thread() is not threading.main_thread() or _held:
        yield
        return
    handlers: dict[int, Handler] = {
        number: found for number in HANDLED if callable(found := signal.getsignal(number))
    }
    came: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            signal.signal(number, came.setdefault)
        _held.update(handlers)
        yield
    finally:
        _held.clear()
        try:
            _put_back(dict(handlers))
        finally:
            with ExitStack() as calls:  # as each may raise; the last that is pushed comes first
                for number, frame in reversed(came.items()):
                    calls.callback(handlers[number], number, frame)


def _put_back(handlers: dict[int, Handler]) -> None:
    """Set them all, though one may be called as soon as it is set, and raise."""
    try:
        while handlers:
            number = next(iter(handlers))
            signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _put_back(handlers)
