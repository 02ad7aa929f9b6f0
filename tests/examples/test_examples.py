"""The scripts in `examples/`: two processes of each join one swarm, train, and leave in good order."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.records import Delta
from tests.net.processes import (
    BootstrapPeer,
    Node,
    assert_all_gone,
    gossamer,
    gossamer_status,
    processes_naming,
    wait_for,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240
"""Enough where other tests, or people, use the same two cores: what is waited for is work, not time."""


class Script:
    """One run of an example."""

    def __init__(self, base: Path, script: str, name: str, *args: str, runner: Sequence[str] = ()) -> None:
        self.folder = base / name
        self.log = base / f"{name}.log"
        command = [str(EXAMPLES / script), "--dir", str(self.folder), "--listen", "127.0.0.1:0", *args]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *runner, *command],
                cwd=base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    def has_said(self, text: str) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return text in self.log.read_text()

    def address(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        facts = Home(self.folder).read_daemon()
        return str(facts["address"]) if facts else None

    def loss(self) -> float:
        """Of the last window that it has published; infinite before."""
        address = self.address()
        trainer = ((gossamer_status(address) if address else None) or {}).get("trainer") or {}
        return float(trainer.get("loss") or math.inf)

    def end(self) -> str:
        """SIGTERM; returns what it has said."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(PATIENCE_S)
        said = self.log.read_text()
        assert status == 0, said
        assert "Traceback" not in said
        return said


@contextmanager
def two_of(base: Path, script: str, *args: str) -> Iterator[tuple[Script, Script]]:
    """A founder and one who joined it."""
    scripts = [Script(base, script, "one", *args)]
    try:
        address = str(wait_for(scripts[0].address, PATIENCE_S, "the founder's daemon listening"))
        scripts.append(Script(base, script, "two", "--join", address, *args))
        yield scripts[0], scripts[1]
        assert_all_gone(base, 5)
    finally:
        for process in processes_naming(base):
            process.kill()
        for one in scripts:
            one.process.wait(10)


def assert_identical(one: Script, two: Script) -> None:
    """As anybody can check while they train."""
    done = gossamer("verify", str(one.address()), str(two.address()), "--wait", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: 2 replicas" in done.stdout


def test_the_plain_loop(tmp_path: Path) -> None:
    with two_of(tmp_path, "plain_loop.py") as (one, two):
        for script in (one, two):
            wait_for(lambda script=script: script.has_said("round "), PATIENCE_S, "a round published")
        assert_identical(one, two)
        for said in (one.end(), two.end()):
            assert "sum of parameters" in said


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param("llama_trainer.py", [], marks=needs_transformers),
        pytest.param("llama_trainer.py", ["--experts", "8"], marks=needs_transformers),
        pytest.param("lightning_module.py", [], marks=needs_lightning),
    ],
)
def test_the_trainers_of_frameworks_train_one_model(tmp_path: Path, script: str, options: list[str]) -> None:
    with two_of(tmp_path, script, *options) as (one, two):
        for node in (one, two):
            # Before training it is 5.5 nats a byte and more.
            wait_for(lambda node=node: node.loss() < 4, PATIENCE_S, "a node that has learnt")
        assert_identical(one, two)
        said = [one.end(), two.end()]
        if script == "llama_trainer.py":  # Lightning ends at SIGTERM by itself
            assert all(after < before - 1 for before, after in map(held_out, said))
            assert (one.folder / "pretrained" / "tokenizer_config.json").exists()


RANKS = 2
ROUNDS = 16
"""Each of the 4 fragments four times."""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]


