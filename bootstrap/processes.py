"""The processes of a local swarm: the same commands that a person would type on separate machines."""

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.home import Home
from gossamer.node.processes import Child, says_it_ended
from gossamer.protocol.errors import LocalError, UnreachableError

# --- What goes wrong at a node of a local swarm, found by following its log.
#
# A supervisor restarts a trainer however often it ends, as is right for a node far from its owner. Here a
# person looks on, who is told each cause once, and does not wait for a trainer that makes no progress.

READ_MAX = 1 << 16
"""Bytes that are read at a time. If a log has grown by more, only its end is read."""

CAUSES_MAX = 100
"""How many different causes are reported for one node."""

ENDS_MAX = 3
"""A trainer that has ended this often in the same round will make no progress."""

LINE = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d (?P<level>\w+) +(?P<text>.+)")
"""A line as `gossamer.node.logs` writes it."""

_PAUSE = re.compile(r" in [0-9.]+ s$")


class Troubles:
    """Reads one node's log."""

    def __init__(self, log_path: Path) -> None:
        self._path = log_path
        self._at = 0
        self._begun = b""
        self._told: set[str] = set()
        self._round = 0
        self._ends = 0
        self._cause = ""

    def read(self, round_: int) -> list[str]:
        """New errors and warnings, each reported once; `round_` is the last that the node has published."""
        if round_ > self._round:
            self._round, self._ends = round_, 0
        fresh = []
        for line in self._lines():
            found = LINE.fullmatch(line)
            if found is None or found["level"] not in ("warning", "error", "critical"):
                continue
            text = _PAUSE.sub("", found["text"])
            if says_it_ended(text, "trainer"):
                self._ends += 1
                self._cause = self._cause or text
            elif found["level"] != "warning":
                self._cause = text
            if text not in self._told and len(self._told) < CAUSES_MAX:
                self._told.add(text)
                fresh.append(text)
        return fresh

    @property
    def hopeless(self) -> str:
        """Why its trainer keeps ending; empty while there is hope."""
        if self._ends < ENDS_MAX:
            return ""
        return f"{self._cause} (its trainer ended {self._ends} times in one round; see {self._path})"

    def _lines(self) -> list[str]:
        """The whole lines that have come since the last call."""
        grown = b""
        with suppress(OSError), open(self._path, "rb") as log:
            size = log.seek(0, 2)
            if size - self._at > READ_MAX:
                self._at, self._begun = size - READ_MAX, b""
            log.seek(self._at)
            grown = log.read(READ_MAX)
            self._at += len(grown)
        *whole, self._begun = (self._begun + grown).split(b"\n")
        self._begun = self._begun[-READ_MAX:]
        return [line.decode("utf-8", "replace") for line in whole]


START_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 3.0
STOP_S = 4.5
POLL_S = 0.05

BYTES = ("bytes_sent", "bytes_received", "payload_bytes_sent", "payload_bytes_received")
"""Fields of a status that a daemon counts from its start on."""


def _no_settings() -> dict[str, str]:
    """Variables that undo the settings of this machine's own nodes; an empty variable counts as unset."""
    prefixes = ("GOSSAMER_NODE_", "GOSSAMER_BOOTSTRAP_")
    return dict.fromkeys((name for name in os.environ if name.startswith(prefixes)), "")


class _AllRuns:
    """Sums the bytes of a node's daemons: each counts from 0, unlike steps and tokens."""

    def __init__(self) -> None:
        self._past = dict.fromkeys(BYTES, 0)
        self._last: dict[str, Any] | None = None

    def of(self, status: dict[str, Any]) -> dict[str, int]:
        """All bytes up to the newest status. What a daemon did after its last status is not known."""
        last = self._last
        if last is not None and status["uptime_s"] < last["uptime_s"]:
            self._past = {name: past + last[name] for name, past in self._past.items()}
        self._last = status
        return {name: past + status[name] for name, past in self._past.items()}


