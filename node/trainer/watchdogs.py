"""What watches a training loop: are its parameters as at the last step boundary, does it train anything, what
does it wait for?"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

SAMPLES = 64
"""How many parameters are sampled. What changes a model changes many of them."""

EMPTY_TURNS = 10
"""How many times in a row all fragments may be published without a change, if there were changes before: a
scaler that skips steps, or a rate that is 0 for a while, is no mistake."""

log = logging.getLogger("gossamer.peer")


class StepBoundary:
    """Whether parameters are as they were at the last step boundary.

    torch counts changes in place, except those by `.data` (Lightning's averaged weights come and go in that
    way) and by fused optimizers. So one value of some parameters is remembered, too. On a GPU it stays there:
    marking a boundary waits for nothing, and takes some tens of microseconds.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._views: list[Tensor] = []
        """One value of each sampled tensor."""
        self._marked: tuple[list[int], list[int], list[Tensor]] = [], [], []
        self.mark()

    def mark(self) -> None:
        """The parameters are now as at a step boundary."""
        places = [tensor.data_ptr() for tensor in self._tensors]
        if places != self._marked[0]:
            self._views = [
                tensor.detach()[tuple(size // 2 for size in tensor.shape)].view(1)
                for tensor in self._tensors[:: max(1, len(self._tensors) // SAMPLES)]
                if tensor.numel()
            ]
        self._marked = places, [tensor._version for tensor in self._tensors], self._sampled()

    @property
    def holds(self) -> bool:
        """Whether they still are."""
        places, versions, values = self._marked
        return (
            places == [tensor.data_ptr() for tensor in self._tensors]
            and versions == [tensor._version for tensor in self._tensors]
            and all(map(torch.equal, values, self._sampled()))
        )

    def _sampled(self) -> list[Tensor]:
        """The values, one tensor for each device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for view in self._views:
            by_device.setdefault(view.device, []).append(view)
        return [torch.cat(views) for views in by_device.values()]


class IdleWatch:
    """Warns, once, if no fragment's delta has held anything since training began, or for a long time.

    The loop then trains something other than the model that it has attached: a copy, parameters that are
    passed from function to function, or a model that a notebook has created again. Such a loop fails nowhere.
    """

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._empty = 0
        """Empty deltas since the last one that held something."""
        self._has_changed = self._has_warned = False

    def published(self, fragment: int, changed: bool) -> None:
        """A fragment was published; `changed` says whether its delta holds anything."""
        self._has_changed = self._has_changed or changed
        self._empty = 0 if changed else self._empty + 1
        turns = EMPTY_TURNS if self._has_changed else 1
        if self._empty >= turns * self._fragments and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no parameter has changed %s, so nothing is published: does the optimizer train this model,"
                " at a learning rate above 0?",
                f"for {self._empty} rounds" if self._has_changed else "since training began",
            )


WARN_AFTER_S = 20.0
"""When to log for the first time what is waited for; each next time comes after twice as long. Other ranks
may just be busy, with an evaluation say."""

POLL_S = 1.0


class WaitWatch:
    """Logs what the training thread waits for, if that takes long: gloo itself says nothing for half an
    hour."""

    def __init__(self) -> None:
        self._wait: tuple[str, float] | None = None
        """What is waited for, and since when."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wait-watch", daemon=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Inside, this thread waits."""
        if self._thread.ident is None:
            self._thread.start()
        self._wait = text, time.monotonic()
        try:
            yield
        finally:
            self._wait = None

    def close(self) -> None:
        """End the thread: there is nothing more to wait for."""
        self._over.set()

    def _watch(self) -> None:
        logged: tuple[str, float] | None = None
        warn_after = WARN_AFTER_S
        while not self._over.wait(POLL_S):
            if (wait := self._wait) is None:
                continue
            if wait != logged:
                logged, warn_after = wait, WARN_AFTER_S
            waited = time.monotonic() - wait[1]
            if waited >= warn_after:
                warn_after = 2 * waited
                log.warning("%s (waited %.0f s)", wait[0], waited)