@pytest.mark.parametrize(
    ("script", "options", "runner"),
    [
        pytest.param(
            "llama_trainer.py", [], [*TORCHRUN, "--rdzv-endpoint=localhost:0"], marks=needs_transformers
        ),
        pytest.param("lightning_module.py", ["--devices", str(RANKS)], [], marks=needs_lightning),
    ],
)
def test_the_ranks_of_a_frameworks_trainer_are_one_node(
    tmp_path: Path, script: str, options: list[str], runner: list[str]
) -> None:
    try:
        node = Script(tmp_path, script, "one", "--rounds", str(ROUNDS), *options, runner=runner)
        assert node.process.wait(2 * PATIENCE_S) == 0, node.log.read_text()
        losses = held_out_by_each(node.log.read_text())
        assert len(losses) == RANKS and losses[0] == losses[1]
        averages = re.findall(r"of the averaged model: ([0-9.]+)", node.log.read_text())
        assert len(averages) == RANKS and len({*averages}) == 1, "all ranks evaluate the average"
        assert losses[0][1] < losses[0][0] - 0.5
        deltas = published(node.folder)
        assert [delta.round for delta in deltas] == list(range(1, ROUNDS + 1))
        micro_batches = {"llama_trainer.py": 8, "lightning_module.py": 16}[script] * 2
        assert {delta.body.tokens // delta.body.steps for delta in deltas} == {RANKS * micro_batches * 64}
        assert_all_gone(tmp_path, 8)
    finally:
        for process in processes_naming(tmp_path):
            process.kill()


def held_out(said: str) -> tuple[float, float]:
    """The held-out loss before and after."""
    (only,) = held_out_by_each(said)
    return only


def held_out_by_each(said: str) -> list[tuple[float, float]]:
    """The same, as every rank says it."""
    found = re.findall(r"held-out loss ([0-9.]+) -> ([0-9.]+)", said)
    return [(float(before), float(after)) for before, after in found]


def published(folder: Path) -> list[Delta]:
    """The deltas in a node's folder, round by round."""
    home = Home(folder)
    manifest = manifest_of(home)
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    try:
        return sorted(store.load(manifest.plan()), key=lambda delta: delta.round)
    finally:
        store.close()


@needs_sklearn
def test_the_digits_are_learnt(tmp_path: Path) -> None:
    with two_of(tmp_path, "digits.py") as (one, two):
        wait_for(lambda: two.has_said("accuracy before"), PATIENCE_S, "the second node has begun")
        wait_for(lambda: (node_round(two) or 0) >= 6, PATIENCE_S, "the second node in a later round")
        assert_identical(one, two)
        for said in (one.end(), two.end()):
            assert float(said.rsplit("accuracy after", 1)[1].split(": ")[1]) > 0.8
        first = float(one.log.read_text().split("accuracy before: ")[1].split()[0])
        assert first < 0.5, "it had to be learnt"


def node_round(script: Script) -> int | None:
    address = script.address()
    status = gossamer_status(address) if address else None
    return int(status["round"]) if status else None


def finished(script: Script) -> str:
    """What a script has said that ended at its last round."""
    assert script.process.wait(PATIENCE_S) == 0, script.log.read_text()
    return script.log.read_text()


@needs_sklearn
@needs_lightning
def test_nodes_agree_on_the_accuracy_of_a_model_with_batch_norm(tmp_path: Path) -> None:
    with two_of(tmp_path, "vision.py", "--rounds", "160") as scripts:
        found = [re.findall(r"[0-9.]+$", finished(script), re.MULTILINE) for script in scripts]
        (after, own, average), second = (list(map(float, one[-3:])) for one in found)
        assert [after, average] == [second[0], second[2]], "with statistics of the same images"
        assert min(after, average) > 0.9 and abs(own - after) < 0.1
    models = [tmp_path / f"{script.folder.name}.safetensors" for script in scripts]
    for script, model in zip(scripts, models, strict=True):
        done = gossamer("export", model, "--dir", script.folder, "--live")
        assert done.returncode == 0, done.stderr
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@needs_transformers
def test_adapters_are_fine_tuned_and_exported(tmp_path: Path) -> None:
    with two_of(tmp_path, "lora.py") as (one, two):
        for node in (one, two):
            wait_for(lambda node=node: (node_round(node) or 0) >= 24, PATIENCE_S, "later rounds")
        assert_identical(one, two)
        for before, after in map(held_out, (one.end(), two.end())):
            assert after < before - 0.2
    done = gossamer("export", tmp_path / "adapter", "--dir", one.folder, "--live")
    assert done.returncode == 0, done.stderr
    loads = (
        "import sys, torch; from peft import PeftModel; from transformers import LlamaForCausalLM;"
        "base = LlamaForCausalLM.from_pretrained('base'); model = PeftModel.from_pretrained(base, 'adapter');"
        "print([float(p.abs().sum()) > 0 for n, p in model.named_parameters() if 'lora_B' in n])"
    )
    command = [sys.executable, "-c", loads]
    loaded = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert loaded.returncode == 0 and "missing" not in loaded.stderr, loaded.stderr
    assert "True" in loaded.stdout and "False" not in loaded.stdout


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="JAX and Optax are not installed")
@needs_sklearn
def test_a_torch_and_a_jax_node_die_and_come_back_and_end_with_the_same_bits(tmp_path: Path) -> None:
    node_of = {"torch": "one", "jax": "two"}

    def started(framework: str, *join: str) -> Script:
        node = Script(tmp_path, "two_frameworks.py", node_of[framework], "--framework", framework, *join)
        wait_for(node.address, PATIENCE_S, "its daemon listening")
        return node

    def trained(node: Script) -> None:
        begun = node_round(node) or 0
        wait_for(lambda: (node_round(node) or 0) >= begun + 16, PATIENCE_S, "800 steps more")

    try:
        torch = started("torch")
        jax = started("jax", "--join", str(torch.address()))
        reached = 0
        for node in (jax, torch):
            trained(node)
            reached = max(reached, node_round(node) or 0)
            node.process.kill()
            node.process.wait(10)
        # They end by the same round: of two that are stopped, one would lack the other's last delta.
        last = ["--rounds", str(reached + 40)]
        torch = started("torch", *last)
        jax = started("jax", *last, "--join", str(torch.address()))
        said = [finished(torch), finished(jax)]
        assert len({text.rsplit("parameters ", 1)[1] for text in said}) == 1, said
        for text in said:
            assert float(text.rsplit("-> ", 1)[1].split()[0]) > 0.85
        assert_all_gone(tmp_path, 8)
    finally:
        for process in processes_naming(tmp_path):
            process.kill()


@needs_sklearn
def test_the_task_of_digits(tmp_path: Path) -> None:
    """As its first lines say: a manifest, a bootstrap peer, and nodes that are told where the task lies."""
    task = f"{EXAMPLES / 'digits_task.py'}:Digits"
    made = gossamer("init", tmp_path / "digits.toml", "--task", task, "--every-steps", 20, timeout=120)
    assert made.returncode == 0, made.stderr
    peer = BootstrapPeer(tmp_path / "digits.toml", tmp_path / "boot")
    try:
        addresses = [peer.wait_listening()]
        options = ["--join", addresses[0], "--task", task, "--rounds", 20]
        nodes = [Node(tmp_path, name, *options) for name in ("one", "two")]
        for node in nodes:
            wait_for(lambda node=node: node.status().get("state") == "finished", 90, "the last round")
            addresses.append(str(node.address()))
        verified = gossamer("verify", *addresses)
        assert verified.returncode == 0 and "identical" in verified.stdout, verified.stdout
        losses = [node.status()["trainer"]["val_loss"] for node in nodes]
        assert max(losses) < 1.5, "it begins at log(10), which is 2.3"
        assert [node.stop() for node in nodes] == [0, 0] and peer.stop() == 0
        assert_all_gone(tmp_path, 5)
    finally:
        for process in processes_naming(tmp_path):
            process.kill()
