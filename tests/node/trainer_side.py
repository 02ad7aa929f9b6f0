"""A trainer's link to a daemon over a real Unix socket, with a daemon that is only a `TrainerPort`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np

from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.ipc import messages as control
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from tests.protocol.builders import SMALL, identity

NODE_ID = identity(0).node_id


class FakeDaemon:
    """What a daemon does for its trainer: it signs each round once, and remembers that over restarts."""

    def __init__(self, path: str, manifest: Manifest = SMALL) -> None:
        self.path = path
        self.manifest = manifest
        self.signed: dict[int, bytes] = {}
        self.seen: list[int] = []
        self.answers = True
        """Whether deltas are stored and acknowledged: a daemon may die before it does that."""
        self.acknowledges = True
        self.handed_in = 0
        """The round of the last delta that is still being stored."""
        self.clock = 0
        self.changes = 0
        self.port = self._new_port()
        self._task: asyncio.Task[None] | None = None

    def _new_port(self) -> TrainerPort:
        return TrainerPort(self.path, self.manifest)

    # -- the port's Attendant

    def trainer_changed(self) -> None:
        self.changes += 1

    def welcome(self) -> control.Welcome:
        own_last = max(self.signed, default=0)
        handed_in = max(own_last, self.handed_in)
        return control.Welcome(NODE_ID, handed_in, self.clock, handed_in, own_last)

    def publish(self, message: control.Publish, payload: memoryview) -> None:
        data = bytes(payload)
        payload.release()
        self.seen.append(message.round)
        if not self.answers:
            return
        if message.round > max(self.signed, default=0):
            self.signed[message.round] = data
        if self.acknowledges:
            self.port.send(control.Published(message.round))

    # -- what tests do

    def start(self) -> None:
        self.port = self._new_port()
        self._task = asyncio.create_task(self.port.serve(self))

    async def die(self) -> None:
        """End every connection at once, as the death of its process would."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None

    async def offer(self, index: int, phi: Ints, merged: int = 1, own: int = 0, version: int = 1) -> None:
        fragment = self.manifest.plan().fragments[index]
        await self.port.offer(fragment, phi, control.Phi(fragment.index, merged, own, version))


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that another thread, task or process brings about, on however slow a machine."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def daemon_at(folder: Path, manifest: Manifest = SMALL) -> AsyncIterator[FakeDaemon]:
    daemon = FakeDaemon(str(folder / "s"), manifest)
    daemon.start()
    await asyncio.sleep(0)  # until it listens: a link that finds no daemon tries again half a second later
    try:
        yield daemon
    finally:
        if daemon._task is not None:
            assert not daemon._task.done(), daemon._task.exception()
            await daemon.die()


@contextlib.asynccontextmanager
async def link_to(daemon: FakeDaemon) -> AsyncIterator[DaemonLink]:
    link = DaemonLink(daemon.path, daemon.manifest)
    try:
        assert await asyncio.to_thread(link.wait_connected, 60)
        yield link
    finally:
        await asyncio.to_thread(link.close)


def publish(link: DaemonLink, round_: int, payload: bytes) -> None:
    """Hand in a delta, as `Peer` does."""
    area = link.payload_area
    area[: len(payload)] = payload
    message = control.Publish(round_, round_ - 2, 100, 10, 2.0, "int8", len(payload))
    link.publish(message, area)


def values_of(offer: Offer) -> Ints:
    return np.array(offer.shared.phi(SMALL.plan().fragments[offer.fragment]))
