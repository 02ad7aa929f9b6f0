"""docs/quickstart.md as it stands, on two hosts with a cable between them.

A ``sh on a`` block is typed at machine a. What ``gossamer bootstrap`` and ``gossamer node`` say is read
while they run; "again" after the machine's name means that its node is stopped with Ctrl-C first. The
``text`` block after it is what must be said, line by line and in this order, "..." standing for anything.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.hosts import NET, Hosts, why_not
from tests.net.processes import COMMAND, processes_naming, wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
SAID_S = 90
LEAVE_S = 5
MACHINES = {"a": 1, "b": 2}


def blocks() -> list[tuple[str, str]]:
    """Info string and text of each fenced block."""
    return re.findall(r"^```(.*?)\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


class Running:
    """One command at one machine, and the file that takes what it says."""

    def __init__(self, command: list[str], folder: Path, log: Path) -> None:
        self.log = log
        environment = {
            **os.environ,
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop("GOSSAMER_HOME", None)
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text("utf-8")

    def end(self) -> None:
        """Ctrl-C, which reaches every process of the terminal, ends it in good order."""
        os.killpg(self.process.pid, signal.SIGINT)
        assert self.process.wait(LEAVE_S + 5) == 0, self.said()


class Reader:
    """Somebody who does what the page says."""

    def __init__(self, hosts: Hosts, base: Path) -> None:
        self.hosts = hosts
        self.base = base
        self.all: list[Running] = []
        self.lasting: dict[str, Running] = {}
        self.latest: list[Running] = []
        self.words = {f"{name}.example": f"{NET}.{n}" for name, n in MACHINES.items()}
        for name in MACHINES:
            (base / name).mkdir()

    def filled_in(self, text: str, folder: Path) -> str:
        for word, meaning in self.words.items():
            text = text.replace(word, meaning)
        return text.replace("~", str(folder))

    def types(self, machine: str, line: str) -> None:
        folder = self.base / machine
        program, *arguments = shlex.split(self.filled_in(line, folder), comments=True)
        assert program == "gossamer", line
        log = self.base / f"{machine}-{len(list(self.base.glob('*.log')))}.log"
        command = [*self.hosts.on(MACHINES[machine]), *COMMAND, *arguments]
        running = Running(command, folder, log)
        self.all.append(running)
        self.latest.append(running)
        if arguments[0] in ("bootstrap", "node"):
            self.lasting[f"{machine} {arguments[0]}"] = running
        else:
            assert running.process.wait(SAID_S) == 0, running.said()

    def reads(self, text: str) -> None:
        """Wait until all of it was said."""
        wanted = ".*".join(
            ".*".join(map(re.escape, line.split("...")))
            for line in self.filled_in(text, self.base).splitlines()
        )

        def said() -> bool:
            return re.search(wanted, "".join(r.said() for r in self.latest), re.DOTALL) is not None

        try:
            wait_for(said, SAID_S, text)
        except AssertionError:
            raise AssertionError(
                f"{text}\nwas not said, but\n{''.join(r.said() for r in self.latest)}"
            ) from None

    def notes(self) -> None:
        """What later commands need of what was said."""
        for running in self.latest:
            if found := re.search("gossamer://([0-9a-f]{64})@", running.said()):
                self.words["NODE_ID"] = found[1]
            if found := re.search("^swarm ([0-9a-f]{12})", running.said(), re.MULTILINE):
                self.words["SWARM"] = found[1]

    def has_published(self, machine: str) -> bool:
        """As whoever is in no hurry waits for."""
        asked = self.hosts.run([*COMMAND, "status", f"{self.words[f'{machine}.example']}:7700", "--json"])
        return asked.returncode == 0 and json.loads(asked.stdout)["round"] > 0

    def follows(self, info: str, text: str) -> None:
        kind, *where = info.split()
        if kind == "sh":
            self.latest = []
            if "again" in where:
                wait_for(lambda: self.has_published(where[1]), SAID_S, f"a delta by {where[1]}")
                self.lasting.pop(f"{where[1]} node").end()
            for line in text.splitlines():
                self.types(where[1], line)
        elif kind == "text":
            self.reads(text)
            self.notes()
        else:
            assert info == "python"
            done = Running([sys.executable, "-c", text], self.base / "b", self.base / "python.log")
            assert done.process.wait(SAID_S) == 0, done.said()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with Hosts() as hosts:
        for _ in MACHINES:
            hosts.add()
        somebody = Reader(hosts, tmp_path)
        try:
            yield somebody
        finally:
            for process in processes_naming(tmp_path):
                process.kill()
            for running in somebody.all:
                running.process.kill()
                running.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_page_leads_to_where_it_says(reader: Reader) -> None:
    followed = blocks()
    assert [info for info, _ in followed].count("text") >= 6
    for info, text in followed:
        reader.follows(info, text)
    for running in reader.lasting.values():
        running.end()


def test_every_block_is_one_that_the_reader_can_follow() -> None:
    infos = {info for info, _ in blocks()}
    assert infos <= {"python", "text", "sh on a", "sh on b", "sh on b again"} and len(infos) == 5
