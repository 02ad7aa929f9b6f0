"""What this node knows of the data that the swarm goes through together, for its trainer and for displays.

The fold (`protocol.history.data_claims`) is over merged records. This is the same fold over all records that
have come so far, merged or not: the sooner a node knows what others have trained on, the less is drawn twice.
"""

import time

from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.ipc import messages as control
from gossamer.protocol.history import folds
from gossamer.protocol.history.data_claims import DataClaims, taken
from gossamer.protocol.replica import Replica
from gossamer.protocol.sampling import EVERY_ROUND

LOOK_S = 0.5
"""How often to look."""

REST = 100
"""Then it rests for so many times as long as it took: with 256 members in each round that is some 10 ms, of
the event loop's time."""

LAG = 2
"""Rounds in which a claim gets around, beside those until all fragments are published."""

SETTLED = 4
"""Rounds are looked at again and again for so many times as long as a claim takes to come."""


class DataView:
    """The fold over all records that are here."""

    def __init__(self, core: Replica, loop: MergeLoop, port: TrainerPort) -> None:
        self._core = core
        self._loop = loop
        self._port = port
        self._data = core.manifest.data
        self.claims = DataClaims(self._data.blocks)
        """As of the last look."""
        self._settled: tuple[int, int, DataClaims] | None = None
        """The history that the fold is of, as the loop counts them; a round; and the fold as of that
        round."""
        self._is_due = True
        self._due_at = 0.0
        self._taken = b""
        self._told = -1
        """Which trainer was told last, by their number."""

    def changed(self, round_: int) -> None:
        """There are other records of a round now."""
        self._is_due = True
        if self._settled is not None and round_ <= self._settled[1]:
            self._settled = None

    def tell(self) -> None:
        """Tell the trainer, if there is one, what is taken of the data, if that has changed. It looks again
        for that, but only now and then."""
        if not self._data.blocks:
            return
        is_new = self.look()
        if self._taken and self._port.attached and (is_new or self._told != self._port.attachments):
            self._told = self._port.attachments
            self._port.send(control.Data(self._taken))

    def look(self) -> bool:
        """Bring `claims` up to date, now and then; returns whether something has changed."""
        core, base, now = self._core, self._loop.base, time.monotonic()
        # While a round is being closed, its records are neither here nor in the base.
        if not self._is_due or now < self._due_at or base.round < core.ledger.floor:
            return False
        self._is_due = False
        cap, ledger = core.manifest.outer.weight_cap, core.ledger
        lag = len(core.layout.fragments) * core.turn // EVERY_ROUND + LAG
        rounds = [round_ for round_ in ledger.rounds() if round_ > base.round]
        since, claims = base.round, folds.unpack(base.folds, core.manifest).data
        if self._settled is not None and self._settled[0] == self._loop.begun and self._settled[1] >= since:
            _, since, claims = self._settled
        upto = max([since, *rounds[: -SETTLED * lag]])
        claims = claims.as_of(upto, since, {r: ledger.valid(r) for r in rounds if since < r <= upto}, cap)
        self._settled = self._loop.begun, upto, claims
        newest = {round_: ledger.valid(round_) for round_ in rounds if round_ > upto}
        self.claims = claims.as_of(max(newest, default=upto), upto, newest, cap)
        recent = (delta for round_ in rounds[-lag:] for delta in ledger.valid(round_))
        before, self._taken = self._taken, taken(self.claims, recent, core.identity.node_id).pack()
        self._due_at = now + LOOK_S + REST * (time.monotonic() - now)
        return self._taken != before
