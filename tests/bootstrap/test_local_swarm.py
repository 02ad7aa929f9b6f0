"""What a local swarm does when processes of its own end: others go on, and it says who is gone."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.bootstrap import local_swarm
from gossamer.bootstrap.live_table import Display, Output
from gossamer.bootstrap.local_swarm import LocalSwarm
from gossamer.bootstrap.processes import BYTES, NodeProcess
from gossamer.node.home import Home
from gossamer.protocol.errors import LocalError
from tests.bootstrap.local_swarms import Ended, options
from tests.bootstrap.summaries import status
from tests.protocol.builders import SMALL


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, "killed by SIGKILL"),
        (-40, "killed by signal 40"),
        (0, "stopped"),
        (2, "no text in x"),
        (1, "no text in x"),
    ],
)
@pytest.mark.parametrize("before", ["", "gossamer: ", "12:00:01 error   "])
def test_how_a_process_ended(tmp_path: Path, status: int, said: str, before: str) -> None:
    process = NodeProcess("node-1", tmp_path / "node-1", [])
    assert not process.has_ended(), "it was never started"
    process.log_path.write_text(f"12:00:00 info    up\n{before}no text in x\n")
    process.child = Ended(status)  # type: ignore[assignment]
    process.status = {"round": 3}
    assert process.has_ended()
    assert process.ended == said
    assert process.status is None
    assert not process.has_ended(), "that was said"


async def test_bytes_are_those_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steps and tokens are: a daemon that was killed and started again counts its bytes from 0."""
    told = [(1.0, 100), (9.0, 900), (0.5, 10), (3.0, 50), (0.2, 1)]
    statuses = iter([{"uptime_s": uptime, **dict.fromkeys(BYTES, count)} for uptime, count in told])

    async def answer(*_: object, **__: object) -> dict[str, Any]:
        return next(statuses)

    monkeypatch.setattr("gossamer.bootstrap.processes.fetch_status", answer)
    process = NodeProcess("node-1", tmp_path / "node-1", [])
    home = Home(process.folder)
    home.create()
    home.write_daemon(address="127.0.0.1:1")
    shown = []
    for _ in told:
        await process.ask(digest=False, plaintext=True)
        assert process.status is not None
        shown.append([process.status[name] for name in BYTES])
    assert shown == [[count] * len(BYTES) for count in (100, 900, 910, 950, 951)]


