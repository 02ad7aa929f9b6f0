"""Ctrl-C, and whatever else a script's handlers of signals raise, waits until what is under way is whole.

Whoever interrupts a cell of a notebook goes on with the next one, and whoever has a watchdog with its next
step. Of a delta that is half made, or of a Phi that is half taken over, the other half would be lost, or be
published as progress.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

HELD = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
"""Signals whose handlers raise in a training loop: a person's, a scheduler's, watchdogs', a DataLoader's.

Others are left as they are, since what is set below a handler in Python (`signal.siginterrupt`, a chain of
`faulthandler`) does not come back with it.
"""

_held: dict[int, Handler] = {}
"""The handlers of those that the main thread holds back, until each is put back: what is called inside need
not do so again."""


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, signals with handlers in Python are noted; those are called in the order in which they came,
    when this is left. Only the main thread ever gets any."""
    if threading.current_thread() is not threading.main_thread() or _held:
        yield
        return
    handlers: dict[int, Handler] = {
        number: found for number in HELD if callable(found := signal.getsignal(number))
    }
    came: dict[int, FrameType | None] = {}
    try:
        _held.update(handlers)  # before any is replaced: another thread may fork meanwhile
        for number in handlers:
            signal.signal(number, came.setdefault)
        yield
    finally:
        try:
            _put_back()
        finally:
            with ExitStack() as calls:  # as each may raise; the last that is pushed comes first
                for number, frame in reversed(came.items()):
                    calls.callback(handlers[number], number, frame)


def _put_back() -> None:
    """Set them all, though one may be called as soon as it is set, and raise."""
    try:
        while _held:
            number = next(iter(_held))
            signal.signal(number, _held[number])
            del _held[number]
    finally:
        if _held:
            _put_back()


# A process that another thread forks meanwhile, a DataLoader's worker say, would never hear of SIGTERM.
os.register_at_fork(after_in_child=_put_back)
