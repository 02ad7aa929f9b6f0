"""What a training loop may ask of its peer: where its model stands in the swarm."""

import time
from collections.abc import Sized
from math import isfinite
from typing import Any, SupportsFloat

from torch import nn

from gossamer.node.schedules import Schedule
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.rank_role import RankRole
from gossamer.node.training.shard import Shard
from gossamer.protocol.errors import ConfigError

WARM_UP_STEPS = 20
"""Inner steps over which a fresh inner optimizer's learning rate rises to its place."""


class Standing:
    """The half of `Peer` that only reads."""

    def __init__(self, model: nn.Module, role: RankRole) -> None:
        self.model = model
        self._role = role
        self._steps_run = 0

    @property
    def node_id(self) -> bytes:
        """This node's id, 32 bytes; the same on all its ranks."""
        return self._role.node_id

    @property
    def round(self) -> int:
        """The last round that this node has published."""
        return self._role.seen.own_last

    @property
    def clock(self) -> int:
        """The swarm's round clock; our own last round while the clock is unknown, as right after a sleep."""
        seen = self._role.seen
        return seen.clock if seen.clock >= 0 else seen.own_last

    @property
    def swarm_tokens(self) -> int:
        """Tokens that the whole swarm has trained on, by the deltas merged so far. Schedules depend on it."""
        return self._role.seen.swarm_tokens

    @property
    def progress(self) -> Progress:
        """How far this node has come over all its runs."""
        return self._role.progress

    @property
    def resumed(self) -> bool:
        """Whether the inner optimizer resumed the state of an earlier run."""
        return self._role.resumed

    @property
    def version(self) -> int:
        """The newest merge that the model has seen, as the daemon counts them since it started."""
        return self._role.version

    @property
    def last_loss(self) -> float:
        """Mean loss of the last window that was published, 0 before there is one."""
        return self._role.last_loss

    @property
    def should_stop(self) -> bool:
        """Whether the node is stopping: SIGTERM came, its daemon is done, or the script has asked for it.

        An attached loop may go on for one more step; the step after it raises SystemExit.
        """
        return self._role.should_stop

    @property
    def is_outdated(self) -> bool:
        """Whether the daemon is of another release than this process: only a new process can go on."""
        return self._role.is_outdated

    @property
    def finished(self) -> bool:
        """Whether this node has published its `stop_round`, or the swarm is past that round."""
        return self._role.finished

    @property
    def wait_fraction(self) -> float:
        """Fraction of the wall time since `begin` that was spent in `step`, and not in inner steps.

        An upper bound on waiting: it includes encoding, adding and every lock.
        """
        return self._role.outer_s / max(1e-9, time.perf_counter() - self._role.begun_at)

    def metrics(self) -> dict[str, Any]:
        """Where this node and its swarm are, for a script's own logger; costs nothing.

        `round`: the last that we published; `clock`: the swarm's round; `swarm_tokens`: tokens that the swarm
        has trained on, as merged so far; `tokens`, `steps`: this node's, over all its runs; `loss`: mean over
        our last published window, 0 before there is one; `version`: the newest merge that the model has seen;
        `wait_fraction`; `links`: how many nodes we are linked to.
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
            "links": self._role.seen.links,
        }

    def lr_scale(self, schedule: Schedule) -> float:
        """Factor on the peak learning rate: the schedule at the swarm's tokens (see `schedules`).

        A fresh inner optimizer is also warmed up over `WARM_UP_STEPS` steps, since it knows nothing yet of a
        model that may be far along. Use it as ``LambdaLR(optimizer, lambda _: peer.lr_scale(schedule))``.

        Raises TypeError if the schedule cannot be called, ValueError if it returns anything but a finite
        factor of 0 or more.
        """
        if not callable(schedule):
            raise TypeError(f"lr_scale takes a function of the swarm's tokens, not {schedule!r:.60}")
        warm_up = 1.0 if self.resumed else min(1.0, (self._steps_run + 1) / WARM_UP_STEPS)
        factor = schedule(self.swarm_tokens)
        if not _is_factor(factor):
            raise ValueError(f"the schedule returned {factor!r:.60}: it must return a factor of 0 or more")
        return warm_up * float(factor)  # a tensor for a learning rate is more than some optimizers take

    def shard(self, dataset: Sized, *, fraction: float = 1.0) -> Shard:
        """A sampler that draws `dataset` in this node's own order; with `fraction`, a random part of it.

        It does not divide the data between nodes: two nodes may draw the same samples. Raises ConfigError.
        """
        try:
            size = len(dataset)
        except (TypeError, NotImplementedError):  # an IterableDataset, or a DataPipe, has none
            raise ConfigError(
                f"{type(dataset).__name__} has no length: shard takes an indexed dataset. Shuffle a"
                " streaming one with a seed of this node's own, such as peer.node_id"
            ) from None
        return Shard(
            size,
            node_id=self.node_id,
            begun_at=self.progress.steps,
            fraction=fraction,
            rank=self._role.team.rank,
            ranks=self._role.team.size,
        )


def _is_factor(given: object) -> bool:
    """Whether a schedule may return this: a finite number, 0 or more."""
    try:
        return isinstance(given, SupportsFloat) and isfinite(given) and float(given) >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two: 10**400, a tensor of several
        return False
