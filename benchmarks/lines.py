"""Time to a given loss over lines of 10, 100 and 1000 Mbit/s, against DistributedDataParallel over gloo.

Hosts are network namespaces on one bridge, limited by `tc tbf` both ways. A byte-level GPT trains on the
source of Python's standard library, once by DDP, which averages all gradients (float32) at every step, and
once as a swarm: int4 deltas, one of the whole model per window of 40 steps. Model, data, batch, inner
optimizer and evaluation are the same (see `contender`), and so are the two cores that all hosts share.

DDP makes the same steps on every line, so its curve is measured once, on the fastest one. On slow lines a few
steps are timed, and its time is **the product** of seconds per step there and steps to the loss. The swarm
runs to the loss on every line.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.contender import Entry, describe
from benchmarks.goals import Goal
from benchmarks.plots import axes, save
from benchmarks.tables import Table
from gossamer.bootstrap import manifests
from tests.net import hosts as namespaces
from tests.net.hosts import NET, Hosts

why_not = namespaces.why_not
"""Why this benchmark cannot run here, if it cannot."""

RATES = (10, 100, 1000)
"""Rates of the lines, Mbit/s."""

FULL: dict[str, Any] = {
    "hosts": 4,
    "options": {"preset": "small", "optimizer": "adamw", "batch_size": 4, "context": 64, "eval_batches": 8},
    "every_steps": 40,
    "target": 2.4,
    "max_steps": 800,
    "max_seconds": 180.0,
    "evaluate_every": 4,
    "timed_steps": {10: 4, 100: 24},
}
QUICK: dict[str, Any] = {
    "hosts": 2,
    "options": {"preset": "tiny", "optimizer": "adamw", "batch_size": 2, "context": 32, "eval_batches": 2},
    "every_steps": 4,
    "target": 4.5,
    "max_steps": 40,
    "max_seconds": 20.0,
    "evaluate_every": 2,
    "timed_steps": {100: 4},
}
PORT, GLOO_PORT = 7700, 29500
START_S = 120.0
"""Time to start for processes that import torch, all at once."""

POLL_S = 0.1


def run(*, quick: bool) -> dict[str, Any]:
    """Train both ways on every line."""
    setting = QUICK if quick else FULL
    rates = (100, 1000) if quick else RATES
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        root = Path(folder)
        ddp = {rate: _contest(root / f"ddp{rate}", "ddp", rate, setting) for rate in rates}
        swarm = {rate: _contest(root / f"swarm{rate}", "swarm", rate, setting) for rate in rates}
    return {
        "hosts": setting["hosts"],
        "target": setting["target"],
        "parameters": ddp[rates[-1]]["parameters"],
        "lines": [_line(rate, ddp[rate], ddp[rates[-1]], swarm[rate], setting) for rate in rates],
    }


def _line(
    rate: int, timed: dict[str, Any], whole: dict[str, Any], swarm: dict[str, Any], setting: dict[str, Any]
) -> dict[str, Any]:
    _, steps, loss = _reached(whole["curve"], setting["target"])
    seconds, swarm_steps, swarm_loss = _reached(swarm["curve"], setting["target"])
    per_step = timed["seconds"] / timed["steps"]
    return {
        "mbit_per_s": rate,
        "ddp": {
            "seconds_per_step": per_step,
            "steps": steps,
            "loss": loss,
            "seconds": per_step * steps,
            "is_a_product": timed is not whole,
            "bytes_sent_per_step": timed["bytes_sent"] / timed["steps"],
            "curve": [(per_step * step, loss) for _, step, loss in whole["curve"]],
        },
        "swarm": {
            "seconds": seconds,
            "steps": swarm_steps,
            "loss": swarm_loss,
            "has_reached_it": swarm_loss <= setting["target"],
            "bytes_sent_per_step": swarm["bytes_sent"] / swarm["steps"],
            "curve": [(second, loss) for second, _, loss in swarm["curve"]],
        },
        "times_faster": per_step * steps / seconds,
    }


def _reached(curve: list[tuple[float, int, float]], target: float) -> tuple[float, int, float]:
    """The point where a curve of (seconds, steps, loss) reaches the target; its end if it does not."""
    return next((point for point in curve if point[2] <= target), curve[-1])


def _contest(folder: Path, way: str, rate: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Train one way on one line. Raises TimeoutError, with the end of a log, if the hosts do not finish."""
    folder.mkdir()
    if way == "swarm":
        manifest, _ = manifests.create(
            name="lines",
            task="text",
            options=setting["options"],
            codec="int4",
            every_steps=setting["every_steps"],
            every_seconds=0.0,
            fragments=1,
            seed=0,
        )
        manifests.write(manifest, folder / "swarm.toml")
    timed = setting["timed_steps"].get(rate) if way == "ddp" else None
    with Hosts() as hosts:
        for _ in range(setting["hosts"]):
            hosts.shape_both_ways(hosts.add(), f"{rate}mbit")
        start(
            hosts,
            folder,
            setting["hosts"],
            way=way,
            options=setting["options"],
            target=0.0 if timed else setting["target"],
            max_steps=timed or setting["max_steps"],
            max_seconds=setting["max_seconds"],
            evaluate_every=min(setting["evaluate_every"], timed or setting["evaluate_every"]),
        )
        wait(folder, "stop", setting["max_seconds"] + START_S)
        return dict(json.loads((folder / "result.json").read_text()))


