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

from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.home import Home
from gossamer.node.processes import ENDED, Child
from gossamer.protocol.errors import LocalError, UnreachableError

START_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 3.0
STOP_S = 4.5
POLL_S = 0.05

READ_MAX = 1 << 20
"""Bytes of a log that are read at a time. No line is as long."""

CAUSES_MAX = 100
"""How many different causes of trouble are reported for one node."""

ENDS_MAX = 4
"""A trainer that has ended this often will make no progress."""

LINE = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d (?P<level>\w+) +(?P<text>.+)")
"""A line as `gossamer.node.logs` writes it."""

_PAUSE = re.compile(r" in [0-9.]+ s$")


class Troubles:
    """What goes wrong at a node, found by following its log.

    A supervisor restarts a trainer however often it ends, as is right for a node far from its owner. Here a
    person watches, who is shown each cause once and does not wait for a trainer that keeps ending.
    """

    def __init__(self, log_path: Path) -> None:
        self._path = log_path
        self._at = 0
        self._shown: set[str] = set()
        self._ends = 0
        self._cause = ""

    def read(self) -> list[str]:
        """New errors and warnings, each reported once."""
        fresh = []
        for line in self._lines():
            found = LINE.fullmatch(line)
            if found is None or found["level"] not in ("warning", "error", "critical"):
                continue
            text = _PAUSE.sub("", found["text"])
            self._ends += text.startswith(ENDED % "trainer")
            self._cause = text if found["level"] != "warning" else self._cause or text
            if text not in self._shown and len(self._shown) < CAUSES_MAX:
                self._shown.add(text)
                fresh.append(text)
        return fresh

    @property
    def hopeless(self) -> str:
        """Why its trainer keeps ending; empty while there is hope."""
        if self._ends < ENDS_MAX:
            return ""
        return f"{self._cause} (its trainer ended {self._ends} times; see {self._path})"

    def _lines(self) -> list[str]:
        """The next whole lines."""
        grown = b""
        with suppress(OSError), open(self._path, "rb") as log:
            log.seek(self._at)
            grown = log.read(READ_MAX)
        end = grown.rfind(b"\n") + 1
        self._at += end
        return grown[:end].decode("utf-8", "replace").splitlines()


@dataclass(slots=True)
class NodeProcess:
    """One `gossamer` command of the local swarm, its folder, its log and its latest status."""

    name: str
    folder: Path
    args: list[str]
    child: Child | None = None
    status: dict[str, Any] | None = None
    killed: bool = False
    """Whether it was killed on purpose, and has not come back."""
    ended: str = ""
    """How it ended without our doing; empty while it runs."""
    troubles: Troubles = field(init=False)

    def __post_init__(self) -> None:
        self.troubles = Troubles(self.log_path)

    def start(self) -> None:
        """Run the command; its log goes to a file beside its folder."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        Home(self.folder).daemon_path.unlink(missing_ok=True)
        self.killed = False
        self.ended = ""
        # Without the settings of this machine's own nodes; an empty variable counts as unset.
        settings = [name for name in os.environ if name.startswith(("GOSSAMER_NODE_", "GOSSAMER_BOOTSTRAP_"))]
        with open(self.log_path, "ab") as log:
            self.child = Child(
                "gossamer.bootstrap.cli.main",
                self.args,
                env=dict.fromkeys(settings, ""),
                stderr=log.fileno(),
            )

    @property
    def log_path(self) -> Path:
        return self.folder.with_suffix(".log")

    def last_line(self) -> str:
        """The last line of its log, which tells a person why it ended."""
        lines = self.log_path.read_text("utf-8", "replace").strip().splitlines() or ["its log is empty"]
        logged = LINE.fullmatch(lines[-1])
        return logged["text"] if logged else lines[-1].removeprefix("gossamer: ")

    async def address(self) -> str:
        """Where it answers, once it does. Raises LocalError if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            facts = Home(self.folder).read_daemon()
            if facts is not None:
                return str(facts["address"])
            if self.child is not None and self.child.poll() is not None:
                raise LocalError(f"{self.name} ended: {self.last_line()}")
            await asyncio.sleep(POLL_S)
        raise LocalError(f"{self.name} did not start within {START_TIMEOUT_S:.0f} s; see {self.log_path}")

    def has_ended(self) -> bool:
        """Check whether it has ended without our doing; if so, `ended` says how."""
        status = self.child.poll() if self.child is not None else None
        if self.child is None or status is None:
            return False
        self.child.close()
        self.child = None
        self.status = None
        if status < 0:
            self.ended = f"killed by {signal.Signals(-status).name}"
        else:
            self.ended = self.last_line() if status else "stopped"
        return True

    async def ask(self, *, digest: bool, plaintext: bool, up_to: int | None = None) -> None:
        """Refresh its status. Keeps the last one if it does not answer now."""
        facts = Home(self.folder).read_daemon()
        if facts is None or self.killed or self.ended:
            return
        with suppress(UnreachableError, TimeoutError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                address = str(facts["address"])
                status = await fetch_status(address, digest=digest, plaintext=plaintext, up_to=up_to)
                if not self.killed:
                    self.status = status

    @property
    def trainer(self) -> dict[str, Any]:
        """Its trainer's last report; empty before there is one."""
        return (self.status or {}).get("trainer") or {}


def stop_all(processes: list[NodeProcess]) -> None:
    """Stop all processes together, within STOP_S."""
    running = [process.child for process in processes if process.child is not None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + STOP_S
    for child in running:
        child.end(max(0.1, deadline - time.monotonic()))
    for process in processes:
        process.child = None


def threads_each(nodes: int) -> int:
    """CPU threads per trainer when the nodes share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // nodes)
