"""Writes checkpoints while training goes on.

At each inner step a share of the state is copied to memory that is kept for it, and a thread writes that
share to a temporary file, which is renamed when it is complete. So no step is held up by a whole checkpoint,
there is no second copy of the state, and few pages are touched for the first time, which is most of the cost
of copying a state.
"""

import logging
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch

from gossamer.node.storage.wholefile import SameFolder
from gossamer.node.training.checkpoint import Progress, State
from gossamer.node.training.checkpointcopy import WIDEST_BYTES, CheckpointCopy, room_of
from gossamer.node.training.interrupts import held_back
from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.workthread import Submit, WorkThread, at_once
from gossamer.protocol.errors import DivergedError

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
"""A state is copied over at most 64 inner steps, with at least 2 MiB at each: a third of a millisecond."""

BYTES_PER_S = 4 * 1024 * 1024
"""How much is written on average. A MiB costs a third of a millisecond, so this takes about a thousandth of a
core's time."""

TENSORS_PER_S = 200
"""How many tensors are written on average, however small. Each costs some 20 to 40 us, so this takes less
than a hundredth of a core's time; half of that holds up training."""

INTERVAL_MIN_S = 5.0
INTERVAL_MAX_S = 300.0
"""The longest time between checkpoints: a crash loses no more of the inner optimizer's state than this,
however large the state is."""

log = logging.getLogger("gossamer.checkpoint")


class CheckpointWriter:
    """Keeps a node's checkpoint up to date. It belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._home = SameFolder(path.parent)
        self._thread = WorkThread("checkpoint")
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._growth = 1
        """By what factor the last checkpoint's shares had to grow."""
        self._under_way: CheckpointCopy | None = None
        self._begun_at = -inf
        self._interval = INTERVAL_MIN_S
        self._said = ""
        """The logged reason why the last checkpoint could not be written."""
        self._said_of_inner = False
        """Whether it has been logged that the inner optimizer's state cannot be saved."""

    def is_due(self) -> bool:
        """Whether a checkpoint should be begun now: never while one is under way."""
        return self._under_way is None and time.monotonic() - self._begun_at > self._interval

    def begin(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin a checkpoint."""
        with held_back():  # a watchdog's error would be taken for one of the optimizer's
            self._begin(outer, optimizers, self._thread.submit)

    def _begin(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], submit: Submit) -> None:
        state = State.of(outer, optimizers)
        if optimizers and not state.has_inner and not self._said_of_inner:
            log.warning("the inner optimizer's state cannot be saved: after a restart it starts afresh")
            self._said_of_inner = True
        share = -(-max(SHARE_BYTES, state.size // SHARES) // WIDEST_BYTES) * WIDEST_BYTES * self._growth
        if self._room.numel() != share:
            self._room = room_of(share, state)
        self._begun_at = time.monotonic()
        cost_s = state.size / BYTES_PER_S + len(state.tensors) / TENSORS_PER_S
        self._interval = min(max(INTERVAL_MIN_S, cost_s), INTERVAL_MAX_S)
        self._under_way = CheckpointCopy(
            self._path, self._home, state, outer, self._room, self._growth, submit
        )

    def advance(self, progress: Progress, *, wait: bool = False) -> None:
        """Copy the next share of the checkpoint under way. Waits for the disk only if told to."""
        writing = self._under_way
        if writing is None or not (wait or writing.is_ready):
            return
        with held_back():  # a share that is copied and never written would leave a hole
            try:
                if writing.advance(progress):
                    self._under_way = None
                    self._said = ""
                    # If shares need not have grown this time, try smaller ones next: perhaps the disk had
                    # hung.
                    self._growth = writing.growth if writing.has_grown else max(1, writing.growth // 2)
            except OSError as error:  # not around all of this: a watchdog's TimeoutError is one, too
                self._say_cannot(error.strerror or str(error))
                self._give_up()
            except BaseException:  # such as no memory on a GPU, after which a loop may go on
                self._give_up()
                raise

    def save(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], progress: Progress) -> None:
        """Write a whole checkpoint now, in place of one under way; returns when the file is there.

        It does not use the thread: a script that never left its peer leaves as the interpreter exits, when
        threads take no more work.
        """
        self._give_up()
        with held_back():
            self._begin(outer, optimizers, at_once)
        while self._under_way is not None:
            self.advance(progress, wait=True)

    def save_if_sound(
        self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], progress: Progress
    ) -> None:
        """As `save`, but after an error, which must stay the one to be seen: a failure here is only logged.

        Raises DivergedError, and saves nothing, if parameters are out of range.
        """
        try:
            outer.check()
            self.save(outer, optimizers, progress)
        except DivergedError:
            raise
        except Exception as error:  # such as a failed device, which has ended training
            self._say_cannot(str(error))

    def close(self) -> None:
        """Give up the checkpoint under way, if any, and end the thread."""
        self._give_up()
        self._thread.end()

    def _say_cannot(self, problem: str) -> None:
        if problem != self._said:  # not again every few seconds while a disk is full
            log.warning("cannot save the trainer's state to %s: %s", self._path, problem)
        self._said = problem

    def _give_up(self) -> None:
        if self._under_way is not None:
            self._under_way.wait_ready()  # a disk may hang: Ctrl-C ends this
            with held_back():  # half given up, it would fail at the next step
                self._under_way.give_up()
                self._under_way = None
