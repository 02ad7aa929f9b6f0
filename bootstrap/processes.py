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
from gossamer.node.home import KEY_VARIABLE, Home
from gossamer.node.processes import ENDED, Child
from gossamer.protocol.errors import LocalError, UnreachableError

START_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 3.0
STOP_S = 4.5
POLL_S = 0.05

ENDS_MAX = 4
"""A trainer that has ended this often will make no progress."""

LINE = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d (?P<level>\w+) +(?P<text>.+?)(?: in [0-9.]+ s)?")
"""A line as `gossamer.node.logs` writes it. A pause at its end makes it no other trouble."""


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
    _read_to: int = 0
    _troubles: set[str] = field(default_factory=set)
    _trainer_ends: int = 0

    def start(self) -> None:
        """Run the command; its log goes to a file beside its folder."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        Home(self.folder).daemon_path.unlink(missing_ok=True)
        self.killed = False
        self.ended = ""
        # Without the settings of this machine's own nodes; an empty variable counts as unset.
        ours = ("GOSSAMER_NODE_", "GOSSAMER_BOOTSTRAP_", KEY_VARIABLE)
        settings = [name for name in os.environ if name.startswith(ours)]
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

    def troubles(self) -> list[str]:
        """Errors and warnings that are new in its log, each reported once.

        A supervisor restarts a trainer however often it ends, as is right for a node far from its owner. Here
        a person waits: raises LocalError once it has ended ENDS_MAX times.
        """
        fresh: list[str] = []
        with suppress(FileNotFoundError), open(self.log_path, "rb") as log:
            log.seek(self._read_to)
            whole, newline, _ = log.read().rpartition(b"\n")
            self._read_to += len(whole + newline)
            for line in whole.decode("utf-8", "replace").splitlines():
                found = LINE.fullmatch(line)
                if found and found["level"] in ("warning", "error", "critical"):
                    self._trainer_ends += found["text"].startswith(ENDED % "trainer")
                    if found["text"] not in self._troubles:
                        fresh.append(found["text"])
                        self._troubles.add(found["text"])
        if self._trainer_ends >= ENDS_MAX:
            raise LocalError(
                f"{self.name}: its trainer ended {self._trainer_ends} times; see {self.log_path}"
            )
        return fresh

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
        if self.child is None or (status := self.child.poll()) is None:
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
