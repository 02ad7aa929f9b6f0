"""Tasks in files of somebody's own on real nodes: what their mistakes do, and who needs their code."""

from __future__ import annotations

import os
import re
import shutil
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# HERE", "if", "own_line.py:10, importing it: SyntaxError: invalid syntax"),
        (LOSS, "raise KeyError('x')", "own_line.py:39, in "),
        ("return len(batch[0])", "return 0", "own_line.py: Line.tokens returned 0: return a whole number"),
        (
            "Linear(8, self.options.width)",
            "Linear(9, self.options.width)",
            "tensor '0.weight' has shape [8, 9]",
        ),
    ],
)
def test_a_mistake_before_the_first_step_stops_the_node(
    base: Path, address: str, old: str, new: str, message: str
) -> None:
    node = Node(base, "wrong", "--join", address, "--task", write_task(base, old, new))
    assert node.process.wait(120) == 2
    (said,) = node.errors()
    assert message in said


def test_a_mistake_later_is_said_each_time_and_tried_again(base: Path, address: str) -> None:
    """As when a file cannot be read for a while."""
    down = base / "down"
    text = write_task(base, LOSS, f"import pathlib; assert not pathlib.Path({str(down)!r}).exists(); {LOSS}")
    node = Node(base, "late", "--join", address, "--task", text)
    node.wait_published(2)
    down.touch()
    wait_for(lambda: node.log.count("starting it again") == 2, 120, "the trainer ended, and the next one too")
    assert len(node.errors()) == 2 and all("own_line.py:39, in " in error for error in node.errors())
    down.unlink()
    node.wait_published(node.status()["round"] + 2)
    assert node.stop() == 0
    node.errors()


def test_a_local_swarm_says_what_is_wrong_with_a_task_and_ends(base: Path) -> None:
    count = "Line.calls = getattr(Line, 'calls', 0) + 1; assert Line.calls < 5, 'my bug'"
    task = write_task(base, LOSS, f"{count}; {LOSS}")
    done = gossamer("swarm", "--nodes", 1, "--rounds", 3, "--every-steps", 50, "--task", task, timeout=120)
    assert done.returncode == 2
    assert done.stdout.count("AssertionError: my bug") == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("gossamer: node-1: own_line.py:39, in ")
    (log,) = re.findall("; see (.*/node-1.log)", said)
    assert "my bug" in Path(log).read_text()
    shutil.rmtree(Path(log).parent)
    assert_all_gone(Path(log).parent, 8)


def test_a_batch_that_makes_training_diverge_costs_a_window(base: Path, address: str) -> None:
    """Its data is not met again, and if all that comes next is like it, the node stops."""
    bad = base / "bad"
    spoilt = f"import pathlib; bad = pathlib.Path({str(bad)!r}).exists(); "
    loss = f"{spoilt}return (model(inputs) - targets).square().mean() * (float('nan') if bad else 1.0)"
    node = Node(base, "hurt", "--join", address, "--task", write_task(base, LOSS, loss))
    node.wait_published(2)
    steps = node.status()["trainer"]["inner_steps"]
    bad.touch()
    wait_for(lambda: "back to the swarm's model" in node.log, 60, "training diverges")
    bad.unlink()
    wait_for(lambda: "resumed after" in node.log, 60, "the trainer is started again")
    (resumed,) = re.findall(r"resumed after (\d+) inner steps", node.log)
    assert int(resumed) > steps
    node.wait_published(node.status()["round"] + 3)
    assert node.errors() == []
    bad.touch()
    assert node.process.wait(60) == 2
    (said,) = node.errors()
    assert "is not finite or beyond 64, the limit of a swarm's numbers: lower the" in said


def test_a_local_swarm(base: Path) -> None:
    done = gossamer(
        *("swarm", "--task", write_task(base), "--option", "width=4", "--nodes", 2, "--rounds", 6),
        *("--every-steps", 5, "--dir", base / "swarm", "--json", base / "summary.json"),
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sample" not in done.stderr
    assert GOOD.encode() not in (base / "swarm" / "swarm.toml").read_bytes()
