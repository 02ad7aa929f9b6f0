"""Real daemons on loopback, with a model of any size, and puppets that publish for them on request."""

import asyncio
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Child, start_daemon
from gossamer.protocol.errors import UnreachableError
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec
from tests.net.puppet import Puppet

WAIT_S = 120.0
POLL_S = 0.05
QUIET_S = 1.0
"""Pause between two deltas, so that one does not wait until the other is merged."""


def swarm_of(parameters: int) -> tuple[Manifest, np.ndarray]:
    """A manifest for a model of this many parameters, and its Phi_0, noise. Puppets publish at each step."""
    phi = np.random.default_rng(0).integers(-(2**20), 2**20, parameters, dtype=np.int32)
    values: dict[str, Any] = {
        "swarm": {"name": "benchmark", "created": int(time.time()) - 3600},
        "task": {"name": "none"},
        "pace": {"every_steps": 1},
        "layout": {"tensors": (TensorSpec("w", (parameters // 1000, 1000), "rda"),)},
        "genesis": {"digest": snapshots.digest(phi).hex()},
    }
    return from_values(values, "the benchmark"), phi


def new_home(folder: Path, manifest: Manifest, genesis: Path | None = None) -> Home:
    """A node's folder. With `genesis`, it holds Phi_0, as links to those chunks of another folder."""
    home = Home(folder)
    home.create()
    home.adopt(manifest)
    if genesis is not None:
        shutil.copytree(genesis, home.chunks_path, copy_function=os.link, dirs_exist_ok=True)
    return home


@dataclass(frozen=True, slots=True)
class Spread:
    """How one delta spread to all nodes."""

    seconds: float
    """Time from when its author had it until all nodes had it."""
    packed_bytes: int
    """Bytes of its payload, packed as it is sent."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes received, by node."""

    payload: list[int]
    control: list[int]


class Daemons:
    """Some daemons. Use as an async context manager: they end with it."""

    def __init__(self, folder: Path, parameters: int) -> None:
        self._folder = folder
        self.manifest, self._phi = swarm_of(parameters)
        self._homes: list[Home] = []
        self._children: list[Child] = []
        self._puppets: list[Puppet] = []

    async def __aenter__(self) -> "Daemons":
        return self

    async def __aexit__(self, *error: object) -> None:
        for puppet in self._puppets:
            await puppet.stop()
        for child in self._children:
            child.terminate()
        for child in self._children:
            await asyncio.to_thread(child.end, 5.0)

    async def grow(self, nodes: int) -> None:
        """Start all daemons, each with the model; returns once they are linked and puppets stand by."""
        genesis = None
        join: tuple[str, ...] = ()
        for number in range(nodes):
            home = new_home(self._folder / f"n{number}", self.manifest, genesis)
            if genesis is None:
                genesis = home.chunks_path
                snapshots.store(self._phi, ChunkStore(genesis))
            self._start(home, join)
            if not join:
                join = (await self._address(home),)
        await self._until(lambda statuses: all(len(s["links"]) >= min(nodes - 1, 4) for s in statuses))
        for number, home in enumerate(self._homes):
            puppet = Puppet(home.socket_path(), self.manifest, step_s=POLL_S, seed=number)
            puppet.paused = True
            puppet.start()
            self._puppets.append(puppet)
        await self._until(lambda statuses: all(s["state"] != "joining" for s in statuses))
        await asyncio.sleep(QUIET_S)

    async def publish(self, author: int) -> Spread:
        """Make one node publish a delta, and wait until all nodes have it.

        Times are those at which files were written: the author's last chunk, and each other node's.
        """
        known = _chunks(self._homes[author])
        published = len(self._puppets[author].rounds)
        self._puppets[author].paused = False
        while len(self._puppets[author].rounds) == published:
            await asyncio.sleep(POLL_S / 10)
        self._puppets[author].paused = True
        deadline = time.monotonic() + WAIT_S
        while not self._puppets[author].settled:
            await _tick(deadline)
        new = _chunks(self._homes[author]) - known
        while any(not (home.chunks_path / name).exists() for home in self._homes for name in new):
            await _tick(deadline)
        written = [max((home.chunks_path / name).stat().st_mtime for name in new) for home in self._homes]
        await asyncio.sleep(QUIET_S)
        payload = sum((self._homes[author].chunks_path / name).stat().st_size for name in new)
        return Spread(max(written) - written[author], payload)

    async def train(self, rounds: int, step_s: float) -> float:
        """Have all nodes publish in each of so many rounds; returns the seconds until all is merged."""
        begun = time.monotonic()
        deadline = begun + WAIT_S + 4 * rounds * step_s
        ends = [len(puppet.rounds) + rounds for puppet in self._puppets]
        for puppet in self._puppets:
            puppet.step_s, puppet.paused = step_s, False
        training = dict(zip(self._puppets, ends, strict=True))
        while training:
            for puppet, end in list(training.items()):
                if len(puppet.rounds) >= end:
                    puppet.paused = True
                    del training[puppet]
            await _tick(deadline)
        last = max(puppet.rounds[-1] for puppet in self._puppets)
        await self._until(
            lambda statuses: all(s["clock"] >= last and not s["rounds_behind"] for s in statuses)
        )
        return time.monotonic() - begun

    def processor_seconds(self) -> list[float]:
        """Processor time that each daemon has taken so far, user and system."""
        times = (psutil.Process(child.pid).cpu_times() for child in self._children)
        return [spent.user + spent.system for spent in times]

    async def traffic(self) -> Traffic:
        """The bytes that each node has received so far, by its own count."""
        statuses = await self._statuses()
        payload = [int(status["payload_bytes_received"]) for status in statuses]
        control = [int(s["bytes_received"]) - p for s, p in zip(statuses, payload, strict=True)]
        return Traffic(payload, control)

    def _start(self, home: Home, join: tuple[str, ...]) -> None:
        options = NodeOptions(
            folder=home.root, listen="127.0.0.1:0", join=join, name=home.root.name, admin="off"
        )
        with open(home.root.with_suffix(".log"), "ab") as log:
            self._children.append(start_daemon(options, log.fileno()))
        self._homes.append(home)

    async def _address(self, home: Home) -> str:
        deadline = time.monotonic() + WAIT_S
        while (facts := home.read_daemon()) is None:
            await _tick(deadline)
        return str(facts["address"])

    async def _statuses(self) -> list[dict[str, Any]]:
        return [await fetch_status(await self._address(home)) for home in self._homes]

    async def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if condition(await self._statuses()):
                    return
            except (UnreachableError, TimeoutError):
                pass
            await _tick(deadline)


def _chunks(home: Home) -> set[str]:
    root = home.chunks_path
    return {str(path.relative_to(root)) for path in root.glob("??/" + "?" * 64 + "*")}


async def _tick(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the daemons took too long; the machine may be too busy")
    await asyncio.sleep(POLL_S)
