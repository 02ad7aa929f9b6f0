"""The first parameters of a swarm, for the node that begins its history.

Where nobody can rebuild them from the seed (existing weights, or a custom task, whose code a bootstrap peer
need not have), they lie in ``my.genesis.safetensors`` beside ``my.toml``: the float32 image of Phi_0, under
the model's own names, so that other tools can read it too. That image is exact, since Phi_0 was rounded from
float32: a multiple of 2**-24 below 1 has at most 24 significant bits, as many as a float32, and a float32 of
1 or more is such a multiple already. The manifest's digest checks it.
"""

from contextlib import closing
from math import inf
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gossamer.models.registry import task_names
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.files import SHARED, keep
from gossamer.node.home import Home
from gossamer.node.processes import Child
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError, DivergedError
from gossamer.protocol.fixedpoint import Ints, to_fixed, to_float
from gossamer.protocol.manifest import Manifest

SUFFIX = ".genesis.safetensors"


def beside(manifest_path: Path) -> Path:
    """Where the first parameters of a manifest's swarm lie."""
    return manifest_path.with_suffix(SUFFIX)


def write(manifest: Manifest, phi: Ints, path: Path) -> None:
    """Write Phi_0, int32[numel] in snapshot order. Raises StorageError."""
    tensors = {
        spec.name: to_float(values).reshape(spec.shape) for spec, values in manifest.plan().tensors(phi)
    }
    keep(path, save(tensors, {"format": "pt"}), mode=SHARED)


def read(manifest: Manifest, path: Path) -> Ints:
    """Read Phi_0, int32[numel] in snapshot order. Raises ConfigError if it is not the manifest's."""
    plan = manifest.plan()
    phi = np.empty(plan.numel, dtype=np.int32)
    try:
        with safe_open(path, framework="numpy") as file:
            for fragment in plan.fragments:
                for slot in fragment.slots:
                    values = file.get_tensor(slot.spec.name).reshape(-1)
                    phi[fragment.offset :][slot.span] = to_fixed(values[slot.strip])
    except (OSError, SafetensorError, DivergedError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot use {path} as the swarm's initial parameters: {error}") from None
    if snapshots.digest(phi) != manifest.genesis.root:
        raise ConfigError(
            f"{path} does not hold the initial parameters of this manifest; use the file that gossamer init"
            " wrote with it"
        )
    return phi


def ensure_genesis(home: Home, manifest: Manifest, manifest_path: Path) -> None:
    """Put Phi_0 into the folder if it is not there: from the file beside the manifest, or from the seed.

    A folder that holds a later snapshot no longer needs it. Raises StorageError or ConfigError, or SystemExit
    if the process that rebuilds it has failed and said why.
    """
    chunks = ChunkStore(home.chunks_path)
    if home.ledger_path.exists():
        with closing(RecordStore(home.ledger_path, manifest.swarm_id, read_only=True)) as store:
            if any(claim.round > 0 for claim in store.load_history().claims):
                return
    if genesis.is_stored(manifest, chunks):
        return
    file = beside(manifest_path)
    if file.exists():
        genesis.store(read(manifest, file), chunks, home.chunks_path)
    elif manifest.task.name in task_names():  # in a process that may import torch, and ends with this one
        if status := Child("gossamer.node.trainer.genesis", [str(home.root)]).end(inf):
            raise SystemExit(status)
    else:
        raise ConfigError(
            f"there is no {file} with the swarm's initial parameters. If gossamer init wrote it with the"
            " manifest, put it there. A swarm that a script trains is founded by Peer.attach in that script."
            " Or join a node that has them (--join)"
        )
