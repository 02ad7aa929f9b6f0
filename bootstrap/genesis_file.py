"""``my.genesis.safetensors`` beside ``my.toml``: first parameters that nobody can rebuild from a seed.

These are existing weights, or the first parameters of a custom task, whose code a bootstrap peer need not
have. The file holds the float32 image of Phi_0, under the model's own names, so that other tools can read it
too. That image is exact, since Phi_0 was rounded from float32: a multiple of 2**-24 below 1 has at most 24
significant bits, as many as a float32, and a float32 of 1 or more is such a multiple already. The manifest's
digest checks it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gossamer.node.phi import snapshots
from gossamer.node.storage.placing import placed, written
from gossamer.protocol.errors import ConfigError, DivergedError, StorageError
from gossamer.protocol.fixedpoint import Ints, to_fixed, to_float
from gossamer.protocol.manifest import Manifest

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
