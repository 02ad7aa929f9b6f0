"""What one member that floods at full speed costs another member's training.

A swarm of two nodes trains on this machine. A third member sends one of them valid messages as fast as that
node lets it, once its burst is spent. That node's inner steps per second and its daemon's processor time are
measured with the flood and without, in turns in one run, so that other load on the machine affects both.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tables import Table
from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.access.rate_limits import PER_NODE, Resource
from tests.net.processes import SwarmRun

VICTIM = "node-1"


class _Victim:
    """The node that is flooded."""

    def __init__(self, swarm: SwarmRun) -> None:
        daemon = swarm.find(VICTIM, "daemon")
        assert daemon is not None
        self._daemon = daemon
        self.address = swarm.address(VICTIM)

    def _status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(self.address))

    def cpu_s(self) -> float:
        times = self._daemon.cpu_times()
        return float(times.user + times.system)

    def wait_throttled(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._status()["throttled"] and time.monotonic() < deadline:
            time.sleep(0.5)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Inner steps per second, and the share of one core that the daemon takes."""
        begun, steps, cpu_s = time.monotonic(), self._status()["trainer"]["inner_steps"], self.cpu_s()
        time.sleep(seconds)
        steps, cpu_s = self._status()["trainer"]["inner_steps"] - steps, self.cpu_s() - cpu_s
        passed = time.monotonic() - begun
        return steps / passed, cpu_s / passed


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure in turns: one row without the flood, and one with it."""
    seconds, turns = (3.0, 1) if quick else (6.0, 10)
    quiet, flooded = [], []
    with (
        tempfile.TemporaryDirectory(prefix="gossamer-") as folder,
        SwarmRun(Path(folder), "--every-steps", 8) as swarm,
    ):
        swarm.wait_round(VICTIM, 1, 90)
        victim = _Victim(swarm)
        manifest = manifest_of(Home(swarm.folder / VICTIM))
        arguments = [victim.address, manifest.swarm_id.hex(), "1000"]
        flooder = subprocess.Popen(
            [sys.executable, "-m", "tests.net.flooder", *arguments], stdout=subprocess.DEVNULL
        )
        try:
            victim.wait_throttled(0.0 if quick else 30.0 * PER_NODE[Resource.CPU].burst)
            for _ in range(turns):
                flooder.send_signal(signal.SIGSTOP)
                quiet.append(victim.measure(seconds))
                flooder.send_signal(signal.SIGCONT)
                flooded.append(victim.measure(seconds))
        finally:
            flooder.kill()
            flooder.wait()
        swarm.interrupt()
    rows = [
        {
            "flood": name,
            "steps_per_s": mean(steps for steps, _ in measured),
            "daemon_core_share": mean(share for _, share in measured),
        }
        for name, measured in (("none", quiet), ("one member", flooded))
    ]
    return rows


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Steps per second and the daemon's processor time, without the flood and with it."""
    ratio = rows[1]["steps_per_s"] / rows[0]["steps_per_s"]
    lines = [
        (row["flood"], f"{row['steps_per_s']:.1f}/s", f"{row['daemon_core_share'] * 100:.1f} %")
        for row in rows
    ]
    columns = ("flood", "inner steps", "daemon's share of a core")
    return [Table(f"a node under a flood makes {ratio:.3f} of its steps", columns, lines)]
