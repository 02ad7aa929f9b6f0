"""Offering Phi to the trainer: each changed fragment, once the trainer has taken the last offer of it."""

from collections.abc import Callable

from gossamer.node.ipc import control
from gossamer.node.ipc.trainer_port import TrainerPort
from gossamer.node.phi.merger import Merger
from gossamer.protocol.core.merge_schedule import MergeSchedule
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.payloads.layout import Fragment


class Offering:
    """Which fragments the current trainer does not have yet, and how they are offered to it."""

    def __init__(self, core: Replica, port: TrainerPort, schedule: MergeSchedule) -> None:
        self._core = core
        self._port = port
        self._schedule = schedule
        self._unoffered: set[int] = set()
        self._attachments = 0
        self.before: Callable[[], None] = lambda: None
        """Called before a fragment is offered: the trainer must know first how many tokens it is of."""

    def changed(self, index: int) -> None:
        """A fragment has changed since the trainer was offered it."""
        self._unoffered.add(index)

    def all_changed(self) -> None:
        self._unoffered.update(fragment.index for fragment in self._core.layout.fragments)

    def look_for_a_new_trainer(self) -> None:
        """A trainer that has just attached has no fragments yet."""
        if self._port.attachments != self._attachments:
            self.all_changed()
        self._attachments = self._port.attachments

    async def offer(self, merger: Merger) -> None:
        """Offer all changed fragments, except those that diverged or whose last offer was not taken."""
        for index in sorted(self._unoffered):
            if index not in merger.diverged and self._port.attached and self._port.is_free(index):
                fragment = self._core.layout.fragments[index]
                self._unoffered.discard(index)
                self.before()
                await self._port.offer(fragment, merger.view(fragment), self._told_of(fragment, merger))

    def _told_of(self, fragment: Fragment, merger: Merger) -> control.Phi:
        """How far a fragment has been merged.

        If we started again where the swarm is far behind our own last delta, the trainer need not wait for
        that delta: it is not merged until the swarm has got there.
        """
        state = merger.state(fragment)
        last = self._core.ledger.last_round(self._core.identity.node_id)
        own_round = state.own_round
        if last > self._schedule.horizon:
            own_round = max(own_round, last - (last - fragment.index) % len(self._core.layout.fragments))
        return control.Phi(fragment.index, state.merged_round, own_round, state.version)