@dataclass(slots=True)
class NodeProcess:
    """One `gossamer` command of the local swarm, its folder, its log and its latest status."""

    name: str
    folder: Path
    args: list[str]
    child: Child | None = None
    status: dict[str, Any] | None = None
    killed: bool = False
    """Whether we have killed it, and it has not come back."""
    ended: str = ""
    """How it ended without our doing; empty while it runs."""
    troubles: Troubles = field(init=False)
    _all_runs: _AllRuns = field(init=False, default_factory=_AllRuns)

    def __post_init__(self) -> None:
        self.troubles = Troubles(self.log_path)

    def start(self) -> None:
        """Run the command; its log goes to a file beside its folder."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        Home(self.folder).daemon_path.unlink(missing_ok=True)
        self.killed = False
        self.ended = ""
        with open(self.log_path, "ab") as log:
            self.child = Child(
                "gossamer.bootstrap.cli.main", self.args, env=_no_settings(), stderr=log.fileno()
            )

    @property
    def log_path(self) -> Path:
        return self.folder.with_suffix(".log")

    def last_words(self) -> str:
        """The last line of its log, which tells a person why it ended."""
        lines = (
            self.log_path.read_text("utf-8", "replace").strip().splitlines() if self.log_path.exists() else []
        )
        if not lines:
            return "its log is empty"
        logged = LINE.fullmatch(lines[-1])
        return logged["text"] if logged else lines[-1].removeprefix("gossamer: ")

    async def address(self) -> str:
        """Where it answers, once it does. Raises LocalError if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            facts = Home(self.folder).read_daemon()
            if facts is not None:
                return str(facts["address"])
            self.check_running()
            await asyncio.sleep(POLL_S)
        raise LocalError(f"{self.name} did not start within {START_TIMEOUT_S:.0f} s; see {self.log_path}")

    def check_running(self) -> None:
        """Raise LocalError with its last words if it has ended."""
        if self.child is not None and self.child.poll() is not None:
            raise LocalError(f"{self.name} ended: {self.last_words()}")

    def has_ended(self) -> bool:
        """Check whether it has ended without our doing; if so, `ended` says how."""
        status = self.child.poll() if self.child is not None else None
        if self.child is None or status is None:
            return False
        self.child.close()
        self.child = None
        self.status = None
        self.ended = _ending(status) or self.last_words()
        return True

    def kill(self) -> None:
        """Send SIGKILL to all of its processes at once, like a power cut."""
        if self.child is None:
            return
        with suppress(psutil.NoSuchProcess):
            whole = psutil.Process(self.child.pid)
            for process in (whole, *whole.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.child.end(STOP_S)
        self.child = None
        self.status = None
        self.killed = True

    async def ask(self, *, digest: bool, plaintext: bool, up_to: int | None = None) -> None:
        """Refresh its status, with the bytes of all its runs. Keeps the last one if it does not answer
        now."""
        facts = Home(self.folder).read_daemon()
        if facts is None or self.killed or self.ended:
            return
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                status = await fetch_status(
                    str(facts["address"]), digest=digest, plaintext=plaintext, up_to=up_to
                )
                if not self.killed:
                    self.status = {**status, **self._all_runs.of(status)}
        except (UnreachableError, TimeoutError):
            pass

    def read_log(self) -> list[str]:
        """What has gone wrong since the last call, by its log."""
        return self.troubles.read(self.status["round"] if self.status else 0)

    @property
    def trainer(self) -> dict[str, Any]:
        """Its trainer's last report; empty before there is one."""
        return (self.status or {}).get("trainer") or {}


def _ending(status: int) -> str:
    """How a process ended, by its exit status; empty if its log says more."""
    if status < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"  # one of the real-time signals, most of which have no name
    return "stopped" if status == 0 else ""


def stop_all(processes: list[NodeProcess]) -> None:
    """Stop all processes together, within STOP_S."""
    running = [process for process in processes if process.child is not None]
    for process in running:
        if process.child is not None and process.child.poll() is None:
            process.child.terminate()
    deadline = time.monotonic() + STOP_S
    for process in running:
        if process.child is not None:
            process.child.end(max(0.1, deadline - time.monotonic()))
            process.child = None


def threads_each(nodes: int) -> int:
    """CPU threads per trainer when the nodes share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // nodes)
