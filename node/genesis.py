"""Phi_0: the first parameters, rebuilt from the manifest's seed or read from the chunk store.

Run as a module it rebuilds them in a process of its own, so that a daemon never imports torch::

    python -m gossamer.node.genesis FOLDER
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.node import snapshots
from gossamer.node.chunkstore import ChunkStore, MissingChunkError
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.fixedpoint import Ints, to_fixed
from gossamer.protocol.layout import Layout
from gossamer.protocol.manifest import Manifest

if TYPE_CHECKING:
    from torch import nn


def parameters(model: "nn.Module", layout: Layout) -> Ints:
    """The model's trainable parameters as Phi: int32[layout.numel] in snapshot order."""
    by_name = dict(model.named_parameters())
    phi = np.empty(layout.numel, dtype=np.int32)
    for fragment in layout.fragments:
        for slot in fragment.slots:
            start = fragment.offset + slot.offset
            values = by_name[slot.spec.name].detach().float().cpu().numpy()
            phi[start : start + slot.numel] = to_fixed(values).reshape(-1)
    return phi


def is_stored(manifest: Manifest, chunks: ChunkStore) -> bool:
    """Whether all of Phi_0 is in the chunk store and undamaged; what is damaged is removed."""
    try:
        snapshots.load(manifest.genesis.root, manifest.plan().numel, chunks)
    except MissingChunkError:
        return False
    return True


def rebuild(manifest: Manifest, chunks: ChunkStore) -> None:
    """Build the task's model from the seed and keep its parameters.

    Raises ConfigError if their digest is not the manifest's.
    """
    from gossamer.models.errors import TaskError
    from gossamer.models.registry import build_task

    try:
        model = build_task(manifest.task.name, manifest.task.options, ()).build_model(manifest.task.seed)
        phi = parameters(model, manifest.plan())
    except (TaskError, KeyError, ValueError) as error:
        raise ConfigError(f"the manifest's task does not fit its layout: {error}") from None
    if snapshots.digest(phi) != manifest.genesis.root:
        raise ConfigError(
            "this machine's torch makes other first parameters than the manifest states; join a node that has"
            " them (--join), or write the manifest anew with this version"
        )
    snapshots.store(phi, chunks)


def main() -> int:
    home = Home(Path(sys.argv[1]))
    try:
        manifest = home.manifest()
        if manifest is None:
            raise ConfigError(f"no manifest in {home.root}")
        chunks = ChunkStore(home.chunks_path)
        if not is_stored(manifest, chunks):
            rebuild(manifest, chunks)
    except LocalError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
