"""What a node needs, by parameters: memory of its daemon and of its trainer, and disk, of real processes.

*The daemon* is a real one, with a model of each size in 16 fragments. It starts from a folder with
the model and a round of several members' deltas, which it merges. Then a puppet trains for it until it has
written a snapshot in which every fragment has changed. *The trainer* is a model of plain tensors under AdamW,
attached to a daemon of its own: it publishes, and writes its checkpoint. Peaks are the kernel's (VmHWM), less
the memory that both share.

Where the machine has no room for the trainer of the largest model, it is not run: the table then has that
number of parameters times the bytes per parameter of the largest trainer that was run.
"""

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plots
from benchmarks.daemons import new_home
from benchmarks.goals import amount
from benchmarks.growth import bends
from benchmarks.tables import Table
from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import GENESIS, RecordStore
from gossamer.node.home import Home
from gossamer.node.options import NodeOptions
from gossamer.node.processes import start_daemon
from gossamer.protocol.errors import UnreachableError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest, from_values
from gossamer.protocol.payloads import TensorSpec, split_payload
from gossamer.protocol.records import Claim
from tests.net.puppet import Puppet
from tests.protocol.builders import identity, random_delta

SIZES, QUICK = (10**7, 10**8, 10**9), (10**5,)
TRAINED_MAX = 10**8
FRAGMENTS, TENSORS = 16, 64
MEMBERS = 8
WAIT_S = 1800.0
POLL_S = 0.2


def why_not() -> str | None:
    """Why this benchmark cannot run here; None if it can."""
    return None if Path("/proc/self/clear_refs").exists() else "only Linux tells of a process's peak memory"


def run(*, quick: bool) -> list[dict[str, Any]]:
    """One row for each number of parameters."""
    return [row(count) for count in (QUICK if quick else SIZES)]


def row(parameters: int) -> dict[str, Any]:
    """A daemon, and a trainer if there is room for one."""
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        found = asyncio.run(_daemon(Path(folder), parameters))
    found |= _elsewhere(_trainer, parameters) if parameters <= TRAINED_MAX else {}
    return found


def _elsewhere(measured: Callable[[int], dict[str, Any]], parameters: int) -> dict[str, Any]:
    """Measure in a new process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (parameters,))


# -- memory of a process, as the kernel has counted it


def _memory(pid: int) -> dict[str, int]:
    """A process's memory in bytes: `VmHWM` is the peak, `VmRSS` the present, `RssShmem` the shared part."""
    text = Path(f"/proc/{pid}/status").read_text("utf-8")
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _own(pid: int, which: str = "VmHWM") -> int:
    """A process's memory in bytes, without what it shares with another process."""
    found = _memory(pid)
    return found[which] - found["RssShmem"]


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")


# -- the daemon


