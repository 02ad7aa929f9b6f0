"""One cell: workers on hosts of their own, by one contender, on one kind of line, with one fault or none."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.peers.job import Entry
from gossamer.models.registry import build_task
from tests.net.hosts import NET, Hosts

REPO = Path(__file__).parents[2]
ENV = REPO / ".venv/peers"
"""The environment that `make peers` makes for hivemind and torchft."""

CLI = (sys.executable, "-m", "gossamer.bootstrap.cli.main")

Figures = dict[str, Any]

NEVER_S = 10.0
"""Who stands still for so long in the end is said to do so for ever."""

FAULTS = ("worker", "coordinator", "split", "join")


class Cell(NamedTuple):
    contender: str
    workers: int
    mbit: int
    """Each host's line, both ways; 0 for no limit."""
    fault: str = ""

    @property
    def name(self) -> str:
        return "-".join(map(str, filter(None, (self.contender, self.workers, self.mbit, self.fault))))


class Setting(NamedTuple):
    """What all cells have in common. Seconds are from when all workers are ready."""

    options: dict[str, Any]
    step_s: float
    mark: int
    train_s: float
    fault_at_s: float
    restart_after_s: float
    split_s: float
    after_s: float
    """From the fault, or the end of a split, to the end."""
    start_s: float = 90.0
    stop_s: float = 40.0
    """How long workers may take to end before they hang."""


class Contender(NamedTuple):
    script: str
    settings: Mapping[str, Any] = MappingProxyType({})
    is_own: bool = False
    """Whether it runs in Gossamer's own environment."""
    has_coordinator: bool = True


CONTENDERS = {
    "alone": Contender("alone", is_own=True, has_coordinator=False),
    "ddp": Contender("ddp", is_own=True, has_coordinator=False),
    "torchft": Contender(
        "torchft_diloco", {"sync_every": 20, "delay": 0, "lr": 0.7, "momentum": 0.3, "quantize": False}
    ),
    "hivemind": Contender(
        "hivemind_local",
        {"epoch_steps": 100, "matchmaking_s": 3.0, "averaging_s": 10.0, "request_s": 1.0, "quantize": False},
    ),
    "hivemind8": Contender(
        "hivemind_local",
        {"epoch_steps": 100, "matchmaking_s": 3.0, "averaging_s": 10.0, "request_s": 1.0, "quantize": True},
    ),
    "gossamer": Contender("gossamer_attach", is_own=True),
}


