"""What one process does for its node: the first rank leads, and the others follow.

A `Peer` plays one of the two. With several ranks, all see the swarm as the first saw it at the last step, so
that all decide alike.
"""

import abc
import time
from collections.abc import Callable
from threading import Event
from typing import Protocol

from torch import Tensor

from gossamer.node.ipc.control import Report
from gossamer.node.ipc.daemon_link import OUTDATED
from gossamer.node.training.beside import Beside
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.team import Team, Word
from gossamer.protocol.errors import ConfigError


class SwarmView(Protocol):
    """What a rank knows of the daemon and the swarm."""

    node_id: bytes
    own_last: int
    clock: int
    swarm_tokens: int
    links: int
    stop_asked: Event
    is_outdated: bool

    def close(self) -> None: ...


class RankRole(abc.ABC):
    """Leading or following. Every method is called on all ranks alike."""

    def __init__(self, link: SwarmView, team: Team, *, stop_round: int, beside: Beside | None = None) -> None:
        """`beside` is None for the built-in trainer, which has no daemon of its own and no SIGTERM to
        catch."""
        self._link: SwarmView = link
        self._stop_round = stop_round
        self._word = Word()
        self.team = team
        self.beside = beside
        self.progress = Progress()
        self.resumed = False
        self.version = 0
        self.taken = 0
        """Steps that have taken over a newer Phi. Unlike the version, it does not restart with the daemon."""
        self.last_loss = 0.0
        self.begun_at = time.perf_counter()
        self.outer_s = 0.0
        """Seconds since `begun_at` in which `step` has kept the loop from inner steps."""
        self.is_stepping = False
        """Whether a change is half done, now or since an error, so that nothing can be published. With
        several ranks, the first knows."""
        self.stop_requested = False
        """Whether the script wants its loop to end; with several ranks, all hear of it at the next step."""

    @property
    def node_id(self) -> bytes:
        return self._link.node_id

    @property
    def seen(self) -> SwarmView | Word:
        """What the swarm looks like; with several ranks, as the first told all of them at the last step."""
        return self._link if self.team.size == 1 else self._word

    @property
    def should_stop(self) -> bool:
        word = self._word
        return bool(word.stop or word.leaving) if self.team.size > 1 else self._is_told_to_stop()

    def ending(self) -> BaseException:
        """The exception for a loop that goes on although it should stop."""
        assert self.beside is not None
        if self._link.is_outdated:
            return ConfigError(f"{OUTDATED}: start this script again, which goes on from its folder")
        if self._word.leaving:
            return ConfigError(
                "another rank of this node has left its training loop, and all have to leave theirs at the"
                " same step: call request_stop, and break when should_stop says so"
            )
        return self.beside.ending()

    @property
    def is_outdated(self) -> bool:
        """Whether the daemon is of another release than this process."""
        return self._link.is_outdated

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM has come to the script."""
        return self.beside is not None and self.beside.was_terminated

    def _is_told_to_stop(self) -> bool:
        told = self._link.stop_asked.is_set() or (self.beside is not None and self.beside.must_stop)
        return told or self.stop_requested

    @property
    def finished(self) -> bool:
        next_round = max(self.seen.own_last + 1, self.seen.clock)  # the swarm may have skipped the last round
        return 0 < self._stop_round < next_round

    @abc.abstractmethod
    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead."""

    @abc.abstractmethod
    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        """Record an inner step; apply and publish what is due. Returns the round published, if any."""

    @abc.abstractmethod
    def await_daemon(self, timeout_s: float) -> None:
        """Wait for a daemon that has ended and is being started again, if the open window holds anything."""

    @abc.abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Publish what the open window holds, save a checkpoint, and wait until the delta is on disk."""

    @abc.abstractmethod
    def save_if_whole(self) -> None:
        """After an error: save what it left whole, if that can be told. The last checkpoint is better than a
        state that may be torn. Raises nothing, so that the error itself is seen."""

    @abc.abstractmethod
    def drop_progress(self) -> None:
        """Go back to Phi, and discard what the open windows hold."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did; on the first rank,
        which alone knows what is to come, also whether it may be about to."""

    @abc.abstractmethod
    def agree_done(self, done: int) -> int:
        """Say whether what all ranks do together is over. Returns what the first rank says."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Tell the daemon how training is doing."""

    def close(self) -> None:
        """Disconnect from the daemon; an attached script's daemon stops, even if Ctrl-C cuts this short."""
        try:
            self.team.close()
            self._link.close()
        finally:
            if self.beside is not None:
                self.beside.stop()
