"""Tasks in files of somebody's own on real nodes: what their mistakes do, and who needs their code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.own_tasks import GOOD, write_task
from tests.net.processes import (
    BootstrapPeer,
    Node,
    assert_all_gone,
    gossamer,
    processes_naming,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LOSS = "return (model(inputs) - targets).square().mean()"


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A folder; whatever still runs in it afterwards is ended."""
    yield tmp_path
    for process in processes_naming(tmp_path):
        process.kill()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bootstrap peer of a swarm that trains `own_line.py`; its machine has neither torch nor that file."""
    folder = tmp_path_factory.mktemp("boot")
    text = write_task(folder)
    done = gossamer("init", folder / "my.toml", "--task", text, "--every-steps", 5, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder / "own_line.py").unlink()
    (folder / "bare").mkdir()
    (folder / "bare" / "torch.py").write_text("raise ImportError('there is no torch on this machine')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "bare"), prepend=os.pathsep)
        peer = BootstrapPeer(folder / "my.toml", folder / "d")
    try:
        yield peer.wait_listening()
    finally:
        assert peer.stop() == 0
    assert_all_gone(folder, 8)


def test_two_nodes_train_and_a_restart_needs_no_flag(base: Path, address: str) -> None:
    first = Node(base, "one", "--join", address, "--task", write_task(base))
    (base / "elsewhere").mkdir()
    moved = write_task(base / "elsewhere", "# HERE", "# another comment")
    second = Node(base, "two", "--join", address, "--task", moved)
    for node in (first, second):
        node.wait_published(4)
    assert "is not the file that the manifest was written with" in second.log
    assert "is not the file" not in first.log
    assert first.stop() == 0
    again = Node(base, "one", "--rounds", 1)
    wait_for(lambda: "resumed after" in again.log, 120, "training goes on")
    assert second.stop() == 0 and again.stop() == 0
    for node in (first, second, again):
        assert node.errors() == []


def test_without_its_file_a_node_says_what_to_type(base: Path, address: str) -> None:
    done = gossamer("node", "--join", address, "--dir", base / "new")
    assert done.returncode == 2
    assert "give it with --task own_line.py:Line" in done.stderr.splitlines()[-1]


def test_a_local_swarm(base: Path) -> None:
    done = gossamer(
        *("swarm", "--task", write_task(base), "--option", "width=4", "--nodes", 2, "--rounds", 6),
        *("--every-steps", 5, "--dir", base / "swarm", "--json", base / "summary.json"),
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert GOOD.encode() not in (base / "swarm" / "swarm.toml").read_bytes()