class Run:
    """The hosts and processes of one cell."""

    def __init__(self, cell: Cell, setting: Setting, hosts: Hosts, folder: Path) -> None:
        self._cell, self._setting, self._hosts, self._folder = cell, setting, hosts, folder
        self._contender = CONTENDERS[cell.contender]
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._workers: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._settings = dict(self._contender.settings)
        self._begun: dict[tuple[int, int], float] = {}

    def __call__(self) -> Figures:
        """Run it. Raises TimeoutError, with the end of the logs, if the workers do not begin."""
        cell, setting = self._cell, self._setting
        for n in range(1, cell.workers + 2):
            self._hosts.add()
            if cell.mbit:
                self._hosts.shape_both_ways(n, f"{cell.mbit}mbit")
        first = range(cell.workers - (cell.fault == "join"))
        if self._cell.contender == "gossamer":
            self._init()
        if self._contender.has_coordinator:
            self._start_coordinator()
        asked = time.monotonic()
        for rank in first:
            self._start(rank)
        for rank in first:
            self._wait(f"ready{rank}-0", setting.start_s)
        start_s = time.monotonic() - asked
        (self._folder / "go").touch()
        go = time.monotonic()
        sent = self._sent()
        found = self._train(go)
        sent = self._sent() - sent
        end = time.monotonic()
        (self._folder / "stop").touch()
        hung = self._ended()
        ended_s = time.monotonic() - end
        left = self._left()
        steps = self._steps()
        made = {life: [t for t in times if t <= end] for life, times in steps.items()}
        return {
            **cell._asdict(),
            "start_s": start_s,
            "steps_per_s": sum(len(made[rank, 0]) for rank in first) / len(first) / (end - go),
            "bytes_per_step": sent / max(1, sum(map(len, made.values()))),
            **found,
            **(self._after_fault(made, go + setting.fault_at_s, end) if cell.fault else {}),
            **self._models(),
            "hung": hung,
            "ended_s": ended_s,
            "left_behind": left,
            "errors": self._errors(),
        }

    # -- processes

    def _start_coordinator(self) -> None:
        n = self._cell.workers + 1
        address, log, bin_ = f"{NET}.{n}", self._folder / "coordinator.log", ENV / "bin"
        match self._contender.script:
            case "torchft_diloco":
                command = [bin_ / "torchft_lighthouse", "--bind", f"{address}:29510", "--min_replicas", "1"]
                command += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
            case "hivemind_local":
                command = [bin_ / "hivemind-dht", "--host_maddrs", f"/ip4/{address}/tcp/31337"]
            case _:
                command = [
                    *CLI,
                    "bootstrap",
                    self._folder / "swarm.toml",
                    "--dir",
                    self._folder / "bootstrap",
                ]
                command += ["--listen", f"{address}:7700", "--admin", "off"]
        self._coordinator = self._hosts.launch(n, [str(word) for word in command], log=log, env=self._env(n))
        patterns = {"hivemind_local": r"/ip4/10\S+/p2p/\w+", "gossamer_attach": "listens on"}
        pattern = patterns.get(self._contender.script, ".")
        while not (met := re.search(pattern, log.read_text())):
            if self._coordinator.poll() is not None:
                raise TimeoutError(f"the coordinator ended: {log.read_text()[-1000:]}")
            time.sleep(0.05)
        self._settings["initial_peer"] = met[0]

    def _init(self) -> None:
        options = [f"--option={key}={value}" for key, value in self._setting.options.items()]
        command = [*CLI, "init", self._folder / "swarm.toml", "--no-trial", *options]
        subprocess.run(command, check=True, capture_output=True, cwd=REPO)

    def _env(self, n: int) -> dict[str, str]:
        build = REPO / ".build"
        build.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (build / "gossamer").symlink_to("..")
        path = {} if self._contender.is_own else {"PYTHONPATH": f"{build}:{REPO}"}
        return {"GLOO_SOCKET_IFNAME": f"e{n}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **path}

    def _start(self, rank: int, life: int = 0) -> None:
        cell = self._cell
        entry = Entry(
            rank=rank,
            life=life,
            folder=str(self._folder),
            host=f"{NET}.{rank + 1}",
            coordinator=f"{NET}.{cell.workers + 1}",
            workers=cell.workers,
            options=self._setting.options,
            step_s=self._setting.step_s,
            mark=0 if cell.fault else self._setting.mark,
            settings={**self._settings, "master": f"{NET}.1"},
        )
        python = sys.executable if self._contender.is_own else str(ENV / "bin/python")
        module = f"benchmarks.peers.{self._contender.script}"
        log = self._folder / f"worker{rank}-{life}.log"
        self._begun[rank, life] = time.monotonic()
        self._workers[rank, life] = self._hosts.launch(
            rank + 1, [python, "-m", module, json.dumps(asdict(entry))], log=log, env=self._env(rank + 1)
        )

    def _wait(self, name: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (self._folder / name).exists():
            ended = next((p for p in self._workers.values() if p.poll() is not None), None)
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"no {name}: {self._errors()}")
            time.sleep(0.02)

    def _ended(self) -> list[int]:
        """The ranks that do not end in time; they are killed."""
        deadline = time.monotonic() + self._setting.stop_s
        hung = []
        for (rank, _), process in self._workers.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
                process.kill()
                process.wait()
        return hung

    def _left(self, *ranks: int, grace_s: float = 3.0) -> int:
        """Processes that workers left on their hosts, `grace_s` after they ended; they are killed."""
        deadline = time.monotonic() + grace_s
        while True:
            pids = [pid for rank in ranks or range(self._cell.workers) for pid in self._hosts.pids(rank + 1)]
            if not pids or time.monotonic() >= deadline:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return len(pids)
            time.sleep(0.1)

    # -- training and faults

    def _train(self, go: float) -> Figures:
        """Let them train, with what has to happen meanwhile; returns what is found then."""
        cell, setting = self._cell, self._setting
        found: Figures = {}
        last = cell.workers - 1
        fault_s, end_s = setting.fault_at_s, setting.fault_at_s + setting.after_s

        def memory() -> None:
            each = [sum(map(_pss, self._hosts.pids(rank + 1))) for rank in range(cell.workers)]
            found["pss_mb"] = sum(each) / len(each) / 1e6

        def kill() -> None:
            self._workers[last, 0].kill()
            found["left_when_killed"] = self._left(last, grace_s=setting.restart_after_s - 0.5)

        def kill_coordinator() -> None:
            process = self._coordinator or self._workers[0, 0]
            for pid in self._hosts.pids(cell.workers + 1) if self._coordinator else [process.pid]:
                os.kill(pid, signal.SIGKILL)

        def halve(bridge: str) -> None:
            for rank in range(cell.workers // 2, cell.workers):
                self._hosts.move(rank + 1, bridge)

        events: list[tuple[float, Callable[[], object]]] = []
        match cell.fault:
            case "worker":
                restart = fault_s + setting.restart_after_s
                events = [(fault_s, kill), (restart, lambda: self._start(last, 1))]
            case "coordinator":
                events = [(fault_s, kill_coordinator)]
            case "split":
                events = [(fault_s, lambda: halve("br1")), (fault_s + setting.split_s, lambda: halve("br0"))]
                end_s += setting.split_s
            case "join":
                events = [(fault_s, lambda: self._start(last, 0))]
            case _:
                end_s = setting.train_s
                events = [(0.9 * end_s, memory)]
        for due, event in [*events, (end_s, lambda: None)]:
            time.sleep(max(0.0, go + due - time.monotonic()))
            event()
        return found

    def _after_fault(self, made: dict[tuple[int, int], list[float]], fault: float, end: float) -> Figures:
        """What the others lost, in seconds, by standing still for more than five steps, and who came back."""
        worst, never = 0.0, False
        killed = {"worker": self._cell.workers - 1, "coordinator": -1 if self._coordinator else 0}
        for (rank, life), times in made.items():
            if life == 0 and rank != killed.get(self._cell.fault) and self._begun[rank, 0] < fault:
                points = [fault, *(t for t in times if t > fault), end]
                gaps = [b - a for a, b in pairwise(points) if b - a > 5 * self._setting.step_s]
                worst = max(worst, sum(gaps))
                never |= end - points[-2] > NEVER_S
        found: Figures = {"others_stood_s": worst, "others_never": never}
        late = [life for life, begun in self._begun.items() if begun > fault - 0.1]
        for life in late:
            note = self._folder / f"joined{life[0]}-{life[1]}"
            is_in = note.exists() and float(note.read_text()) <= end
            found["joined_s"] = float(note.read_text()) - self._begun[life] if is_in else None
        return found

    # -- what is found

    def _sent(self) -> int:
        return sum(self._hosts.sent(rank + 1) for rank in range(self._cell.workers))

    def _steps(self) -> dict[tuple[int, int], list[float]]:
        """When each step of each worker ended."""
        return {
            life: np.fromfile(path).tolist()
            if (path := self._folder / f"steps{life[0]}-{life[1]}").exists()
            else []
            for life in self._workers
        }

    def _models(self) -> Figures:
        """Held-out losses of the first worker's model, and how far replicas are apart."""
        task = build_task("text", self._setting.options, ())
        model = task.build_model(0)

        def loss(name: str) -> float | None:
            paths = sorted(self._folder.glob(f"{name}[0-9]*.npy"))
            if not paths:
                return None
            torch.nn.utils.vector_to_parameters(torch.from_numpy(np.load(paths[0])), model.parameters())
            return task.evaluate(model)

        ends = [np.load(path).astype(float) for path in sorted(self._folder.glob("end*.npy"))]
        apart = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in combinations(ends, 2)]
        return {
            "loss_at_tokens": loss("mark"),
            "live_at_tokens": loss("marklive") or loss("mark"),
            "live": loss("end"),
            "loss": loss("average") or loss("end"),
            "replicas": len(ends),
            "apart": float(max(apart, default=0.0)),
        }

    def _errors(self) -> list[str]:
        """The last line of every worker that ended with an error."""
        found = []
        for (rank, life), process in self._workers.items():
            code = process.poll()
            if code not in (None, 0, -signal.SIGKILL):
                lines = (self._folder / f"worker{rank}-{life}.log").read_text(errors="replace").split("\n")
                said = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)] or lines
                found.append(
                    f"{rank}: exit {code}: {next((s for s in reversed(said) if s.strip()), '')[:300]}"
                )
        return found


def _pss(pid: int) -> int:
    """A process's share of memory, bytes, without mapped files: these hosts share their libraries' pages."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(
            int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        )
    return 0


def run(cell: Cell, setting: Setting, keep: Path | None = None) -> Figures:
    """Run a cell; what goes wrong is its figure. With `keep`, its folder is left there."""
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        with Hosts() as hosts:
            try:
                return Run(cell, setting, hosts, folder)()
            except TimeoutError as error:
                return {**cell._asdict(), "error": str(error)[:1000]}
    finally:
        if keep:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.rmtree(folder, ignore_errors=True)
