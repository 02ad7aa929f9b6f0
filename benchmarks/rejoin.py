"""How soon a node that was killed trains again.

All processes of one node of a local swarm get SIGKILL at once, as in a power cut, and the same command is run
again at once. Time is counted from then until its trainer reports an inner step. So it includes all of a
restart: starting three interpreters and PyTorch, reading and checking the folder, making links, fetching and
merging what was missed, and loading the checkpoint. If the machine has two cores or more, the node has one of
its own. The rest of the swarm, a bootstrap peer and another node, share the others, and train on.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gossamer.bootstrap import manifests
from gossamer.bootstrap.processes import NodeProcess, stop_all
from gossamer.protocol.manifest import Manifest

STANDING_ROUNDS = 6
"""Rounds before the first restart, so that there is a state to come back to."""

CALM_S = 5.0
"""Pause between two restarts."""

GIVE_UP_S = 120.0
POLL_S = 0.05

_LISTEN = ("--listen", "127.0.0.1:0", "--admin", "off")


def rejoin_s(*, restarts: int) -> list[float]:
    """Seconds that each of these restarts took."""
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        return asyncio.run(_rejoin_s(Path(folder), restarts))


async def _rejoin_s(folder: Path, restarts: int) -> list[float]:
    manifest, _ = manifests.create(
        name="rejoin", task="text", options={}, codec="int4", every_steps=30, every_seconds=0.0, seed=0
    )
    manifests.write(manifest, folder / "swarm.toml")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    own = {min(cores)} if len(cores) > 1 else cores
    boot = NodeProcess("bootstrap", folder / "bootstrap", _bootstrap(folder))
    started = [boot]
    try:
        _stay_on(cores - own or cores)  # processes started from here inherit this
        boot.start()
        address = await boot.address()
        staying, victim = (_node(folder, name, manifest, address) for name in ("stays", "dies"))
        started += [staying, victim]
        staying.start()
        _stay_on(own)
        victim.start()
        await _until(victim, lambda node: node.status is not None and node.status["round"] >= STANDING_ROUNDS)
        found = []
        for _ in range(restarts):
            await asyncio.sleep(CALM_S)
            found.append(await _restart(victim))
        return found
    finally:
        _stay_on(cores)
        await asyncio.to_thread(stop_all, started)


def _stay_on(cores: set[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


async def _restart(node: NodeProcess) -> float:
    """Kill a node and start it again; returns the seconds until it trains."""
    node.kill()
    begun = time.monotonic()
    node.start()
    await _until(node, lambda node: bool(node.trainer))
    resumed_at = node.trainer["inner_steps"]
    await _until(node, lambda node: node.trainer.get("inner_steps", 0) > resumed_at)
    return time.monotonic() - begun


def _bootstrap(folder: Path) -> list[str]:
    return ["bootstrap", str(folder / "swarm.toml"), "--dir", str(folder / "bootstrap"), *_LISTEN]


def _node(folder: Path, name: str, manifest: Manifest, address: str) -> NodeProcess:
    command = ["node", "--dir", str(folder / name), "--name", name, "--threads", "1", "--device", "cpu"]
    swarm = ["--swarm-id", manifest.swarm_id.hex(), "--join", address]
    return NodeProcess(name, folder / name, [*command, *swarm, *_LISTEN])


async def _until(node: NodeProcess, is_so: Callable[[NodeProcess], bool]) -> None:
    """Ask a node for its status until a condition holds. Raises TimeoutError, or LocalError if it ends."""
    async with asyncio.timeout(GIVE_UP_S):
        while not is_so(node):
            node.check_running()
            await asyncio.sleep(POLL_S)
            await node.ask(digest=False, plaintext=False)
