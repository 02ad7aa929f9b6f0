"""Makes sure that a swarm's first node has a model to begin with."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gossamer.models.registry import task_names
from gossamer.models.task_file import is_own_name
from gossamer.node import processes as exit_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.files import placed, written
from gossamer.node.home import Home
from gossamer.node.processes import Child
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError, DiskFullError, DivergedError, StorageError
from gossamer.protocol.fixedpoint import Ints, to_fixed, to_float
from gossamer.protocol.manifest import Manifest

# --- ``my.genesis.safetensors`` beside ``my.toml``: first parameters that nobody can rebuild from a seed.
#
# These are existing weights, or the first parameters of a custom task, whose code a bootstrap peer need not
# have. The file holds the float32 image of Phi_0, under the model's own names, so that other tools can read
# it
# too. That image is exact, since Phi_0 was rounded from float32: a multiple of 2**-24 below 1 has at most 24
# significant bits, as many as a float32, and a float32 of 1 or more is such a multiple already. The
# manifest's
# digest checks it.

SUFFIX = ".genesis.safetensors"


def beside(manifest_path: Path) -> Path:
    """Where the first parameters of a manifest's swarm lie."""
    return manifest_path.with_suffix(SUFFIX)


def write(manifest: Manifest, phi: Ints, path: Path) -> None:
    """Write Phi_0, int32[numel] in snapshot order. Raises StorageError."""
    with writing(manifest, phi, path):
        pass


@contextmanager
def writing(manifest: Manifest, phi: Ints, path: Path) -> Iterator[None]:
    """As `write`, but the file is put in place only if the block succeeds, which writes the manifest: the two
    belong together."""
    tensors = {
        slot.spec.name: to_float(phi[fragment.offset :][slot.span]).reshape(slot.spec.shape)
        for fragment in manifest.plan().fragments
        for slot in fragment.slots
    }
    try:
        with placed(path) as aside:
            with written(aside) as file:
                file.write(save(tensors, {"format": "pt"}))
            yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def read(manifest: Manifest, path: Path) -> Ints:
    """Read Phi_0, int32[numel] in snapshot order. Raises ConfigError if it is not the manifest's."""
    plan = manifest.plan()
    phi = np.empty(plan.numel, dtype=np.int32)
    try:
        with safe_open(path, framework="numpy") as file:
            for fragment in plan.fragments:
                for slot in fragment.slots:
                    values = file.get_tensor(slot.spec.name)
                    if values.shape != slot.spec.shape:
                        raise ConfigError(
                            f"{path}: tensor {slot.spec.name!r} has shape {list(values.shape)}, but the"
                            f" manifest says {list(slot.spec.shape)}"
                        )
                    phi[fragment.offset :][slot.span] = to_fixed(values).reshape(-1)
    except (OSError, SafetensorError, DivergedError, TypeError) as error:
        raise ConfigError(f"cannot use {path} as the swarm's initial parameters: {error}") from None
    if snapshots.digest(phi) != manifest.genesis.root:
        raise ConfigError(
            f"{path} does not hold the initial parameters of this manifest; use the file that gossamer init"
            " wrote with it"
        )
    return phi


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
    file = beside(manifest_path)
    if file.exists():
        genesis.store(read(manifest, file), chunks, home.chunks_path)
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
    file = beside(manifest_path)
    if file.exists():
        read(manifest, file)
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
        "gossamer.node.trainer.genesis", [str(home.root)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
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
