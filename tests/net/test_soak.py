"""Thousands of rounds: memory, descriptors, threads, tasks and disk stay where they were.

    GOSSAMER_SOAK_ROUNDS=2000 .venv/bin/python -m pytest -m soak -s tests/net/test_soak.py

Real nodes with windows of a single step and a history of 32 rounds, so that sealing, closing and forgetting
happen all the time. Prints a line of measurements per process every twentieth of the way.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.processes import NodeProcess, stop_all
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.protocol.manifest import Manifest, from_values
from tests.net.processes import write_text

ROUNDS = int(os.environ.get("GOSSAMER_SOAK_ROUNDS", "2000"))
ROUNDS_PER_S_MIN = 1.0
"""Slower than this, a machine is too busy for the result to mean anything."""

SETTLED = 0.4
"""Part of the way after which nothing may grow any more: caches are full, history is being closed."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120 + int(ROUNDS / ROUNDS_PER_S_MIN))]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process takes up; `disk_bytes` and `tasks` are its node's."""

    rss_bytes: int
    descriptors: int
    threads: int
    tasks: int
    disk_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes / 1e6:7.1f} MB, {self.descriptors:3} descriptors, {self.threads:3} threads,"
            f" {self.tasks:3} tasks, {self.disk_bytes / 1e6:6.1f} MB on disk"
        )


def manifest_of(tmp_path: Path) -> Manifest:
    """The built-in task at its smallest, with the shortest of histories; Phi_0 is put in place."""
    manifest, phi = manifests.create(
        name="soak",
        task="text",
        options={"preset": "tiny", "batch_size": 1, "context": 16, "eval_batches": 1},
        codec="int4",
        every_steps=1,
        every_seconds=0.0,
        fragments=1,
        seed=0,
    )
    values: dict[str, Any] = manifest.model_dump()
    values["history"] = {"seal_after": 4, "snapshot_every": 16, "retain": 32}
    manifest = from_values(values, "soak")
    home = Home(tmp_path / "boot")
    home.create()
    home.adopt(manifest)
    snapshots.store(phi, ChunkStore(home.chunks_path))
    manifests.write(manifest, tmp_path / "m.toml")
    return manifest


def disk_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # chunks come and go
                continue
    return total


def measure(nodes: list[NodeProcess]) -> dict[str, Sample]:
    samples = {}
    for node in nodes:
        assert node.child is not None and node.status is not None
        whole = psutil.Process(node.child.pid)
        for process in (whole, *whole.children()):
            line = " ".join(process.cmdline())
            role = next(r for r in ("node.daemon", "node.trainer", "bootstrap.cli") if r in line)
            samples[f"{node.name} {role.split('.')[-1]}"] = Sample(
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
                node.status["tasks"],
                disk_bytes(node.folder),
            )
    return samples


async def test_nothing_grows(tmp_path: Path) -> None:
    manifest_of(tmp_path)
    text = write_text(tmp_path / "text.txt")
    boot_args = ["bootstrap", str(tmp_path / "m.toml"), "--listen", "127.0.0.1:0"]
    boot = NodeProcess("boot", tmp_path / "boot", [*boot_args, "--dir", str(tmp_path / "boot")])
    everyone = [boot]
    taken: list[tuple[int, dict[str, Sample]]] = []
    try:
        boot.start()
        join = await boot.address()
        for name in ("a", "b"):
            args = ["node", "--dir", str(tmp_path / name), "--name", name, "--listen", "127.0.0.1:0"]
            args += ["--join", join, "--data", str(text), "--threads", "1", "--device", "cpu"]
            everyone.append(NodeProcess(name, tmp_path / name, [*args, "--evaluate-every", "0"]))
            everyone[-1].start()
        begun = time.monotonic()
        for part in range(1, 21):
            await reach(everyone, ROUNDS * part // 20)
            round_ = min(n.status["round"] for n in everyone[1:] if n.status)
            taken.append((round_, measure(everyone)))
            print(f"\nround {round_}, {time.monotonic() - begun:.0f} s")
            for name, sample in taken[-1][1].items():
                print(f"  {name:14} {sample}")
        for node in everyone:
            assert "Traceback" not in node.log_path.read_text()
    finally:
        await asyncio.to_thread(stop_all, everyone)
    settled = [samples for round_, samples in taken if round_ >= SETTLED * ROUNDS]
    third = max(1, len(settled) // 3)
    for name in settled[0]:
        early = [samples[name] for samples in settled[:third]]
        late = [samples[name] for samples in settled[-third:]]

        def most(field: str, of: list[Sample]) -> int:
            return max(int(getattr(sample, field)) for sample in of)

        for field, factor, slack in (
            ("rss_bytes", 1.05, 8e6),
            ("descriptors", 1, 4),
            ("threads", 1, 2),
            ("tasks", 1, 8),
            ("disk_bytes", 1.1, 4e6),
        ):
            before, after = most(field, early), most(field, late)
            assert after <= before * factor + slack, (name, field, before, after)


async def reach(nodes: list[NodeProcess], round_: int) -> None:
    """Wait until all trainers have published a round."""
    while True:
        for node in nodes:
            node.check_running()
        await asyncio.gather(*(node.ask(digest=False, plaintext=False) for node in nodes))
        if all(node.status and node.status["round"] >= round_ for node in nodes[1:]) and nodes[0].status:
            return
        await asyncio.sleep(0.5)
