"""Training scripts with a `Peer`, run as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from gossamer.bootstrap import manifests
from gossamer.node.home import Home
from gossamer.protocol.identity import Identity
from tests.net.attached import build_model
from tests.net.processes import (
    assert_all_gone,
    processes_naming,
    wait_for,
)

PATIENCE_S = 60


class Scripts:
    """Scripts in one folder, which end with the test."""

    def __init__(self, base: Path, owner: Identity | None, samples: int = 0, contributors: int = 64) -> None:
        self.base = base
        self.manifest = base / "swarm.toml"
        described = manifests.describe(
            build_model(),
            name="attached",
            every_seconds=0.5,
            fragments=2,
            samples=samples,
            invited=owner is not None,
            owners=(owner.public_key.hex(),) if owner else (),
        )
        pace = described.pace.model_copy(update={"contributors": contributors})
        described = described.model_copy(update={"pace": pace})
        assert all(any(slot.is_cut for slot in part.slots) for part in described.plan().fragments)
        manifests.write(described, self.manifest)
        self.described = described
        self.swarm_id = described.swarm_id
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, ranks: int = 0, **options: Any) -> Path:
        """Start one script, under torchrun if it has ranks; returns its folder."""
        folder = self.base / name
        known = Home(folder).read_daemon()
        if known is not None:
            Home(folder).daemon_path.unlink()
        if "join" not in options:
            options = {"manifest": str(self.manifest), **options}
        runner = [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        torchrun = ["torch.distributed.run", *runner, "-m"] if ranks else []
        command = [sys.executable, "-m", *torchrun, "tests.net.attached"]
        with open(self.base / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [*command, json.dumps({"folder": str(folder), **options})],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return folder

    def log(self, name: str) -> str:
        return (self.base / f"{name}.log").read_text()

    def metrics(self, name: str) -> dict[str, Any]:
        """The metrics that a script printed last; empty if there are none yet."""
        assert self.processes[name].poll() is None, self.log(name)
        lines = [line for line in self.log(name).splitlines() if line.startswith("{") and line.endswith("}")]
        last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return last

    def wait_rounds(self, name: str, rounds: int) -> None:
        """Wait until a script has trained through this many more rounds."""
        begun = wait_for(lambda: self.metrics(name), PATIENCE_S, f"{name} training")["clock"]
        reached = lambda: self.metrics(name)["round"] >= begun + rounds  # noqa: E731
        wait_for(reached, PATIENCE_S, f"{name} {rounds} rounds further")

    def address(self, name: str) -> str:
        def facts() -> dict[str, Any] | None:
            assert self.processes[name].poll() is None, self.log(name)
            return Home(self.base / name).read_daemon()

        return str(wait_for(facts, PATIENCE_S, f"{name}'s daemon listening")["address"])

    def daemon(self, name: str) -> psutil.Process:
        (found,) = [
            process
            for process in processes_naming(self.base / name)
            if "gossamer.node.daemon.daemon" in process.cmdline()
        ]
        return found

    def results(self, name: str, ranks: int = 1) -> list[dict[str, Any]]:
        """The results that a script wrote at its end, rank by rank."""
        assert self.processes[name].wait(PATIENCE_S) == 0, self.log(name)
        return [json.loads((self.base / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


@contextmanager
def scripts_in(
    base: Path, owner: Identity | None = None, samples: int = 0, contributors: int = 64
) -> Iterator[Scripts]:
    """`samples`: the size of the data that all of them train on; 0 if each has its own. `contributors`: how
    many contribute to a round, about."""
    scripts = Scripts(base, owner, samples, contributors)
    try:
        yield scripts
        assert_all_gone(base, 8)
    finally:
        for process in processes_naming(base):
            process.kill()
        for process in scripts.processes.values():
            process.kill()
            process.wait(10)