def start(hosts: Hosts, folder: Path, count: int, **same: Any) -> None:
    """Start a contender on each of `count` hosts; `same` is what their entries have in common."""
    for n in range(1, count + 1):
        entry = Entry(
            rank=n - 1,
            hosts=count,
            folder=str(folder),
            address=f"{NET}.{n}:{PORT}",
            first=f"{NET}.1:{PORT}",
            cable=f"e{n}",
            **same,
        )
        env = {"MASTER_ADDR": f"{NET}.1", "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": f"e{n}"}
        hosts.start(n, "benchmarks.contender", describe(entry), log=folder / f"host{n}.log", env=env)
        if n == 1 and entry.way == "swarm":
            wait(folder, "ready0", START_S)  # it founds the swarm that the others join


def wait(folder: Path, name: str, seconds: float) -> Path:
    """Wait for a file. Raises TimeoutError, with the end of all logs."""
    deadline = time.monotonic() + seconds
    while not (path := folder / name).exists():
        if time.monotonic() > deadline:
            logs = "".join(log.read_text()[-1000:] for log in sorted(folder.glob("*.log")))
            raise TimeoutError(f"no {name} after {seconds:.0f} s; the hosts said:\n{logs}")
        time.sleep(POLL_S)
    return path


# -- what is shown


def tables(figures: dict[str, Any]) -> list[Table]:
    """Figures by line."""
    rows = []
    for line in figures["lines"]:
        ddp, swarm = line["ddp"], line["swarm"]
        rows.append(
            (
                f"{line['mbit_per_s']} Mbit/s",
                f"{ddp['seconds_per_step']:.2f} s",
                f"{ddp['steps']}",
                f"{ddp['seconds']:.0f} s{' (product)' if ddp['is_a_product'] else ''}",
                f"{swarm['steps']}",
                f"{swarm['seconds']:.0f} s{'' if swarm['has_reached_it'] else ' (not reached)'}",
                f"{ddp['bytes_sent_per_step'] / swarm['bytes_sent_per_step']:.1f}",
                f"{line['times_faster']:.1f}",
            )
        )
    columns = (
        "line",
        "DDP: a step",
        "steps",
        "to the loss",
        "swarm: steps",
        "to the loss",
        "fewer bytes a step",
        "times faster",
    )
    title = (
        f"{figures['hosts']} hosts, {figures['parameters'] / 1e6:.1f} M parameters,"
        f" to a held-out loss of {figures['target']}"
    )
    return [Table(title, columns, rows)]


GOALS = (
    Goal(
        what="to the same loss over 10 Mbit/s (the slowest line run), times faster than DDP over gloo",
        measured=lambda figures: figures["lines"][0]["times_faster"],
        at_least=20.0,
    ),
)


def plot(figures: dict[str, Any], folder: Path) -> None:
    """Loss over seconds, one plot per line."""
    figure, plots = axes(len(figures["lines"]))
    for axis, line in zip(plots, figures["lines"], strict=True):
        for name, way in (("DDP over gloo", line["ddp"]), ("swarm", line["swarm"])):
            axis.plot([second for second, _ in way["curve"]], [loss for _, loss in way["curve"]], label=name)
        axis.axhline(figures["target"], linestyle=":", linewidth=1)
        axis.set(title=f"{line['mbit_per_s']} Mbit/s", xlabel="seconds", ylabel="held-out loss", xscale="log")
        axis.legend()
    save(figure, folder / "lines.svg")