def _shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    return {f"w.{n}": (parameters // TENSORS,) for n in range(TENSORS)}


def _manifest(shapes: dict[str, tuple[int, ...]], phi: Ints, **sections: dict[str, Any]) -> Manifest:
    values: dict[str, Any] = {
        "swarm": {"name": "footprint", "created": int(time.time()) - 3600},
        "task": {"name": "none"},
        "outer": {"codecs": ({"name": "int4"},)},
        "pace": {"every_steps": FRAGMENTS},
        "history": {"seal_after": 2, "snapshot_every": FRAGMENTS, "retain": 4 * FRAGMENTS},
        "layout": {
            "fragments": FRAGMENTS,
            "tensors": tuple(TensorSpec(name, shape, "rda") for name, shape in shapes.items()),
        },
        "genesis": {"digest": snapshots.digest(phi).hex()},
    }
    return from_values(values | sections, "the benchmark")


def _prepare(folder: Path, parameters: int) -> tuple[Home, Manifest]:
    """A node's folder with the model, and deltas of one round that it has not merged yet."""
    shapes = _shapes(parameters)
    phi = np.arange(sum(map(prod, shapes.values())), dtype=np.int32)
    phi >>= 1  # within bounds, and with no two chunks alike
    manifest = _manifest(shapes, phi)
    home = new_home(folder / "node", manifest)
    chunks = ChunkStore(home.chunks_path)
    root = snapshots.store(phi, chunks)
    del phi
    rng = np.random.default_rng(0)
    records = RecordStore(home.ledger_path, manifest.swarm_id)
    records.add_snapshot(Claim(0, 0, GENESIS.chain, root), (), ())
    for number in range(MEMBERS):
        delta, payload = random_delta(rng, identity(number), 1, of=manifest, codec="int4", magnitude=1 << 10)
        for blob, piece in zip(delta.body.chunks, split_payload(payload), strict=True):
            chunks.put(blob, piece)
        records.add([delta])
    records.close()
    return home, manifest


async def _daemon(folder: Path, parameters: int) -> dict[str, Any]:
    home, manifest = await asyncio.to_thread(_prepare, folder, parameters)
    options = NodeOptions(folder=home.root, listen="127.0.0.1:0", admin="off")
    with open(folder / "log", "wb") as log:
        child = start_daemon(options, log.fileno())
    puppet = Puppet(home.socket_path(), manifest, step_s=POLL_S, seed=1)
    try:
        await _until(home, lambda status: status["version"] > 0)
        await _until(home, lambda status: not status["rounds_behind"])
        starting, resting = _own(child.pid), _own(child.pid, "VmRSS")
        _forget_peak(child.pid)
        puppet.start()
        await _until(home, lambda status: (status["sealed_round"] or 0) >= FRAGMENTS)
        puppet.paused = True
        await asyncio.sleep(2 * POLL_S)
        training = _own(child.pid)
        return {
            "parameters": manifest.plan().numel,
            "resting_bytes": resting,
            "starting_bytes": starting,
            "training_bytes": training,
            "peak_bytes": max(starting, training),
            "shared_bytes": _memory(child.pid)["RssShmem"],
            "disk_bytes": sum(file.stat().st_size for file in home.root.rglob("*") if file.is_file()),
        }
    finally:
        await puppet.stop()
        child.terminate()
        await asyncio.to_thread(child.end, 30.0)


async def _until(home: Home, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        facts = home.read_daemon()
        try:
            if facts is not None and condition(await fetch_status(str(facts["address"]))):
                return
        except (UnreachableError, TimeoutError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("the daemon took too long; the machine may be too busy")
        await asyncio.sleep(POLL_S)


# -- the trainer


def _trainer(parameters: int) -> dict[str, Any]:
    """The memory of a trainer: its model, gradients and inner optimizer alone, and all of it as a node."""
    import torch

    from gossamer.node import Peer

    torch.set_num_threads(1)
    pid = os.getpid()
    before = _own(pid)
    model = torch.nn.Module()
    model.w = torch.nn.ParameterList(torch.zeros(*shape) for shape in _shapes(parameters).values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        for tensor in model.parameters():
            tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        optimizer.zero_grad()

    step()
    alone = _own(pid) - before
    names = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    manifest = _manifest(names, np.zeros(TENSORS * (parameters // TENSORS), dtype=np.int32))
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        with Peer.attach(
            model, optimizer, manifest=manifest, folder=folder, listen="127.0.0.1:0", plaintext=True
        ) as peer:
            _forget_peak(pid)  # founding a swarm takes more memory, once
            deadline = time.monotonic() + WAIT_S
            while peer.round < 2 * FRAGMENTS and time.monotonic() < deadline:
                step()
                peer.step(tokens=1, loss=1.0)
        whole = _own(pid) - before  # a peer that leaves writes a whole checkpoint
        size = (Path(folder) / "trainer.checkpoint").stat().st_size
    return {"loop_bytes": alone, "trainer_bytes": whole, "checkpoint_bytes": size}


# -- what is shown

TRAINER = ("loop_bytes", "trainer_bytes", "checkpoint_bytes")


def _complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a trainer each: those not run are scaled from the largest that was."""
    known = [row for row in rows if TRAINER[0] in row]
    per = {key: known[-1][key] / known[-1]["parameters"] for key in TRAINER}
    return [{key: round(per[key] * row["parameters"]) for key in TRAINER} | row for row in rows]


def _amount(row: dict[str, Any], *keys: str) -> str:
    found = sum(row[key] for key in keys)
    text = f"{found / 1e9:,.2f} GB" if found >= 1e9 else f"{found / 1e6:,.0f} MB"
    return f"{text} ({found / row['parameters']:.1f})"


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Memory and disk by parameters."""
    lines = []
    for measured, row in zip(rows, _complete(rows), strict=True):
        is_product = TRAINER[0] not in measured
        lines.append(
            (
                amount(row["parameters"] / 1e6, "M"),
                _amount(row, "resting_bytes"),
                _amount(row, "peak_bytes"),
                _amount(row, "shared_bytes"),
                *(_amount(row, key) + (" (product)" if is_product else "") for key in TRAINER[:2]),
                _amount(row, "disk_bytes", "checkpoint_bytes"),
            )
        )
    columns = (
        "parameters",
        "daemon at rest",
        "at its peak",
        "shared",
        "trainer: model, AdamW",
        "as a node",
        "disk",
    )
    costs = {"peak_bytes": "daemon", "trainer_bytes": "trainer", "disk_bytes": "disk"}
    title = (
        f"one node, {FRAGMENTS} fragments, int4, rounds of {MEMBERS} members, two snapshots (bytes a"
        f" parameter); {bends(_complete(rows), 'parameters', costs)}"
    )
    return [Table(title, columns, lines)]


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Bytes per parameter over parameters."""
    figure, (axes,) = plots.axes(height=2.8)
    complete = _complete(rows)
    curves = {
        "daemon, at its peak": "peak_bytes",
        "daemon, at rest": "resting_bytes",
        "shared by both": "shared_bytes",
    }
    for name, key in curves.items():
        values = [row[key] / row["parameters"] for row in complete]
        axes.semilogx([row["parameters"] for row in complete], values, "o-", label=name)
    own = [row for row in rows if TRAINER[0] in row]
    added = [(row["trainer_bytes"] - row["loop_bytes"]) / row["parameters"] for row in own]
    axes.semilogx([row["parameters"] for row in own], added, "o-", label="trainer, beyond its own loop")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters")
    axes.set_ylabel("bytes a parameter")
    axes.legend(fontsize=8)
    plots.save(figure, folder / "footprint.svg")
