"""What a node remembers of whom it met, over its restarts, as `gossamer.node.daemon.network.address_book`
does."""

import random
from typing import TYPE_CHECKING

from gossamer.node.daemon.network.address_book import REMEMBER_FIRST_S, REMEMBER_INTERVAL_S, REMEMBERED_MAX

if TYPE_CHECKING:
    from tests.sim.node import Node


class Acquaintances:
    """Writes down where members are, during one life of a node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._rng: random.Random = node.stage.dice(f"acquaintances {node.index} {node.life}")

    def run(self) -> None:
        """Remember members soon, and then more and more rarely."""
        self._node.soon(REMEMBER_FIRST_S, self._remember, REMEMBER_FIRST_S)

    def _remember(self, interval: float) -> None:
        met = self._met()
        if met:
            self._node.disk.peers = met
        interval = min(2 * interval, REMEMBER_INTERVAL_S)
        self._node.soon(interval, self._remember, interval)

    def _met(self) -> dict[str, bytes]:
        """The oldest members that we dialled, others that are alive, then those that are gone: it may be our
        own network that is gone."""
        core = self._node.core
        members = [
            member
            for known in (core.roster.live(), core.roster.doubted())
            for member in self._rng.sample(known, len(known))
        ]
        others = [(address, m.record.node_id) for m in members for address in m.record.body.addresses]
        return dict([*core.links.anchors(), *others][:REMEMBERED_MAX])
