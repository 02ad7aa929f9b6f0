"""A running `MergeLoop`, with a core and a trainer that the test stands in for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from types import SimpleNamespace

import numpy as np

from gossamer.node.daemon.phi.loop import MergeLoop
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.ipc import messages as control
from gossamer.protocol.effects import Merge
from gossamer.protocol.events import Merged
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.identity import Identity
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.merge.contributions import RoundFigures
from gossamer.protocol.merge.schedule import MergeSchedule, SwarmState
from gossamer.protocol.payloads import Fragment, encode_payload
from gossamer.protocol.records import Delta
from tests.node.trainer_side import until
from tests.node.world import OWN, World
from tests.protocol.builders import LAYOUT, body_of, identity, signed


class FakePort:
    """A trainer that takes offers when the test says so."""

    def __init__(self) -> None:
        self.attached = False
        self.untaken: set[int] = set()
        self.offers: list[tuple[int, control.Phi, Ints]] = []

    def attach(self) -> None:
        self.attached = True
        self.untaken.clear()

    def is_free(self, fragment: int) -> bool:
        return self.attached and fragment not in self.untaken

    async def offer(self, fragment: Fragment, phi: Ints, told: control.Phi) -> None:
        assert self.attached and fragment.index not in self.untaken
        self.untaken.add(fragment.index)
        self.offers.append((fragment.index, told, phi.copy()))


class FakeCore:
    """What a core says of the swarm, and its schedule of merges. Tests set how far the swarm is."""

    def __init__(self, ledger: Ledger, holds: Callable[[bytes], bool], own: Identity) -> None:
        self.ledger, self.holds, self.identity = ledger, holds, own
        self.layout = LAYOUT
        self.roster = Roster(OWN)
        self.clock = self.horizon = 10**9
        self.caught_up = self.somebody_trains = True
        self.rests = False
        self.fetcher = SimpleNamespace(wants=SimpleNamespace(any_has_holder=False))
        self.merges = MergeSchedule(own.node_id, ledger)

    def dispatch(self, event: object) -> None:
        if isinstance(event, Merged):
            self.merges.merged(event, time.monotonic())

    @property
    def swarm(self) -> SwarmState:
        horizon = inf if self.caught_up and self.rests else self.horizon
        return SwarmState(self.clock, horizon, self.somebody_trains, self.caught_up)

    @property
    def rounds_behind(self) -> int:
        return self.merges.behind(self.swarm, time.monotonic())

    async def run(self, merging: MergeLoop) -> None:
        """Ask for what is to be merged, as long as the test goes on."""
        while True:
            if (now := time.monotonic()) >= self.merges.deadline():
                if (merge := self.merges.plan(self.swarm, self.holds, now)) is not None:
                    merging.merge(merge)
            await asyncio.sleep(0.002)


class Setup:
    def __init__(self, world: World) -> None:
        self.world = world
        self.port = FakePort()
        self.ledger = Ledger()
        self.held: set[bytes] = set()
        self.lost: list[bytes] = []
        self.core = FakeCore(self.ledger, self.held.__contains__, identity(99))
        self.merged: list[int] = []
        self.before_offer: Callable[[], None] = lambda: None
        self.loop = MergeLoop(
            self.core,  # type: ignore[arg-type]
            self.port,  # type: ignore[arg-type]
            self.core.dispatch,
            self.lost.append,
            self._on_merged,
            self._before_offer,
        )
        self.state = world.state()

    def _on_merged(self, merge: Merge, found: RoundFigures | None, has_changed: bool) -> None:
        if has_changed:
            self.merged.append(merge.round)

    def _before_offer(self) -> None:
        self.before_offer()

    async def begin(self, state: PhiState, reach: int = 0) -> None:
        def tell() -> None:
            self.core.merges.begin(state.base.round, reach, time.monotonic())

        await self.loop.begin(state, tell)

    def arrive(self, *deltas: Delta) -> None:
        for delta in deltas:
            self.ledger.add(delta)
            self.held.add(delta.record_id)
            self.core.merges.mark(delta.round, time.monotonic())

    def attach(self) -> None:
        """A trainer comes, as the daemon tells of it."""
        self.port.attach()
        self.loop.offer_all()

    def take(self, fragment: int) -> None:
        self.port.untaken.discard(fragment)
        self.loop.look()

    async def merged_all(self) -> None:
        await until(lambda: not self.core.rounds_behind)
        async with self.loop._busy:  # until a merge under way has ended
            pass

    def offered(self) -> list[int]:
        return [index for index, _, _ in self.port.offers]


@contextlib.asynccontextmanager
async def merging(world: World) -> AsyncIterator[Setup]:
    setup = Setup(world)
    task = asyncio.create_task(setup.loop.run())
    asking = asyncio.create_task(setup.core.run(setup.loop))
    yield setup
    task.cancel()
    asking.cancel()
    await asyncio.wait([task, asking])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def delta_of(author: int, round_: int, value: int, **changes: object) -> tuple[Delta, bytes]:
    fragment = LAYOUT.of_round(round_)
    payload = encode_payload(
        "int8", fragment, [np.full(slot.numel, value, dtype=np.int32) for slot in fragment.slots]
    )
    body = body_of(payload, "int8", round_, len(LAYOUT.fragments), **changes)
    return signed(identity(author), body), payload


def arrive(setup: Setup, *found: tuple[Delta, bytes]) -> None:
    for delta, payload in found:
        setup.world.keep(delta, payload)
        setup.arrive(delta)
