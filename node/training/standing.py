"""What a training loop may ask of its peer, and how an attached peer leaves.

`Peer` adds what the loop does. On several ranks all see the swarm as the first saw it at the last step, so
that they decide alike whatever follows from it.
"""

import abc
import atexit
import os
import sys
import time
from collections.abc import Callable, Sized
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from torch import nn

from gossamer.node.ipc.control import Report
from gossamer.node.schedules import Schedule
from gossamer.node.training.beside import Beside
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.ranks import Alone, Ranks, Word
from gossamer.node.training.reporting import Reporter
from gossamer.node.training.shard import Shard

if TYPE_CHECKING:
    from gossamer.node.peer import Peer

LEAVE_S = 2.0
"""How long leaving waits for the last delta to be on disk."""

WARM_UP_STEPS = 20
"""Inner steps over which a fresh inner optimizer's learning rate rises to its place."""


class Link(Protocol):
    """What is known of the daemon and the swarm."""

    node_id: bytes
    own_last: int
    clock: int
    swarm_tokens: int
    links: int
    stop_asked: Event

    def close(self) -> None: ...


class Standing(abc.ABC):
    """Where one model stands in its swarm."""

    def __init__(
        self, model: nn.Module, link: Link, team: Alone | Ranks, *, stop_round: int, beside: Beside | None
    ) -> None:
        """`beside` is what an attached peer's script has beside it."""
        self.model = model
        self._link: Link = link
        self._team = team
        self._stop_round = stop_round
        self._beside = beside
        self._word = Word()
        self.progress = Progress()
        """How far this node has come over all its runs."""
        self.resumed = False
        """Whether the inner optimizer goes on from an earlier run."""
        self.version = 0
        """The newest merge that the model has seen."""
        self.last_loss = 0.0
        """Mean loss of the last window that was published."""
        self.contact = ""
        """Where others join an attached peer's node, from this machine; its first rank knows."""
        self.folder: Path | None = None
        """An attached peer's node's folder; its first rank knows."""
        self._started = time.perf_counter()
        self._outer_s = 0.0
        self._steps_run = 0
        self._callbacks: list[Callable[[Peer], object]] = []
        self._reporter = Reporter(str(next(model.parameters()).device))
        self._told_to_stop = False
        self._inside = False
        """Whether a step is under way: then nothing is in order that could be published."""
        self._left = False
        self._pid = os.getpid()

    @property
    def has_left(self) -> bool:
        """Whether the peer has left its swarm."""
        return self._left

    @property
    def node_id(self) -> bytes:
        return self._link.node_id

    @property
    def _seen(self) -> Link | Word:
        """What the swarm looks like; on several ranks, as all of them saw it at the last step."""
        return self._link if self._team.size == 1 else self._word

    @property
    def round(self) -> int:
        """Our last published round."""
        return self._seen.own_last

    @property
    def clock(self) -> int:
        """The swarm's round clock."""
        return self._seen.clock

    @property
    def swarm_tokens(self) -> int:
        """Tokens of all deltas merged so far: what schedules are functions of."""
        return self._seen.swarm_tokens

    @property
    def should_stop(self) -> bool:
        """Whether the node is stopping: SIGTERM came, or its daemon is done.

        An attached loop that goes on for more than one step is ended by SystemExit at the next.
        """
        return bool(self._word.stop) if self._team.size > 1 else self._is_told_to_stop()

    def _is_told_to_stop(self) -> bool:
        return self._link.stop_asked.is_set() or (self._beside is not None and self._beside.must_stop)

    @property
    def finished(self) -> bool:
        """Whether the last round that was asked for is published."""
        return 0 < self._stop_round <= self.round

    @property
    def wait_fraction(self) -> float:
        """Part of the wall time since `begin` that the loop was kept from inner steps: all of `step`.

        An upper bound on waiting: encoding, adding and every lock are in it.
        """
        return self._outer_s / max(1e-9, time.perf_counter() - self._started)

    def metrics(self) -> dict[str, Any]:
        """Where this node and its swarm are, for a logger of one's own; costs nothing.

        `round`: our last published; `clock`: the swarm's round; `swarm_tokens`: merged so far, by all;
        `tokens`, `steps`: this node's over all its runs; `loss`: mean over our last published window;
        `version`: counts merges, the newest that the model has seen; `wait_fraction`; `links`: nodes that we
        are linked to.
        """
        return {
            "round": self.round,
            "clock": self.clock,
            "swarm_tokens": self.swarm_tokens,
            "tokens": self.progress.tokens,
            "steps": self.progress.steps,
            "loss": self.last_loss,
            "version": self.version,
            "wait_fraction": self.wait_fraction,
            "links": self._seen.links,
        }

    def lr_scale(self, schedule: Schedule) -> float:
        """Factor on the peak learning rate: the schedule at the swarm's tokens (see `schedules`).

        A fresh inner optimizer is warmed up over `WARM_UP_STEPS` steps besides, for it knows nothing yet of a
        model that may be far along. Fits ``LambdaLR(optimizer, lambda _: peer.lr_scale(schedule))``.
        """
        warm_up = 1.0 if self.resumed else min(1.0, (self._steps_run + 1) / WARM_UP_STEPS)
        return warm_up * schedule(self.swarm_tokens)

    def shard(self, dataset: Sized, *, fraction: float = 1.0) -> Shard:
        """A sampler that draws `dataset` in this node's own order; with `fraction`, a random part of it.

        It does not deal the data out: what two nodes hold may be seen by both. Raises ConfigError.
        """
        return Shard(
            len(dataset),
            node_id=self.node_id,
            begun_at=self.progress.steps,
            fraction=fraction,
            rank=self._team.rank,
            ranks=self._team.size,
        )

    def on_merged(self, callback: Callable[["Peer"], object]) -> Callable[["Peer"], object]:
        """Call `callback(peer)` in the training thread, in `step`, whenever the model took over a newer Phi.

        Returns the callback, so that this may decorate it.
        """
        self._callbacks.append(callback)
        return callback

    # -- the life of an attached peer

    def _check_here(self) -> None:
        """Raise RuntimeError where nothing that the model still learns would reach the swarm."""
        if self._left:
            raise RuntimeError("this peer has left its swarm: attach again to go on training in it")
        if os.getpid() != self._pid:
            raise RuntimeError("a peer belongs to the process that attached, and not to those forked off it")

    def leave(self) -> None:
        """Publish the open window, save, and stop the daemon; what leaving the `with` in good order does."""
        self._end(in_order=True)

    def abandon(self) -> None:
        """Stop the daemon and publish nothing more; what an exception in the `with` does."""
        self._end(in_order=False)

    def leave_at_exit(self) -> None:
        """The process ends and nobody has left: do what the `with` would, for what has ended it."""
        error = getattr(sys, "last_value", None)
        self.__exit__(type(error) if error else None, error, None)

    @abc.abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Publish the open window."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Tell the daemon how training is doing."""

    def close(self) -> None:
        """Disconnect from the daemon; an attached peer's daemon stops."""
        self._link.close()
        if self._beside is not None:
            self._beside.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interrupt may come anywhere; our own SystemExit comes to all ranks at the same step.
        ends_alike = kind is None or self._told_to_stop
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self._end(in_order=ends_alike or (interrupted and self._team.size == 1))

    def _end(self, *, in_order: bool) -> None:
        if self._left or os.getpid() != self._pid:
            return
        self._left = True
        atexit.unregister(self.leave_at_exit)
        try:
            if in_order and not self._inside:
                self.flush(LEAVE_S)
        finally:
            self.close()

    def _after_step(self, before: int) -> None:
        """Callbacks, and what an attached peer does besides."""
        if self.version != before:
            for callback in self._callbacks:
                callback(cast("Peer", self))  # there is no other kind
        if self._beside is None:
            return
        self._tell("training")
        if self.should_stop:
            if self._told_to_stop:
                raise self._beside.ending()
            self._told_to_stop = True

    def _tell(self, state: str) -> None:
        """Report, where nobody else does."""
        if self._beside is not None:
            self._reporter.report(self, state)
