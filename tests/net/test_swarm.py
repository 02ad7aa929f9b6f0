"""`gossamer swarm` from end to end, through what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.net.processes import SwarmRun, assert_all_gone, processes_naming, wait_for

NUMBER = (int, float)
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_three_nodes_train_agree_and_leave_nothing_behind(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 6, nodes=3, rounds=5) as run:
        assert run.process.wait(500) == 0, run.stderr
        assert processes_naming(tmp_path) == []
        summary = run.summary()
    assert summary["ok"] is True
    assert summary["identical"] is True
    assert type(summary["swarm_id"]) is str and len(bytes.fromhex(summary["swarm_id"])) == 32
    assert isinstance(summary["wall_s"], NUMBER)
    assert summary["val_loss_end"] < summary["val_loss_start"] - 0.3
    assert len(summary["nodes"]) == 3
    assert len({node["node_id"] for node in summary["nodes"]}) == 3
    assert len({node["digest"] for node in summary["nodes"]}) == 1
    for node in summary["nodes"]:
        assert len(bytes.fromhex(node["node_id"])) == 32
        assert len(bytes.fromhex(node["digest"])) == 32
        assert node["round"] == 5
        for key in ("inner_steps", "tokens", "bytes_sent", "bytes_received", "payload_bytes_sent"):
            assert type(node[key]) is int and node[key] > 0, key
        assert node["bytes_sent"] > node["payload_bytes_sent"]
        assert type(node["val_loss"]) is float
        assert 0 <= node["wait_fraction"] < 1
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_ctrl_c_ends_everything_within_five_seconds(tmp_path: Path) -> None:
    with SwarmRun(tmp_path, "--every-steps", 4) as run:
        run.wait_round("node-1", 2)
        status, seconds = run.interrupt()
        assert status == 130
        assert seconds < 5
        assert_all_gone(tmp_path, 0.5)
    assert "Traceback" not in run.stderr
    for name in ("bootstrap", "node-1", "node-2"):
        assert "Traceback" not in run.log(name)


@pytest.mark.slow
def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path: Path) -> None:
    with SwarmRun(tmp_path) as run:
        wait_for((run.folder / "bootstrap.log").exists, 20, "the bootstrap peer being started")
        status, seconds = run.interrupt()
        assert status == 130
        assert seconds < 5
        assert_all_gone(tmp_path, 0.5)
    assert "Traceback" not in run.stderr
