"""Where chunks lie on disk, for tests that tamper with them."""

from pathlib import Path

from gossamer.node.daemon.storage.chunks import ChunkStore


def file_of(chunks: ChunkStore, blob: bytes) -> Path:
    """A chunk's file, packed or not; if it has none, the path that it would have unpacked."""
    name = blob.hex()
    folder = chunks._root / name[:2]
    return next(folder.glob(f"{name}*"), folder / name)
