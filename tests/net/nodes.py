"""A swarm of real daemons with puppets as trainers, behind a proxy that breaks the network on request."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gossamer.bootstrap.invites import invite
from gossamer.node.address import parse_address
from gossamer.node.daemon.network.rpc import Asker, asker_of, fetch_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Child, start_daemon
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import UnreachableError
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec, plan
from tests.net.puppet import Puppet
from tests.tools.fault_proxy import FaultProxy, own_loopback

HEAL_S = 40.0
"""Within how many seconds the design promises that a swarm heals."""


def small_manifest(numel: int = 4096, **sections: dict[str, Any]) -> tuple[Manifest, np.ndarray]:
    """A manifest for puppets, with rounds of two steps and two fragments, and its Phi_0."""
    tensors = (TensorSpec("w", (numel // 64, 64), "rda"), TensorSpec("v", (16, 16), "mean"))
    phi = np.random.default_rng(0).integers(-1000, 1000, plan(tensors, 2).numel).astype(np.int32)
    values: dict[str, Any] = {
        "swarm": {"name": "test", "created": int(time.time())},
        "task": {"name": "none"},
        "pace": {"every_steps": 4, "min_round_seconds": 0.05},
        "outer": {"codecs": ({"name": "int4"},)},
        "layout": {"fragments": 2, "tensors": tensors},
        "genesis": {"digest": snapshots.digest(phi).hex()},
        **sections,
    }
    return from_values(values, "test"), phi


class LocalNode:
    """One daemon and its puppet."""

    def __init__(self, name: str, options: NodeOptions, manifest: Manifest, number: int) -> None:
        self.name = name
        self.options = options
        self.manifest = manifest
        self.number = number
        self.home = Home(options.root)
        self.log_path = options.root.with_suffix(".log")
        self.child: Child | None = None
        self.puppet: Puppet | None = None
        self.asker: Asker | None = None
        """Asks for its status with a key; None if it answers anybody."""
        self.status: dict[str, Any] = {}

    def start(self) -> None:
        self.home.daemon_path.unlink(missing_ok=True)
        with open(self.log_path, "ab") as log:
            self.child = start_daemon(self.options, log.fileno())

    def train(self, step_s: float) -> Puppet:
        """Give it a puppet."""
        path = self.home.socket_path()
        self.puppet = Puppet(path, self.manifest, step_s=step_s, seed=self.number)
        self.puppet.start()
        return self.puppet

    def signal(self, number: signal.Signals) -> None:
        assert self.child is not None
        self.child.send_signal(number)

    @property
    def process(self) -> psutil.Process:
        assert self.child is not None
        return psutil.Process(self.child.pid)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def listens_at(self) -> tuple[str, int] | None:
        facts = self.home.read_daemon()
        return parse_address(str(facts["address"])) if facts else None

    async def ask(self) -> dict[str, Any] | None:
        """Its status; None if it does not answer."""
        facts = self.home.read_daemon()
        if facts is None:
            return None
        try:
            async with asyncio.timeout(10):
                self.status = await fetch_status(str(facts["address"]), digest=True, asker=self.asker)
        except (UnreachableError, TimeoutError):
            return None
        return self.status

    async def stop(self) -> None:
        if self.puppet is not None:
            await self.puppet.stop()
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)
            self.child.terminate()
            await asyncio.to_thread(self.child.end, 6.0)


class LocalNodes:
    """A swarm of `LocalNode`s. Use as an async context manager: everything ends with it."""

    def __init__(
        self,
        base: Path,
        manifest: Manifest,
        phi: np.ndarray,
        seed: int = 0,
        owner: Identity | None = None,
    ) -> None:
        """An `owner` invites every node to train; each is then asked for its status with its own key."""
        self.base = base
        self.owner = owner
        self.manifest = manifest
        self.phi = phi
        self.proxy = FaultProxy(seed)
        self.rules = self.proxy.rules
        self.nodes: dict[str, LocalNode] = {}
        self.addresses: dict[str, str] = {}

    async def __aenter__(self) -> LocalNodes:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.rules.heal()
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))
        await self.proxy.close()

    async def add(self, name: str, join: Iterable[str] = (), **options: Any) -> LocalNode:
        """Start a daemon that joins the named nodes. The first one joins nobody and has Phi_0."""
        number = len(self.nodes)
        folder = self.base / name
        home = Home(folder)
        home.create()
        home.adopt(self.manifest)
        if self.owner is not None:
            swarm_id, node_id = self.manifest.swarm_id, home.identity().node_id
            home.keep_invitation(invite(self.owner, swarm_id, node_id, role=Role.TRAIN, days=0, contacts=()))
        if not number:
            snapshots.store(self.phi, ChunkStore(home.chunks_path))
        source = own_loopback(number)
        node = LocalNode(
            name,
            NodeOptions(
                folder=folder,
                listen=f"{source}:0",
                name=name,
                join=tuple(self.addresses[other] for other in join),
                **options,
            ),
            self.manifest,
            number,
        )
        self.addresses[name] = await self.proxy.add(name, source, node.listens_at)
        node.options = node.options.model_copy(update={"advertise": (self.addresses[name],)})
        if self.owner is not None:
            node.asker = asker_of(home)
        self.nodes[name] = node
        node.start()
        return node

    async def grow(self, count: int, step_s: float = 0.1) -> list[LocalNode]:
        """Start a first node and others that join it, all with puppets; returns once all are training."""
        names = [f"n{i}" for i in range(count)]
        for name in names:
            node = await self.add(name, names[:1] if name != names[0] else ())
            node.train(step_s)
        await self.until(
            lambda: all(n.status.get("round", 0) >= 2 for n in self.nodes.values()), 120, "all train"
        )
        return [self.nodes[name] for name in names]

    async def until(self, condition: Callable[[], bool], timeout: float, what: str) -> float:
        """Ask all nodes for their status until the condition holds; returns the seconds that took."""
        begun = time.monotonic()
        while True:
            await asyncio.gather(*(node.ask() for node in self.nodes.values()))
            if condition():
                return time.monotonic() - begun
            if time.monotonic() - begun > timeout:
                states = {
                    n.name: (n.status.get("round"), n.status.get("records")) for n in self.nodes.values()
                }
                raise AssertionError(f"not within {timeout:.0f} s: {what}; (round, records): {states}")
            await asyncio.sleep(0.2)

    async def agree(self, timeout: float = HEAL_S, *, closed: bool = False) -> float:
        """Let the puppets rest until every node has merged the same set, with all that the puppets published.

        Others may have published too: a record whose payload nobody serves is merged nowhere. With `closed`,
        some rounds may be closed already. Returns the seconds it took.
        """
        puppets = [node.puppet for node in self.nodes.values() if node.puppet is not None]
        for puppet in puppets:
            puppet.paused = True

        def same() -> bool:
            published = sum(len(puppet.rounds) for puppet in puppets)
            statuses = [node.status for node in self.nodes.values()]
            kinds = ("merged_digest", "phi_digest", *(() if closed else ("ledger_digest",)))
            replicas = {tuple(status.get(kind) for kind in kinds) for status in statuses}
            whole = all(
                (closed or s.get("records", 0) >= published) and not s.get("rounds_behind") for s in statuses
            )
            return len(replicas) == 1 and None not in next(iter(replicas)) and whole

        return await self.until(same, timeout, "all agree, bit for bit")

    def train_on(self) -> None:
        """Wake the puppets after `agree`."""
        for node in self.nodes.values():
            if node.puppet is not None:
                node.puppet.paused = False

    async def until_identical(self, timeout: float = HEAL_S, *, closed: bool = False) -> float:
        """`agree`, where nobody but the puppets has published."""
        took = await self.agree(timeout, closed=closed)
        puppets = [node.puppet for node in self.nodes.values() if node.puppet is not None]

        def has_all() -> bool:
            published = sum(len(puppet.rounds) for puppet in puppets)
            return closed or all(node.status.get("records") == published for node in self.nodes.values())

        return took + await self.until(has_all, timeout, "all hold everything, and nothing else")

    async def go_on(self, rounds: int, timeout: float = 120, *, closed: bool = False) -> None:
        """Have those with puppets, the honest, make more rounds, and then rest on the same bits."""
        honest = [node for node in self.nodes.values() if node.puppet is not None]
        start = max(node.status["round"] for node in honest)
        await self.until(
            lambda: all(node.status["round"] >= start + rounds for node in honest),
            timeout,
            "the honest go on",
        )
        await self.agree(timeout, closed=closed)

    def assert_nobody_blamed(self) -> None:
        for node in self.nodes.values():
            assert "misbehaved" not in node.log, node.log
            assert "are void" not in node.log
            assert "Traceback" not in node.log, node.log
