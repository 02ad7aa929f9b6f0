"""`make chaos`, and what its storm leaves out: signals at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.processes import NodeProcess, stop_all
from tests.net.processes import assert_all_gone, processes_naming, write_text
from tests.tools.chaos import kill

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KINDS = ["killed", "returned", "joined", "split", "healed", "bootstrap_died"]


def storm(tmp_path: Path, *args: object) -> subprocess.CompletedProcess[str]:
    text = write_text(tmp_path / "text.txt")
    command = [sys.executable, "-m", "tests.tools.chaos", "--data", text, "--dir", tmp_path / "swarm", *args]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_storm_passes_over_a_small_swarm(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = storm(tmp_path, "--every-steps", 4, "--nodes", 3, "--rounds", 24, "--json", result)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_all_gone(tmp_path, 2)
    summary = json.loads(result.read_text())
    assert summary["ok"] is True and summary["identical"] is True
    assert [node["name"] for node in summary["nodes"]] == ["node-1", "node-2", "node-3", "node-4"]
    assert len({node["digest"] for node in summary["nodes"]}) == 1
    assert [node["round"] for node in summary["nodes"]] == [24] * 4
    faults = summary["faults"]
    assert [fault["kind"] for fault in faults] == KINDS
    assert [fault["node"] for fault in faults] == ["node-2", "node-2", "node-4", None, None, "bootstrap"]
    for fault in faults:
        assert 0 < fault["recovered_s"] <= 40, fault
    logs = {path.stem: path.read_text() for path in (tmp_path / "swarm").glob("*.log")}
    assert logs.keys() == {"bootstrap", "node-1", "node-2", "node-3", "node-4"}
    for name, log in logs.items():
        assert "Traceback" not in log, name
        assert "are void" not in log, "an honest node never equivocates"
        assert "misbehaved" not in log, log
    assert "resumed with" in logs["node-2"]


def test_a_storm_over_one_node_alone_is_refused(tmp_path: Path) -> None:
    done = storm(tmp_path, "--nodes", 1)
    assert done.returncode == 2 and "--nodes 2" in done.stderr


ROUNDS = 16
FAULTS = 10


async def test_kills_and_stops_at_random_moments_cost_no_agreement(tmp_path: Path, seed: int) -> None:
    """SIGKILL, and SIGSTOP for up to 15 s, to daemons, trainers and supervisors of three nodes.

    Whole nodes that are killed come back as a person would bring them: by the same command.
    """
    draw = random.Random(seed)
    text = write_text(tmp_path / "text.txt")
    manifest, _ = manifests.create(
        name="m",
        task="text",
        options={"preset": "tiny", "batch_size": 2, "context": 32, "eval_batches": 1},
        codec="int4",
        every_steps=12,
        every_seconds=0.0,
        fragments=1,
        seed=0,
    )
    path = tmp_path / "m.toml"
    manifests.write(manifest, path)
    boot_args = ["bootstrap", str(path), "--listen", "127.0.0.1:0", "--dir", str(tmp_path / "boot")]
    boot = NodeProcess("boot", tmp_path / "boot", boot_args)
    nodes = []
    try:
        boot.start()
        join = await boot.address()
        for name in ("a", "b", "c"):
            args = ["node", "--dir", str(tmp_path / name), "--name", name, "--listen", "127.0.0.1:0"]
            args += ["--join", join, "--data", str(text), "--threads", "1", "--device", "cpu"]
            args += ["--rounds", str(ROUNDS), "--evaluate-every", "0"]
            nodes.append(NodeProcess(name, tmp_path / name, args))
            nodes[-1].start()
        await settle(nodes, lambda: all(n.status and n.status["round"] >= 1 for n in nodes), 60, "all train")
        for _ in range(FAULTS):
            await asyncio.sleep(draw.uniform(0, 2.5))  # the random moment; nothing is awaited here
            await strike(nodes, draw)
        await settle(nodes, lambda: all_done(nodes), 150, "all finished and identical")
        for process in (boot, *nodes):
            log = process.log_path.read_text()
            assert "are void" not in log, "an honest node never equivocates"
            assert "misbehaved" not in log, log
            assert "Traceback" not in log, log
    finally:
        for stopped in processes_naming(tmp_path):
            stopped.resume()
        await asyncio.to_thread(stop_all, [boot, *nodes])


async def strike(nodes: list[NodeProcess], draw: random.Random) -> None:
    node = draw.choice(nodes)
    role = draw.choice(
        ["gossamer.node.daemon.daemon", "gossamer.node.trainer.trainer", "gossamer.bootstrap.cli.main"]
    )
    assert node.child is not None
    whole = psutil.Process(node.child.pid)
    found = []
    for process in (whole, *whole.children()):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie
            found += [process] if role in process.cmdline() else []
    if not found:
        return  # it is being started again just now
    victim = found[0]
    if draw.random() < 0.5:
        victim.suspend()
        await asyncio.sleep(draw.choice([0.5, 3, 15]))
        victim.resume()
    elif victim == whole:
        kill(node)
        node.start()
    else:
        victim.kill()


def all_done(nodes: list[NodeProcess]) -> bool:
    statuses = [node.status or {} for node in nodes]
    same = {(s.get("merged_digest"), s.get("phi_digest"), s.get("ledger_digest")) for s in statuses}
    finished = all(s.get("state") == "finished" and not s["payloads_missing"] for s in statuses)
    return finished and len(same) == 1 and (None, None, None) not in same


async def settle(nodes: list[NodeProcess], condition: object, timeout: float, what: str) -> None:
    assert callable(condition)
    try:
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.gather(*(node.ask(digest=True, plaintext=False) for node in nodes))
                await asyncio.sleep(0.25)
    except TimeoutError:
        states = [(n.name, (n.status or {}).get("state"), (n.status or {}).get("round")) for n in nodes]
        words = [f"{n.name}: {n.last_line()}" for n in nodes]
        raise AssertionError(f"not within {timeout:.0f} s: {what}; {states}; {words}") from None
