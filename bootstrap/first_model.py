"""Makes sure that a swarm's first node has a model to begin with."""

import subprocess
from pathlib import Path

from gossamer.bootstrap import genesis_file
from gossamer.models.registry import task_names
from gossamer.models.task_file import is_own_name
from gossamer.node import exit_status
from gossamer.node.lifeline import Child
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.home import Home
from gossamer.node.storage.recordstore import RecordStore
from gossamer.node.training import genesis
from gossamer.protocol.errors import ConfigError, DiskFullError
from gossamer.protocol.manifest import Manifest

END_S = 1.0
"""How long the process that builds a model may take to end, once it has closed its output or is told to
end."""


def _has_snapshot(home: Home, manifest: Manifest) -> bool:
    """Whether a folder holds a later snapshot than genesis; changes nothing in it. Raises StorageError."""
    if not home.ledger_path.exists():
        return False
    store = RecordStore(home.ledger_path, manifest.swarm_id, read_only=True)
    try:
        return any(claim.round > 0 for claim in store.load_history().claims)
    finally:
        store.close()


def ensure_genesis(home: Home, manifest: Manifest, manifest_path: Path) -> None:
    """Put Phi_0 into the folder if it is not there: from the file beside the manifest, or from the seed.

    A folder that holds a later snapshot no longer needs it. Raises StorageError, or ConfigError with an
    explanation.
    """
    chunks = ChunkStore(home.chunks_path)
    if _has_snapshot(home, manifest) or genesis.is_stored(manifest, chunks):
        return
    file = genesis_file.beside(manifest_path)
    if file.exists():
        genesis.store(genesis_file.read(manifest, file), chunks, home.chunks_path)
    elif manifest.task.name in task_names():
        _rebuild(home)
    else:
        raise _nobody_has_them(manifest, file)


def check_genesis(home: Home, manifest: Manifest, manifest_path: Path) -> str:
    """Say where `ensure_genesis` would find Phi_0, and write nothing. Raises the same errors."""
    if home.chunks_path.is_dir():
        chunks = ChunkStore(home.chunks_path, read_only=True)
        if _has_snapshot(home, manifest) or genesis.is_stored(manifest, chunks):
            return "the initial model is in the folder"
    file = genesis_file.beside(manifest_path)
    if file.exists():
        genesis_file.read(manifest, file)
        return f"the initial parameters are in {file}"
    if manifest.task.name in task_names():
        genesis.rebuilt(manifest)
        return "the initial parameters follow from the manifest's seed"
    raise _nobody_has_them(manifest, file)


def _nobody_has_them(manifest: Manifest, file: Path) -> ConfigError:
    if is_own_name(manifest.task.name):
        return ConfigError(
            f"there is no {file}, which gossamer init wrote with the manifest and which holds the swarm's"
            " initial parameters: put it there, or join a node that has them (--join)"
        )
    return ConfigError(
        f"swarm {manifest.swarm.name!r} trains {manifest.task.name!r}, a script of its own, and only that"
        " can build its initial parameters: found it with Peer.attach in that script, then join it (--join)"
    )


def _rebuild(home: Home) -> None:
    """Rebuild Phi_0 in a process that may import torch, and ends with this one. Raises ConfigError with that
    process's own explanation, or DiskFullError."""
    child = Child(
        "gossamer.node.training.genesis", [str(home.root)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.process.stderr is not None
    try:
        with child.process.stderr as stream:
            said = stream.read().decode(errors="replace")
    except BaseException:  # Ctrl-C
        child.terminate()
        raise
    finally:
        status = child.end(END_S)
    if status:
        lines = said.strip().splitlines() or ["cannot build the initial parameters"]
        kind = DiskFullError if status == exit_status.DISK_FULL else ConfigError
        raise kind(lines[-1].removeprefix("gossamer: "))
