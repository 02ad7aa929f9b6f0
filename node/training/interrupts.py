"""Ctrl-C, and anything else that a script's signal handlers raise, waits until what is under way is whole.

A person who interrupts a notebook's cell goes on with the next cell, and a loop whose watchdog fires goes on
with its next step. The other half of a half-made delta, or of a Phi that is half taken over, would be lost or
be published as progress.
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

Other signals are left alone: what is set below a handler in Python (`signal.siginterrupt`, a chain of
`faulthandler`) does not come back when the handler is put back.
"""

_held: dict[int, Handler] = {}
"""Handlers of the signals that the main thread holds back, until each is put back. While there are any, a
nested `held_back` has nothing to do."""


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, signals with handlers in Python are noted. On leaving, their handlers are called in the order
    in which the signals came. Only the main thread ever gets any."""
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
            with ExitStack() as calls:  # each may raise; the last one pushed is called first
                for number, frame in reversed(came.items()):
                    calls.callback(handlers[number], number, frame)


def _put_back() -> None:
    """Put all handlers back, though each may be called as soon as it is set, and raise."""
    try:
        while _held:
            number = next(iter(_held))
            signal.signal(number, _held[number])
            del _held[number]
    finally:
        if _held:
            _put_back()


# Otherwise a process that another thread forks meanwhile, a DataLoader's worker say, would miss SIGTERM.
os.register_at_fork(after_in_child=_put_back)
