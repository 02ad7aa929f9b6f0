"""Using what a swarm trains while it trains: exports and text, from the folders of running nodes."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gossamer.node.daemon.phi import restore, snapshots
from gossamer.node.daemon.phi.restore import averaged
from gossamer.node.daemon.phi.state import PhiState
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.exports.export import export
from gossamer.protocol.errors import StorageError
from gossamer.protocol.fixedpoint import to_fixed
from gossamer.protocol.manifest import Manifest
from tests.net.nodes import LocalNode, LocalNodes, small_manifest
from tests.net.processes import gossamer, wait_for
from tests.node.folders import Folder, text_model

pytestmark = pytest.mark.slow


def digest_of(path: Path, manifest: Manifest) -> str:
    """Of the Phi that a file holds."""
    tensors = load_file(path)
    phi = np.empty(manifest.plan().numel, np.int32)
    for fragment in manifest.plan().fragments:
        for slot in fragment.slots:
            values = to_fixed(tensors[slot.spec.name]).reshape(-1)
            phi[fragment.offset :][slot.span] = values[slot.strip]
    return snapshots.digest(phi).hex()


async def test_exports_while_the_daemons_seal_and_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round is sealed, and history kept as short as it can be."""
    history = {"seal_after": 1, "snapshot_every": 1, "retain": 2}
    manifest, phi = small_manifest(1 << 16, history=history, pace={"every_steps": 8})
    overtaken: list[LocalNode] = []

    def claims_of(node: LocalNode) -> tuple[Any, ...]:
        store = RecordStore(node.home.ledger_path, manifest.swarm_id, read_only=True)
        try:
            return store.load_history().claims
        finally:
            store.close()

    def restores_late(node: LocalNode) -> Callable[..., Any]:
        """The first time, only once the daemon has dropped the snapshot that was to be read."""

        def restored(manifest: Manifest, chunks: ChunkStore, history: Any, *others: Any, **own: Any) -> Any:
            if node not in overtaken:
                overtaken.append(node)
                wait_for(lambda: history.claims[0] not in claims_of(node), 60, "it moves on")
            return restore_state(manifest, chunks, history, *others, **own)

        return restored

    def export_one(node: LocalNode, *, sealed: bool = False, live: bool = True) -> dict[str, str]:
        out = tmp_path / f"{node.name}.safetensors"
        done = export(node.home, out, sealed=sealed, live=live, force=True)
        assert (digest_of(out, manifest) == done.facts["phi_digest"]) is live
        return dict(done.facts)

    restore_state = restore.restore_state
    async with LocalNodes(tmp_path, manifest, phi) as swarm:
        nodes = await swarm.grow(3)
        await swarm.until(lambda: all(node.status["closed_round"] > 0 for node in nodes), 60, "all forget")
        for node, sealed in zip(nodes, (False, True, False), strict=True):
            before = await asyncio.to_thread(export_one, node, sealed=sealed)
            with monkeypatch.context() as patched:
                patched.setattr(restore, "restore_state", restores_late(node))
                after = await asyncio.to_thread(export_one, node, sealed=sealed)
            assert int(before["round"]) < int(after["round"])
            assert int(before["tokens"]) < int(after["tokens"])
        assert len(overtaken) == 3
        await swarm.agree(closed=True)
        expected = nodes[0].status["phi_digest"]
        for live in (True, False):
            exported = [await asyncio.to_thread(export_one, node, live=live) for node in nodes]
            assert {facts["phi_digest"] for facts in exported} == {expected}
            assert len({(tmp_path / f"{node.name}.safetensors").read_bytes() for node in nodes}) == 1
        nodes[1].signal(signal.SIGKILL)
        await asyncio.to_thread(nodes[1].process.wait, 10)
        assert (await asyncio.to_thread(export_one, nodes[1]))["phi_digest"] == expected
        swarm.assert_nobody_blamed()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


async def test_the_average_is_the_same_everywhere_also_after_a_join_and_a_kill(tmp_path: Path) -> None:
    history = {"seal_after": 2, "snapshot_every": 4, "retain": 64}
    async with LocalNodes(tmp_path, *small_manifest(history=history)) as swarm:
        nodes = await swarm.grow(3, step_s=0.2)

        async def all_past(more: int) -> None:
            start = max(node.status["round"] for node in nodes)
            passed = lambda: all(node.status.get("round", 0) >= start + more for node in nodes)  # noqa: E731
            await swarm.until(passed, 120, f"{more} more rounds")

        await swarm.until(lambda: (nodes[0].status["sealed_round"] or 0) >= 16, 120, "snapshots of a mean")
        joiner = await swarm.add("n3", ["n0"])
        joiner.train(0.2)
        nodes.append(joiner)
        killed = nodes[1]
        killed.signal(signal.SIGKILL)
        assert killed.child is not None
        await asyncio.to_thread(killed.child.end, 60)
        killed.status = {}
        killed.start()
        await swarm.until(lambda: all(node.status.get("round") for node in nodes), 120, "all train")
        await all_past(12)
        await swarm.agree(120, closed=True)
        assert re.search(r"starting from the swarm's model of round [1-9]", joiner.log)

        def found() -> list[tuple[Manifest, PhiState, np.ndarray]] | None:
            with suppress(StorageError):  # the joiner's sums are on their way
                return [averaged(node.home) for node in nodes]
            return None

        for _, state, mean in (all_found := await asyncio.to_thread(wait_for, found, 60, "the sums")):
            assert snapshots.digest(state.phi).hex() == nodes[0].status["phi_digest"]
            assert np.array_equal(mean, all_found[0][2]) and not np.array_equal(mean, state.phi)
        swarm.assert_nobody_blamed()


GENERATES = """
ids = tokenizer("def ", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=True)[0]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node's, with the first model of a text swarm."""
    return Folder(tmp_path_factory.mktemp("use") / "node", *text_model()).home.root


def test_the_block_in_the_documentation(folder: Path, tmp_path: Path) -> None:
    """It loads an export with `transformers`, which writes text with it."""
    pytest.importorskip("transformers")
    page = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "demo-model" in block)
    assert gossamer("export", "--dir", folder, tmp_path / "demo-model").returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", block + GENERATES], cwd=tmp_path, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"def ") and len(done.stdout.decode()) > 20
