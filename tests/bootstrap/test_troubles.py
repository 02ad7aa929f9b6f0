"""`gossamer.bootstrap.processes`: each cause is told once, and a trainer that never gets on is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap import processes as troubles_
from gossamer.bootstrap.processes import CAUSES_MAX, ENDS_MAX, READ_MAX, Troubles
from gossamer.node.processes import Service
from tests.bootstrap.local_swarms import Ended

BUG = "12:00:01 error   my_task.py:29, in loss: RuntimeError: my bug\n"


def say(path: Path, text: str) -> None:
    with open(path, "a") as log:
        log.write(text)


def test_each_cause_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    troubles = Troubles(log)
    assert troubles.read(0) == [], "there is no log yet"
    say(log, "swarm abc\n12:00:00 info    up\n" + BUG[:20])
    assert troubles.read(0) == [], "half a line"
    say(log, BUG[20:] + "2026-11-27 12:00:02 warning the disk is full\n")
    assert troubles.read(0) == ["my_task.py:29, in loss: RuntimeError: my bug", "the disk is full"]
    say(log, BUG)
    assert troubles.read(0) == []


def test_an_end_is_told_once_however_long_the_pause_before_the_next_start(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    troubles = Troubles(log)
    for pause in ("0.5", "1.0", "12.5"):
        say(log, f"12:00:01 warning the trainer ended (status 1); starting it again in {pause} s\n")
    assert troubles.read(0) == ["the trainer ended (status 1); starting it again"]


def test_a_log_without_bounds_costs_no_more_than_its_end(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    troubles = Troubles(log)
    say(log, "x" * 3 * READ_MAX + "\n" + BUG)
    assert len(troubles.read(0)) == 1
    say(log, "".join(f"12:00:01 error   fault {i}\n" for i in range(2 * CAUSES_MAX)))
    assert len(troubles.read(0)) == CAUSES_MAX - 1


def test_a_line_without_an_end_is_kept_in_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles_, "READ_MAX", 100)
    log = tmp_path / "node-1.log"
    troubles = Troubles(log)
    for _ in range(5):
        say(log, "x" * 90)
        assert troubles.read(0) == [] and len(troubles._begun) <= 100
    say(log, "\n" + BUG)
    assert len(troubles.read(0)) == 1


def test_a_trainer_that_ends_again_and_again_in_one_round_is_hopeless(tmp_path: Path, caplog) -> None:
    log = tmp_path / "node-1.log"
    troubles = Troubles(log)
    service = Service("trainer", start=lambda: Ended(1))  # type: ignore[arg-type, return-value]

    def end() -> None:
        caplog.clear()
        service.child = Ended(1)  # type: ignore[assignment]
        service.keep_running(0.0)
        say(log, BUG + f"12:00:01 warning {caplog.messages[0]}\n")

    for round_ in range(2 * ENDS_MAX):
        end()
        troubles.read(round_)
        assert not troubles.hopeless, "it gets on"
    for _ in range(ENDS_MAX - 1):
        assert not troubles.hopeless
        end()
        troubles.read(round_)
    assert troubles.hopeless.startswith("my_task.py:29, in loss: RuntimeError: my bug (")
    assert str(log) in troubles.hopeless