def test_the_others_go_on_until_nobody_is_left(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    shown = io.StringIO()
    display = Display(Console(file=shown, width=200), 3, "a swarm")
    boot, one, two = swarm._everyone
    swarm._has_joined = True
    one.status = two.status = {"state": "finished", "trains": True, "round": 3}
    one.child = Ended(-9)  # type: ignore[assignment]
    boot.child = Ended(-15)  # type: ignore[assignment]
    swarm._check_running(display)
    assert "bootstrap ended; the others continue: killed by SIGTERM" in shown.getvalue()
    assert "node-1 ended; the others continue: killed by SIGKILL" in shown.getvalue()
    assert swarm._all_finished(), "nobody waits for who is gone"
    two.child = Ended(2)  # type: ignore[assignment]
    with pytest.raises(LocalError, match="node-2 ended, and no node is left: its log is empty"):
        swarm._check_running(display)


ALIKE = {
    "state": "finished",
    "ledger_digest": "l",
    "merged_digest": "m",
    "phi_digest": "p",
    "rounds_behind": 0,
    "payloads_missing": 0,
    "version": 7,
    "trainer": {"val_version": 7},
}


@pytest.mark.parametrize(
    "of_one",
    [
        {"merged_digest": "other"},
        {"rounds_behind": 1},
        {"payloads_missing": 1},
        {"version": 8},
        {"trainer": {}},
    ],
)
def test_they_agree_when_all_have_merged_the_same_and_evaluated_that(
    tmp_path: Path, of_one: dict[str, object]
) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    for process in swarm._nodes:
        process.status = dict(ALIKE)
    assert swarm._all_agree()
    swarm._nodes[1].status = {**ALIKE, **of_one}
    assert not swarm._all_agree()


def test_one_that_joined_late_agrees_without_the_records_of_before(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    for process in swarm._nodes:
        process.status = dict(ALIKE)
    swarm._nodes[1].status = {**ALIKE, "ledger_digest": "of fewer"}
    assert swarm._all_agree()


def test_it_is_not_finished_before_the_storm_is(tmp_path: Path) -> None:
    swarm = LocalSwarm(replace(options(tmp_path), chaos=True), SMALL, tmp_path)
    for process in swarm._nodes:
        process.status = dict(ALIKE)
    assert swarm._storm is not None and not swarm._storm.over
    assert not swarm._all_finished()
    swarm._storm._script.clear()
    assert swarm._all_finished()


async def test_nodes_that_never_agree_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    display = Display(Console(file=io.StringIO()), 3, "a swarm")
    async with asyncio.timeout(10):
        await swarm._watch(display, "exchanging", lambda: False, 0.0)


def test_nobody_waits_for_the_model_of_a_bootstrap_peer_that_has_ended(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    boot = swarm._boot
    boot.log_path.write_text("12:00:00 error   cannot listen\n")
    boot.child = Ended(2)  # type: ignore[assignment]
    with pytest.raises(LocalError, match="^bootstrap ended before any node had the model: cannot listen$"):
        swarm._check_running(Display(Console(file=io.StringIO()), 3, "a swarm"))


async def test_what_goes_wrong_is_told_once_and_a_trainer_that_never_gets_on_ends_it(tmp_path: Path) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    shown = io.StringIO()
    display = Display(Console(file=shown, width=80), 3, "a swarm")
    wrong = (
        "12:00:00 error   my bug\n12:00:00 warning the trainer ended (status 1); starting it again in 0.5 s\n"
    )
    for _ in range(2):
        with open(swarm._nodes[1].log_path, "a") as log:
            log.write(wrong)
        await swarm._tell_troubles(display)
    assert shown.getvalue().count("node-2: my bug\n") == 1
    assert shown.getvalue().count(f"the nodes' logs are in {tmp_path}\n") == 1
    with open(swarm._nodes[1].log_path, "a") as log:
        log.write(wrong)
    with pytest.raises(LocalError, match="^node-2: my bug .its trainer ended 3 times in one round"):
        await swarm._tell_troubles(display)


def test_a_reader_that_is_gone_is_an_error_that_can_be_cleaned_up_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        Output().print("x")


@pytest.mark.parametrize("by", ["time", "a person"])
def test_the_sample_ends_when_time_is_up_or_a_person_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """With a large model a character takes seconds, and nothing is shown until the sample is there."""
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)

    def pieces(*_: object, **__: object) -> Iterator[str]:
        yield from "abc"
        if by == "time":
            late = time.monotonic() + local_swarm.SAMPLE_S + 1
            monkeypatch.setattr(local_swarm.time, "monotonic", lambda: late)
        else:
            swarm._is_asked_to_stop = True
        yield from itertools.repeat("d", 1000)

    monkeypatch.setattr("gossamer.node.exports.generate.generate", pieces)
    assert swarm._sample() == "def abcd"


async def test_a_signal_is_heard_once_the_work_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    for number, process in enumerate(swarm._nodes):
        process.status = status(number)

    async def nothing() -> None:
        pass

    def sample() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not swarm._is_asked_to_stop and time.monotonic() < deadline:
            time.sleep(0.01)
        return f"asked: {swarm._is_asked_to_stop}"

    monkeypatch.setattr(swarm, "_work", nothing)
    monkeypatch.setattr(swarm, "_sample", sample)
    assert (await swarm.run()).sample == "asked: True"


async def test_the_loss_at_the_start_is_kept_where_who_measured_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who begins before anybody has published measures it: of the others none may have."""
    swarm = LocalSwarm(options(tmp_path), SMALL, tmp_path)
    looks = 0

    async def ask(self: NodeProcess, **_: object) -> None:
        start = 5.0 if self.name == "node-2" and looks == 1 else None
        self.status = {
            **status(0),
            "state": "finished",
            "trainer": {"val_loss_start": start, "val_loss": 2.0},
        }

    def over() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    async def work() -> None:
        await swarm._watch(Display(Console(file=io.StringIO(), width=200), 3, ""), "exchanging", over, None)

    monkeypatch.setattr(NodeProcess, "ask", ask)
    monkeypatch.setattr("gossamer.bootstrap.local_swarm.REFRESH_S", 0.0)
    monkeypatch.setattr(Display, "update", lambda *_: None)
    monkeypatch.setattr(swarm, "_work", work)
    monkeypatch.setattr(swarm, "_sample", str)
    found = await swarm.run()
    assert (found.val_loss_start, found.val_loss_end) == (5.0, 2.0) and looks == 3
