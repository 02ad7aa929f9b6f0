"""Mistakes that come to light only once a node runs: one clear line, exit status 2, and it stays stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap import manifests
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home, manifest_of
from tests.net.processes import BootstrapPeer, gossamer
from tests.node.chunkfiles import file_of

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A folder with a manifest and Phi_0, as `gossamer bootstrap` makes it; the manifest is beside it."""
    manifest, phi = manifests.create(
        name="m",
        task="text",
        options={"preset": "tiny"},
        codec="int4",
        every_steps=4,
        every_seconds=0.0,
        fragments=1,
        seed=0,
    )
    manifests.write(manifest, tmp_path / "m.toml")
    home = Home(tmp_path / "d")
    home.create()
    home.adopt(manifest)
    snapshots.store(phi, ChunkStore(home.chunks_path))
    return home


def bootstrap(home: Home) -> tuple[int, list[str]]:
    """Exit status and the errors said."""
    done = gossamer(
        "bootstrap", home.root.parent / "m.toml", "--dir", home.root, "--listen", "127.0.0.1:0", timeout=40
    )
    return done.returncode, errors_in(done.stderr)


def errors_in(stderr: str) -> list[str]:
    """The lines that say what is wrong: the command's own, or its daemon's or trainer's."""
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if line.startswith("gossamer: ") or " error " in line]


def test_a_damaged_database(home: Home) -> None:
    home.ledger_path.write_bytes(b"this is no database" * 500)
    status, lines = bootstrap(home)
    assert status == 2
    assert len(lines) == 1 and f"cannot use the database {home.ledger_path}" in lines[0]
    assert home.ledger_path.read_bytes().startswith(b"this is no"), "left for a person to look at"


@pytest.mark.parametrize("which", ["the index", "a chunk"])
def test_a_damaged_chunk_of_the_first_model_is_rebuilt(home: Home, which: str) -> None:
    root = manifest_of(home).genesis.root
    chunks = ChunkStore(home.chunks_path, read_only=True)
    path = file_of(chunks, chunks.get(root)[:32] if which == "a chunk" else root)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    peer = BootstrapPeer(home.root.parent / "m.toml", home.root)
    try:
        peer.wait_listening()
        assert path.read_bytes() == sound
    finally:
        assert peer.stop() == 0


def test_joining_the_wrong_swarm(home: Home, tmp_path: Path) -> None:
    peer = BootstrapPeer(home.root.parent / "m.toml", home.root)
    try:
        address = peer.wait_listening()
        new = tmp_path / "new"
        done = gossamer("node", "--join", address, "--swarm-id", "ab" * 32, "--dir", new)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert manifest_of(home).swarm_id.hex()[:12] in done.stderr
        assert not new.exists(), "nothing half-written"
    finally:
        peer.stop()
