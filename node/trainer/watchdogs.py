"""Ctrl-C, and anything else that a script's signal handlers raise, waits until what is under way is whole.

A person who interrupts a notebook's cell goes on with the next cell, and a loop whose watchdog fires goes on
with its next step. The other half of a half-made delta, or of a Phi that is half taken over, would be lost or
be published as progress.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

import torch

# --- Notices a loop that trains something other than the model that it has attached.
#
# That may be a copy of the model, parameters that are passed from function to function, or a model that a
# notebook has created again. Such a loop fails nowhere, and publishes nothing but zeros.

TURNS = 10
"""How many times in a row all fragments may be published without a change, if there were changes before: a
scaler that skips steps, or a rate that is 0 for a while, is no mistake."""

log = logging.getLogger("gossamer.peer")


class IdleWatch:
    """Warns, once, if no fragment's delta has held anything since training began, or for a long time."""

    def __init__(self, fragments: int) -> None:
        self._unseen = set(range(fragments))
        """Fragments without a delta so far."""
        self._patience = TURNS * fragments
        self._in_a_row = 0
        """Empty deltas since the last one that held something."""
        self._has_changed = self._has_told = False

    def look(self, fragment: int, changed: bool) -> None:
        """A fragment was published; `changed` says whether its delta holds anything."""
        if changed:
            self._has_changed, self._in_a_row = True, 0
            return
        self._unseen.discard(fragment)
        self._in_a_row += 1
        is_long = self._in_a_row >= self._patience if self._has_changed else not self._unseen
        if not is_long or self._has_told:
            return
        self._has_told = True
        if self._has_changed:
            log.warning(
                "no parameter has changed for %d rounds, so nothing is published any more: does the"
                " optimizer still train this model, at a learning rate above 0?",
                self._in_a_row,
            )
        else:
            log.warning(
                "no parameter has changed since training began, so nothing was published: does the optimizer"
                " train this model, at a learning rate above 0?"
            )


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


# --- Whether the inner optimizers have finished the steps that they have begun.
#
# A state torn by an error in the middle of a step has momenta without the variances that go with them or, in
# the first step, half of what each parameter needs. No later process could train with it.


class StepWatch:
    """Sees the optimizers' steps begin and end, by torch's hooks. A post hook runs only after a whole
    step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._under_way = 0
        """How many steps have begun and not ended. They nest if a step calls that of its base class."""
        self._seen: set[int] = set()
        """The optimizers that have finished a step, by id."""
        self._is_compiled = False
        """Whether a step was compiled: its hooks then run after it, even if it has failed."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # its constructor skipped torch's: its steps are not seen
                self._handles.append(optimizer.register_step_pre_hook(self._begins))
                self._handles.append(optimizer.register_step_post_hook(self._ends))

    @property
    def is_whole(self) -> bool:
        """Whether all states are known to come from whole steps."""
        are_seen = all(id(one) in self._seen or not one.state for one in self._optimizers)
        return are_seen and not self._under_way and not self._is_compiled

    @property
    def is_torn(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._under_way > 0

    def begin_anew(self) -> None:
        """The loop is between two steps. If it left one in the middle before, it has accepted that state."""
        self._under_way = 0

    def end(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, *_: object) -> None:
        self._is_compiled = self._is_compiled or torch.compiler.is_compiling()
        self._under_way += 1

    def _ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._under_way = max(0, self._under_way - 1)  # `begin_anew` may have come within the step
        self._seen.add(id(optimizer))
