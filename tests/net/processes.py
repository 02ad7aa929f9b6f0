"""Starts real `gossamer` commands, finds processes that they left running, and waits for their effects."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from gossamer.node.home import Home

COMMAND = [sys.executable, "-m", "gossamer.bootstrap.cli.main"]

_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards sing of silver threads".split()


def write_text(path: Path) -> Path:
    """Write some text from which a tiny model learns within a few steps."""
    words = random.Random(1)
    path.write_text("\n".join(" ".join(words.choices(_WORDS, k=12)) for _ in range(1500)))
    return path


def gossamer(*args: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def gossamer_status(address: str) -> dict[str, Any] | None:
    """A node's status from the command line; None if the node does not answer."""
    done = gossamer("status", address, "--json")
    return json.loads(done.stdout) if done.returncode == 0 else None


def processes_naming(folder: Path) -> list[psutil.Process]:
    """Running processes whose command line names a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in line):
            found.append(process)
    return found


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> Any:
    """The condition's first true value; fails naming `what` if there is none in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout:.0f} s: {what}")


class SwarmRun:
    """One `gossamer swarm` in a folder of its own, which ends with the test, whatever happens."""

    def __init__(self, base: Path, *args: object, nodes: int = 2, rounds: int = 100_000) -> None:
        self.base = base
        self.folder = base / "swarm"
        self.json_path = base / "summary.json"
        self.stderr_path = base / "stderr.txt"
        text = write_text(base / "text.txt")
        options = ["--nodes", nodes, "--rounds", rounds, "--data", text, "--dir", self.folder, *args]
        with open(self.stderr_path, "wb") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, "swarm", *map(str, options), "--json", str(self.json_path)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> SwarmRun:
        return self

    def __exit__(self, *error: object) -> None:
        for process in processes_naming(self.base):
            process.kill()
        self.process.kill()
        self.process.wait(10)

    # -- what is going on

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.json_path.read_text())
        return result

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def address(self, name: str) -> str | None:
        """The address at which a node answers now; None while its daemon starts."""
        facts = Home(self.folder / name).read_daemon()
        return str(facts["address"]) if facts else None

    def find(self, name: str, module: str) -> psutil.Process | None:
        """The process of a node's daemon or trainer."""
        for process in processes_naming(self.folder / name):
            if any(
                part.startswith("gossamer.node.") and part.endswith(f".{module}")
                for part in process.cmdline()
            ):
                return process
        return None

    def supervisor(self, name: str) -> psutil.Process:
        for process in processes_naming(self.folder / name):
            if "gossamer.bootstrap.cli.main" in process.cmdline() and process.pid != self.process.pid:
                return process
        raise AssertionError(f"{name} has no supervisor")

    def status(self, address: str) -> dict[str, Any] | None:
        return gossamer_status(address)

    # -- waiting

    def wait_round(self, name: str, round_: int, timeout: float = 90) -> dict[str, Any]:
        """Wait until a node has published a round."""

        def reached() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.stderr
            address = self.address(name)
            status = self.status(address) if address else None
            return status if status and status["round"] >= round_ else None

        found: dict[str, Any] = wait_for(reached, timeout, f"{name} in round {round_}")
        return found

    def interrupt(self) -> tuple[int, float]:
        """Send SIGINT, as Ctrl-C does; returns the exit status and the seconds it took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(30)
        return status, time.monotonic() - begun


def assert_all_gone(folder: Path, timeout: float) -> None:
    """Check that within `timeout` seconds no process names the folder any more."""
    wait_for(lambda: not processes_naming(folder), timeout, f"all processes of {folder} gone")


def stopped(process: subprocess.Popen[bytes]) -> int:
    """End a process by SIGTERM; returns its exit status. One that takes too long is killed."""
    process.terminate()
    try:
        return process.wait(10)
    finally:
        process.kill()
        process.wait()


class BootstrapPeer:
    """One `gossamer bootstrap` of a manifest: a full node without a trainer, and cheap to start."""

    def __init__(self, manifest: Path, folder: Path, *args: object) -> None:
        self.folder = folder
        self.log_path = folder.with_suffix(".log")
        command = ["bootstrap", manifest, "--listen", "127.0.0.1:0", "--dir", folder, *args]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_listening(self) -> str:
        """Wait until it answers; returns its address."""

        def facts() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.log
            return Home(self.folder).read_daemon()

        return str(wait_for(facts, 120, "a bootstrap peer listening")["address"])

    def stop(self) -> int:
        return stopped(self.process)


class Node:
    """One `gossamer node` in a folder of its own, and its output."""

    def __init__(self, base: Path, name: str, *args: object) -> None:
        self.home = Home(base / name)
        self.log_path = base / f"{name}.log"
        command = ["node", "--dir", self.home.root, "--listen", "127.0.0.1:0", "--device", "cpu", *args]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def address(self) -> str | None:
        assert self.process.poll() is None, self.log
        facts = self.home.read_daemon()
        return str(facts["address"]) if facts else None

    def status(self) -> dict[str, Any]:
        """Its status; empty before it answers."""
        address = self.address()
        return (gossamer_status(address) if address else None) or {}

    def wait_published(self, round_: int) -> None:
        wait_for(lambda: self.status().get("round", 0) >= round_, 120, f"round {round_} published")

    def errors(self) -> list[str]:
        """The lines of its output that say what is wrong."""
        assert "Traceback" not in self.log, self.log
        return [line.split("error", 1)[1].strip() for line in self.log.splitlines() if " error " in line]

    def stop(self) -> int:
        return stopped(self.process)
