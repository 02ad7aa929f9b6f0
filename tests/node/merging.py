"""A running `Merging`, with a core and a trainer that the test stands in for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import numpy as np

from gossamer.node.daemon.phi.loop import Merging
from gossamer.node.ipc import messages as control
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.payloads.payload import encode_payload
from gossamer.protocol.records import Delta
from tests.node.trainer_side import until
from tests.node.world import OWN, World
from tests.protocol.builders import LAYOUT, body_of, identity, signed


class FakePort:
    """A trainer that takes offers when the test says so."""

    def __init__(self) -> None:
        self.attachments = 0
        self.attached = False
        self.untaken: set[int] = set()
        self.offers: list[tuple[int, control.Phi, Ints]] = []

    def attach(self) -> None:
        self.attachments += 1
        self.attached = True
        self.untaken.clear()

    def is_free(self, fragment: int) -> bool:
        return fragment not in self.untaken

    async def offer(self, fragment: Fragment, phi: Ints, told: control.Phi) -> None:
        assert self.attached and fragment.index not in self.untaken
        self.untaken.add(fragment.index)
        self.offers.append((fragment.index, told, phi.copy()))


class Setup:
    def __init__(self, world: World) -> None:
        self.world = world
        self.port = FakePort()
        self.ledger = Ledger()
        self.held: set[bytes] = set()
        self.lost: list[bytes] = []
        self.core = SimpleNamespace(
            ledger=self.ledger,
            layout=LAYOUT,
            holds=self.held.__contains__,
            caught_up=True,
            roster=Roster(OWN),
            sealing=SimpleNamespace(joined=True),
            identity=identity(99),
            clock=10**9,
            horizon=10**9,
            somebody_trains=True,
            rests=False,
            fetcher=SimpleNamespace(wants=SimpleNamespace(any_has_holder=False)),
        )
        self.merged: list[int] = []
        self.before_offer: Callable[[], None] = lambda: None
        self.merging = Merging(
            self.core,  # type: ignore[arg-type]
            self.port,  # type: ignore[arg-type]
            self.lost.append,
            on_merged=self.merged.append,
            on_judged=lambda round_, deltas, found: None,
            before_offer=self._before_offer,
        )
        self.merger = world.merger()

    def _before_offer(self) -> None:
        self.before_offer()

    def arrive(self, *deltas: Delta) -> None:
        for delta in deltas:
            self.ledger.add(delta)
            self.held.add(delta.record_id)
            self.merging.mark(delta.round)

    def take(self, fragment: int) -> None:
        self.port.untaken.discard(fragment)
        self.merging.look()

    async def merged_all(self) -> None:
        await until(lambda: not self.merging.behind)
        await self.merging.digest()  # which waits for a merge under way

    def offered(self) -> list[int]:
        return [index for index, _, _ in self.port.offers]


@contextlib.asynccontextmanager
async def merging(world: World) -> AsyncIterator[Setup]:
    setup = Setup(world)
    task = asyncio.create_task(setup.merging.run())
    yield setup
    task.cancel()
    await asyncio.wait([task])
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
