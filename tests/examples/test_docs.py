"""Every Python block of `docs/your-model.md` runs as it stands, but for ports, addresses and folders."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gossamer.bootstrap import manifests
from gossamer.models import trial
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import DataStream
from gossamer.models.task_file import kind_of
from gossamer.node.home import Home
from gossamer.node.trainer.peer import Peer
from tests.net.processes import assert_all_gone, processes_naming, wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-model.md"

FOUNDER = """
    from gossamer.node.trainer.peer import Peer

    with Peer.attach(model, optimizer, manifest="swarm.toml", listen="127.0.0.1:0", folder="founder") as peer:
        while not peer.should_stop:
            loss = nn.functional.mse_loss(model(inputs[:32]), dataset.tensors[1][:32])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peer.step(tokens=32, loss=loss)
"""


def blocks() -> list[tuple[str, str]]:
    """Info string and text of each fenced block."""
    return re.findall(r"^```(.*?)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def environment(base: Path) -> dict[str, str]:
    return {**os.environ, "GOSSAMER_HOME": str(base / "home"), "OMP_NUM_THREADS": "1"}


def run(base: Path, text: str, *runner: str) -> str:
    """Run a script to its end; returns what it printed."""
    script = base / "script.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, *runner, str(script)],
        cwd=base,
        env=environment(base),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def founder(base: Path, beginning: str) -> Iterator[str]:
    """A node that others can join; gives its address with its id."""
    script = base / "founder.py"
    script.write_text(beginning + textwrap.dedent(FOUNDER))
    process = subprocess.Popen([sys.executable, str(script)], cwd=base, env=environment(base))
    try:

        def contact() -> str | None:
            assert process.poll() is None
            facts = Home(base / "founder").read_daemon()
            return f"gossamer://{facts['node_id']}@{facts['address']}" if facts else None

        yield str(wait_for(contact, 60, "the founder listening"))
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_the_page_has_nothing_that_is_not_run() -> None:
    assert {info for info, _ in blocks()} == {"python", "python torchrun", "python task", "python jax"}


@pytest.mark.parametrize(
    "function", [Peer.attach, Peer.finish, Peer.shard, manifests.describe, manifests.write]
)
def test_the_page_has_every_argument_that_goes_by_its_name(function: Callable[..., object]) -> None:
    text = PAGE.read_text()
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert names
    assert [name for name in names if f"`{name}`" not in text and f"{name}=" not in text] == []


def test_nodes_that_run_the_page_begin_alike_and_draw_other_batches(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(next(text for info, text in blocks() if info == "python"))
    nodes = []
    with torch.random.fork_rng():
        for _ in range(2):
            names = runpy.run_path(str(script))
            batch, _ = next(iter(names["loader"]))
            nodes.append((list(names["model"].parameters()), names["inputs"], batch))
    (parameters, inputs, batch), (others, other_inputs, other_batch) = nodes
    assert all(map(torch.equal, parameters, others))
    assert torch.equal(inputs, other_inputs)
    assert not torch.equal(batch, other_batch)


def test_the_task_of_the_page_is_one(task_folder: Path) -> None:
    (text,) = [text for info, text in blocks() if info == "python task"]
    (task_folder / "my_task.py").write_text(text)
    task = kind_of(f"{task_folder / 'my_task.py'}:MyTask").task({"width": 64})
    model = task.build_model(0)
    before = task.evaluate(model)
    trial.try_step(task, trial.build_again(task, 0, model), next(task.batches(trial.STREAM)))
    optimizer, batches = (
        InnerOptimizer(task.build_optimizer(model)),
        task.batches(DataStream(seed=0, node_id=b"x")),
    )
    for _ in range(50):
        task.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model) < before
    runs = (task.batches(DataStream(seed=0, node_id=b"x", skip_batches=skip)) for skip in (0, 5000))
    first, resumed = (next(batches)[0] for batches in runs)
    assert not torch.equal(first, resumed)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="JAX and Optax are not installed")
def test_the_block_in_jax_runs(tmp_path: Path) -> None:
    (text,) = [text for info, text in blocks() if info == "python jax"]
    run(tmp_path, text.replace('folder="jax"', 'folder="jax", listen="127.0.0.1:0"'))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_runs(tmp_path: Path) -> None:
    plain = [text for info, text in blocks() if info == "python"]
    (ranks,) = [text for info, text in blocks() if info == "python torchrun"]
    data, describe, *rest = plain
    try:
        run(tmp_path, data + describe)
        with founder(tmp_path, data) as contact:
            text = "\n".join([data, *rest])
            assert "[::]:7700" in text and "gossamer://NODE_ID@host:7700" in text
            text = text.replace("[::]:7700", "127.0.0.1:0")
            text = text.replace("gossamer://NODE_ID@host:7700", contact)
            said = run(tmp_path, text)
        assert "others join with gossamer://" in said
        assert "took over version" in said
        assert "'swarm_tokens'" in said
        assert (tmp_path / "model.pt").exists()
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        head = data + "from gossamer.node.trainer.peer import Peer\n"
        run(tmp_path, head + ranks, *torchrun, *rendezvous)
        assert_all_gone(tmp_path, 8)
    finally:
        for process in processes_naming(tmp_path):
            process.kill()
