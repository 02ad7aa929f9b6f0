"""Phi from a node's folder alone: the fold over its records, as the daemon would do it.

Works beside a running daemon, of which it reads what has been written so far.
"""

from gossamer.node import genesis
from gossamer.node.chunkstore import ChunkStore
from gossamer.node.home import Home
from gossamer.node.merger import Merger
from gossamer.node.recordstore import RecordStore
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.records import Delta


def replay(home: Home) -> tuple[Manifest, Merger]:
    """Fold the records in a node's folder. Raises ConfigError or StorageError."""
    manifest = home.manifest()
    if manifest is None or not home.ledger_path.exists():
        raise ConfigError(f"{home.root} is not the folder of a node; give one with --dir")
    chunks = ChunkStore(home.chunks_path)
    if not genesis.is_stored(manifest, chunks):
        raise StorageError(f"{home.root} has no model yet; wait until the node has joined")
    merger = Merger(manifest, genesis.load(manifest, chunks), chunks, home.identity().node_id)
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    ledger = Ledger()
    for delta in store.load(manifest.plan()):
        ledger.add(delta)
    store.close()
    for round_ in ledger.rounds():
        merger.merge(round_, tuple(d for d in ledger.valid(round_) if _is_held(d, chunks)))
    return manifest, merger


def _is_held(delta: Delta, chunks: ChunkStore) -> bool:
    return all(blob in chunks for blob in delta.body.chunks)
