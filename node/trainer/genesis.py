"""Phi_0: the first parameters, rebuilt from the manifest's seed or read from the chunk store.

Run as a module, it rebuilds them in its own process, so that a daemon never imports torch::

    python -m gossamer.node.trainer.genesis FOLDER
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.node import processes
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.files import cannot_write
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError, DiskFullError, DivergedError, LocalError
from gossamer.protocol.fixedpoint import ONE, Ints, to_fixed
from gossamer.protocol.history.claims import genesis_claim
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


VANISHING = 1e-3
"""A tensor of which more than this part would become zero in fixed point is warned of: a few of any million
random values are that small."""

log = logging.getLogger("gossamer.peer")


def parameters(model: "nn.Module", layout: Layout) -> Ints:
    """The model's trainable parameters as Phi: int32[layout.numel] in snapshot order.

    Raises KeyError for a tensor that the model lacks, or ConfigError.
    """
    from gossamer.models.task import named_tensors

    return image(dict(named_tensors(model)), layout)


def image(tensors: "Mapping[str, Tensor]", layout: Layout) -> Ints:
    """Named tensors as Phi, with one warning of those whose values are too small for fixed point.

    Raises KeyError for one that is missing, ConfigError for one out of range.
    """
    lost_in = []
    phi = np.empty(layout.numel, dtype=np.int32)
    for fragment in layout.fragments:
        for slot in fragment.slots:
            start = fragment.offset + slot.offset
            values = tensors[slot.spec.name].detach().reshape(-1)[slot.strip].float().cpu().numpy()
            try:
                fixed = to_fixed(values)
            except DivergedError as error:
                raise ConfigError(f"tensor {slot.spec.name!r}: {error}; scale or freeze it") from None
            phi[start : start + slot.numel] = fixed
            lost = np.count_nonzero(values) - np.count_nonzero(fixed)
            if lost > VANISHING * slot.numel:
                lost_in.append(f"{lost} of {slot.numel} values of {slot.spec.name!r}")
    if lost_in:
        log.warning(
            "below 3e-8, so that they are 0 in the swarm and its exports: %s. In your model they stay as they"
            " are while nobody trains them; scale or freeze them",
            ", ".join(lost_in),
        )
    return phi


def vanishing(values: "Tensor") -> "Tensor | None":
    """Those of a tensor's values that become zero in fixed point, and zeros elsewhere; None if they are so
    few that nothing warns of them."""
    half = 0.5 / ONE
    lost = (values >= -half) & (values <= half) & (values != 0)  # little memory: the tensor may be large
    return values * lost if int(lost.count_nonzero()) > VANISHING * values.numel() else None


def found(manifest: Manifest, phi: Ints, home: Home) -> None:
    """Store `phi` as the swarm's first parameters.

    Raises ConfigError if they are not the manifest's, or StorageError.
    """
    digest = snapshots.digest(phi)
    if digest != manifest.genesis.root:
        raise ConfigError(
            f"to found swarm {manifest.swarm.name!r} the model must hold its initial parameters: all names"
            f" and shapes fit, but the values have digest {digest.hex()[:12]}, and the manifest says"
            f" {manifest.genesis.digest[:12]}. Build the model as when the manifest was written (the same"
            " seed, weights, dtype and torch), write the manifest again, or join a running node"
        )
    store(phi, ChunkStore(home.chunks_path), home.chunks_path)


def store(phi: Ints, chunks: ChunkStore, path: Path) -> None:
    """Store Phi_0 in the chunk store, whose folder is `path`. Raises StorageError."""
    try:
        snapshots.store(phi, chunks)
    except OSError as error:
        raise cannot_write(path, error) from None


def is_stored(manifest: Manifest, chunks: ChunkStore) -> bool:
    """Whether all of Phi_0 is in the chunk store and undamaged; damaged chunks are removed."""
    try:
        snapshots.load(genesis_claim(manifest.genesis.root), manifest.plan().numel, chunks)
    except MissingChunkError:
        return False
    return True


def rebuilt(manifest: Manifest) -> Ints:
    """Phi_0 from the seed, by building the task's model, which imports torch: int32[numel].

    Raises ConfigError if its digest is not the manifest's.
    """
    from gossamer.models import TaskError
    from gossamer.models.registry import build_task
    from gossamer.models.task import named_tensors
    from gossamer.node.trainer.parameters import check_fits

    try:
        model = build_task(manifest.task.name, manifest.task.options, ()).build_model(manifest.task.seed)
        check_fits(dict(named_tensors(model)), manifest)
    except (TaskError, ConfigError) as error:
        raise ConfigError(f"the manifest's task does not fit its layout: {error}") from None
    phi = parameters(model, manifest.plan())
    if snapshots.digest(phi) != manifest.genesis.root:
        raise ConfigError(
            "this machine's torch makes different initial parameters than the manifest states. If its seed,"
            " fragments or task were edited, write it again with gossamer init; if it was written with"
            " --from, put the .genesis.safetensors that came with it beside it; otherwise join a node that"
            " has them (--join), or write it again with this version"
        )
    return phi


def main() -> int:
    processes.watch(lambda: os._exit(1))
    home = Home(Path(sys.argv[1]))
    try:
        manifest = home.manifest()
        if manifest is None:
            raise ConfigError(f"no manifest in {home.root}")
        chunks = ChunkStore(home.chunks_path)
        if not is_stored(manifest, chunks):
            store(rebuilt(manifest), chunks, home.chunks_path)
    except LocalError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return processes.FAILED if isinstance(error, DiskFullError) else processes.USER_ERROR
    return processes.DONE


if __name__ == "__main__":
    sys.exit(main())
