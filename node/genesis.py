"""Phi_0: the first parameters, rebuilt from the manifest's seed or read from the chunk store.

Run as a module it rebuilds them in a process of its own, so that a daemon never imports torch::

    python -m gossamer.node.genesis FOLDER
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.node.chunkstore import ChunkStore
from gossamer.node.home import Home
from gossamer.protocol.chunks import chunk_hashes, parse_index, root_of, split
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


def digest(phi: Ints) -> bytes:
    """The root that a manifest's genesis states."""
    return root_of(chunk_hashes(phi.data))


def store(phi: Ints, chunks: ChunkStore) -> bytes:
    """Keep Phi_0 as chunks and an index; returns its root. Raises OSError."""
    hashes = chunk_hashes(phi.data)
    for blob, piece in zip(hashes, split(phi.data), strict=True):
        chunks.put(blob, piece)
    root = root_of(hashes)
    chunks.put(root, b"".join(hashes))
    return root


def is_stored(manifest: Manifest, chunks: ChunkStore) -> bool:
    """Whether all of Phi_0 is in the chunk store."""
    return not missing(manifest, chunks)


def missing(manifest: Manifest, chunks: ChunkStore) -> tuple[bytes, ...]:
    """Chunks of Phi_0 that are not here: its index first, then what that lists."""
    root = manifest.genesis.root
    if root not in chunks:
        return (root,)
    hashes = parse_index(chunks.get(root), manifest.plan().snapshot_bytes)
    return tuple(blob for blob in hashes if blob not in chunks)


def load(manifest: Manifest, chunks: ChunkStore) -> Ints:
    """Read Phi_0: int32[numel]. Raises MissingChunkError or PayloadError."""
    hashes: Iterable[bytes] = parse_index(chunks.get(manifest.genesis.root), manifest.plan().snapshot_bytes)
    phi = np.empty(manifest.plan().numel, dtype=np.int32)
    view = memoryview(phi.data).cast("B")
    start = 0
    for blob in hashes:
        data = chunks.get(blob)
        view[start : start + len(data)] = data
        start += len(data)
    return phi


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
    if digest(phi) != manifest.genesis.root:
        raise ConfigError(
            "this machine's torch makes other first parameters than the manifest states; join a node that has"
            " them (--join), or write the manifest anew with this version"
        )
    store(phi, chunks)


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
