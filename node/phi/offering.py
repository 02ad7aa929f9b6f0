"""Offering Phi to the trainer: a fragment that has changed, once it has taken the last offer of that one."""

from collections.abc import Callable

from gossamer.node.ipc import control
from gossamer.node.ipc.trainer_port import TrainerPort
from gossamer.node.phi.merger import Merger
from gossamer.protocol.core.merge_schedule import MergeSchedule
from gossamer.protocol.core.replica import Replica
from gossamer.protocol.payloads.layout import Fragment


class Offering:
    """Which fragments the current trainer does not have yet, and how they come to it."""

    def __init__(self, core: Replica, port: TrainerPort, schedule: MergeSchedule) -> None:
        self._core = core
        self._port = port
        self._schedule = schedule
        self._unoffered: set[int] = set()
        self._attachments = 0
        self.before: Callable[[], None] = lambda: None
        """Called before a fragment is offered: the trainer is to know first how many tokens it is of."""

    def changed(self, index: int) -> None:
        """A fragment is another than the trainer has."""
        self._unoffered.add(index)

    def all_changed(self) -> None:
        self._unoffered.update(fragment.index for fragment in self._core.layout.fragments)

    def look_for_a_new_trainer(self) -> None:
        """One that has just attached has nothing yet."""
        if self._port.attachments != self._attachments:
            self.all_changed()
        self._attachments = self._port.attachments

    async def offer(self, merger: Merger) -> None:
        """Offer all that is new, but no fragment that diverged, and none whose last offer was not taken."""
        for index in sorted(self._unoffered):
            if index not in merger.diverged and self._port.attached and self._port.is_free(index):
                fragment = self._core.layout.fragments[index]
                self._unoffered.discard(index)
                self.before()
                await self._port.offer(fragment, merger.view(fragment), self._told_of(fragment, merger))

    def _told_of(self, fragment: Fragment, merger: Merger) -> control.Phi:
        """How far a fragment has been merged.

        If we began again where the swarm is far behind our own last delta, the trainer need not wait for that
        one: it does not come until the swarm has got there.
        """
        state = merger.state(fragment)
        last = self._core.ledger.last_round(self._core.identity.node_id)
        own_round = state.own_round
        if last > self._schedule.horizon:
            own_round = max(own_round, last - (last - fragment.index) % len(self._core.layout.fragments))
        return control.Phi(fragment.index, state.merged_round, own_round, state.version)
