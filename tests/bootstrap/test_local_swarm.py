"""What a local swarm does when its processes end or go wrong: others go on, and it shows who is gone."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.bootstrap.live_table import Display
from gossamer.bootstrap.local_swarm import LocalSwarm, SwarmOptions
from gossamer.bootstrap.processes import ENDS_MAX, NodeProcess
from gossamer.protocol.errors import LocalError
from tests.protocol.builders import SMALL

BUG = "12:00:01 error   my_task.py:29, in loss: RuntimeError: my bug\n"
ENDED = "12:00:01 warning the trainer ended (status 1); starting it again in 0.5 s\n"


class Ended:
    """A child process that has ended with an exit status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status

    def close(self) -> None:
        pass


@pytest.fixture
def swarm(tmp_path: Path) -> LocalSwarm:
    options = SwarmOptions(nodes=2, rounds=3, every_steps=5, folder=tmp_path)
    return LocalSwarm(options, SMALL, tmp_path)


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def display(shown: io.StringIO) -> Display:
    return Display(Console(file=shown, width=200), 3, "a swarm")


def write(path: Path, text: str) -> None:
    with open(path, "a") as log:
        log.write(text)


# -- one process


@pytest.mark.parametrize(
    ("exit_status", "ended"),
    [(-9, "killed by SIGKILL"), (0, "stopped"), (2, "no text in x")],
)
@pytest.mark.parametrize("before", ["", "gossamer: ", "12:00:01 error   "])
def test_how_a_process_ended(tmp_path: Path, exit_status: int, ended: str, before: str) -> None:
    process = NodeProcess("node-1", tmp_path / "node-1", [])
    assert not process.has_ended(), "it was never started"
    process.log_path.write_text(f"12:00:00 info    up\n{before}no text in x\n")
    process.child = Ended(exit_status)  # type: ignore[assignment]
    process.status = {"round": 3}
    assert process.has_ended() and process.ended == ended and process.status is None
    assert not process.has_ended(), "that was shown"


def test_each_cause_is_reported_once(tmp_path: Path) -> None:
    process = NodeProcess("node-1", tmp_path / "node-1", [])
    assert process.troubles() == [], "there is no log yet"
    write(process.log_path, "swarm abc\n12:00:00 info    up\n" + BUG[:20])
    assert process.troubles() == [], "half a line"
    write(process.log_path, BUG[20:] + "2026-11-27 12:00:02 warning the disk is full\n")
    assert process.troubles() == ["my_task.py:29, in loss: RuntimeError: my bug", "the disk is full"]
    write(process.log_path, BUG)
    assert process.troubles() == []
    for pause in ("0.5", "12.5"):
        write(process.log_path, ENDED.replace("0.5", pause))
    assert process.troubles() == ["the trainer ended (status 1); starting it again"]


# -- the swarm


def test_the_others_go_on_until_nobody_is_left(
    swarm: LocalSwarm, display: Display, shown: io.StringIO
) -> None:
    one, two = swarm.nodes
    one.status = two.status = {"state": "finished", "trains": True, "round": 3}
    one.child = Ended(-9)  # type: ignore[assignment]
    swarm.boot.child = Ended(-15)  # type: ignore[assignment]
    swarm._check(display)
    assert "bootstrap ended; the others continue: killed by SIGTERM" in shown.getvalue()
    assert "node-1 ended; the others continue: killed by SIGKILL" in shown.getvalue()
    assert swarm.is_over(), "nobody waits for who is gone"
    two.child = Ended(2)  # type: ignore[assignment]
    two.log_path.touch()
    with pytest.raises(LocalError, match="node-2 ended, and no node is left: its log is empty"):
        swarm._check(display)


def test_nobody_waits_for_the_model_of_a_bootstrap_peer_that_has_ended(
    swarm: LocalSwarm, display: Display
) -> None:
    write(swarm.boot.log_path, "12:00:00 error   cannot listen\n")
    swarm.boot.child = Ended(2)  # type: ignore[assignment]
    with pytest.raises(LocalError, match="^bootstrap ended before any node had the model: cannot listen$"):
        swarm._check(display)


ALIKE = {
    "state": "finished",
    "merged_digest": "m",
    "phi_digest": "p",
    "rounds_behind": 0,
    "payloads_missing": 0,
    "version": 7,
    "trainer": {"val_version": 7},
}


@pytest.mark.parametrize(
    ("of_one", "agree"),
    [
        ({}, True),
        ({"ledger_digest": "of fewer"}, True),  # one that joined late has no records of before
        ({"merged_digest": "other"}, False),
        ({"rounds_behind": 1}, False),
        ({"payloads_missing": 1}, False),
        ({"version": 8}, False),
        ({"trainer": {}}, False),
    ],
)
def test_they_agree_when_all_have_merged_the_same_and_evaluated_that(
    swarm: LocalSwarm, of_one: dict[str, object], agree: bool
) -> None:
    for process in swarm.nodes:
        process.status = dict(ALIKE)
    swarm.nodes[1].status = {**ALIKE, **of_one}
    assert swarm._all_agree() is agree


async def test_nodes_that_never_agree_are_not_waited_for_for_ever(
    swarm: LocalSwarm, display: Display
) -> None:
    async with asyncio.timeout(60):
        await swarm._watch(display, "exchanging", lambda: False, 0.0)


def test_what_goes_wrong_is_shown_once_and_a_trainer_without_progress_ends_it(
    swarm: LocalSwarm, display: Display, shown: io.StringIO, tmp_path: Path
) -> None:
    for _ in range(ENDS_MAX - 1):
        write(swarm.nodes[1].log_path, BUG + ENDED)
        swarm._check(display)
    assert shown.getvalue().count(f"my bug ({tmp_path / 'node-2.log'})\n") == 1
    write(swarm.nodes[1].log_path, BUG + ENDED)
    with pytest.raises(LocalError, match="^node-2: its trainer ended 4 times; see .*node-2.log"):
        swarm._check(display)
