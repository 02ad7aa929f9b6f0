"""What one member that floods at full speed costs another member's training.

A swarm of two nodes on this machine trains; a third member sends one of them valid messages as fast as it is
let. Inner steps a second of that node, and the processor time of its daemon, with the flood and without, are
taken in turns in one run, so that whatever else the machine does falls on both.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from gossamer.node.home import Home
from tests.net.processes import SwarmRun


def _steps(run: SwarmRun) -> int:
    status = run.status(run.address("node-1"))
    assert status is not None, "the node does not answer"
    return int(status["trainer"]["inner_steps"])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _measure(run: SwarmRun, seconds: float) -> tuple[float, float]:
    """Inner steps a second, and the share of one core that the daemon takes."""
    daemon = run.find("node-1", "daemon")
    assert daemon is not None
    begun, steps, cpu_s = time.monotonic(), _steps(run), _cpu_s(daemon)
    time.sleep(seconds)
    steps, cpu_s = _steps(run) - steps, _cpu_s(daemon) - cpu_s
    passed = time.monotonic() - begun
    return steps / passed, cpu_s / passed


def run(*, quick: bool) -> list[dict[str, Any]]:
    """Measure in turns; prints a table and returns its rows."""
    seconds, turns = (3.0, 1) if quick else (12.0, 4)
    quiet, flooded = [], []
    with (
        tempfile.TemporaryDirectory(prefix="gossamer-") as folder,
        SwarmRun(Path(folder), "--every-steps", 8) as swarm,
    ):
        swarm.wait_round("node-1", 3, 90)
        swarm_id = Home(swarm.folder / "node-1").manifest().swarm_id.hex()  # type: ignore[union-attr]
        for _ in range(turns):
            quiet.append(_measure(swarm, seconds))
            arguments = [swarm.address("node-1"), swarm_id, str(seconds * 4 + 30)]
            flooder = subprocess.Popen(
                [sys.executable, "-m", "tests.net.flooder", *arguments], stdout=subprocess.DEVNULL
            )
            try:
                time.sleep(seconds)  # its burst
                flooded.append(_measure(swarm, seconds))
            finally:
                flooder.kill()
                flooder.wait()
        swarm.interrupt()
    rows = [
        {
            "flood": name,
            "steps_per_s": median(steps for steps, _ in measured),
            "daemon_core_share": median(share for _, share in measured),
        }
        for name, measured in (("none", quiet), ("one member", flooded))
    ]
    ratio = rows[1]["steps_per_s"] / rows[0]["steps_per_s"]
    table = Table(title=f"a node under a flood: {ratio:.3f} of its steps", title_justify="left")
    for column in ("flood", "inner steps", "daemon's share of a core"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["flood"], f"{row['steps_per_s']:.1f}/s", f"{row['daemon_core_share'] * 100:.1f} %")
    Console().print(table)
    return rows
