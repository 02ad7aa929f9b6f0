"""Processes killed with SIGKILL: what else must go on, and what must end with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.net.processes import SwarmRun, assert_all_gone, wait_for

pytestmark = pytest.mark.slow


def test_a_killed_daemon_and_a_killed_trainer_cost_no_agreement(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 8, rounds=14) as run:
        run.wait_round("node-1", 2)
        daemon, trainer = run.find("node-1", "daemon"), run.find("node-1", "trainer")
        assert daemon is not None and trainer is not None
        daemon.kill()

        other = run.find("node-2", "trainer")
        assert other is not None
        other.kill()

        new = wait_for(lambda: run.find("node-1", "daemon"), 10, "a new daemon")
        assert new.pid != daemon.pid
        assert trainer.is_running(), "the trainer goes on alone"
        again = wait_for(lambda: run.find("node-2", "trainer"), 10, "a new trainer")
        assert again.pid != other.pid

        assert run.process.wait(60) == 0, run.stderr
        assert trainer.pid not in (new.pid, again.pid)
        summary = run.summary()
    assert summary["identical"] is True
    assert [node["round"] for node in summary["nodes"]] == [14, 14]
    assert summary["ok"] is True
    logs = run.log("node-1") + run.log("node-2")
    assert "the daemon ended (status -9)" in run.log("node-1")
    assert "the trainer ended (status -9)" in run.log("node-2")
    assert "Traceback" not in logs
    assert "are void" not in logs, "an honest node never equivocates"
    assert "misbehaved" not in logs + run.log("bootstrap")


def test_the_others_go_on_without_a_killed_node_and_a_killed_bootstrap_peer(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 8, nodes=3, rounds=12) as run:
        run.wait_round("node-1", 1)
        run.supervisor("node-1").kill()
        run.supervisor("bootstrap").kill()
        assert_all_gone(run.folder / "node-1", 8)
        assert run.process.wait(90) == 0, run.stderr
        summary = run.summary()
    assert summary["ended"] == ["bootstrap: killed by SIGKILL", "node-1: killed by SIGKILL"]
    assert [node["name"] for node in summary["nodes"]] == ["node-2", "node-3"]
    assert [node["round"] for node in summary["nodes"]] == [12, 12]
    assert summary["identical"] is True


def test_a_swarm_without_a_node_left_says_so(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 4, nodes=1) as run:
        run.wait_round("node-1", 1)
        run.supervisor("node-1").kill()
        assert run.process.wait(20) == 2
        assert run.stderr == "gossamer: node-1 ended, and no node is left: killed by SIGKILL\n"
        assert_all_gone(tmp_path, 5)


def test_a_supervisor_killed_while_its_trainer_starts_leaves_no_orphan(tmp_path: Path) -> None:
    """The trainer needs seconds to import torch, and then waits for a daemon that is gone."""
    with SwarmRun(tmp_path, nodes=1) as run:
        wait_for(lambda: run.find("node-1", "trainer"), 30, "a trainer process")
        run.supervisor("node-1").kill()
        assert_all_gone(run.folder / "node-1", 30)  # it sees that as soon as torch is there


def test_a_killed_swarm_takes_everything_with_it(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 4, nodes=2) as run:
        run.wait_round("node-2", 1)
        run.process.kill()
        run.process.wait(5)
        assert_all_gone(tmp_path, 6)
