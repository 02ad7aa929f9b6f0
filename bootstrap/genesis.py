"""Making sure that a swarm's first node has a model to begin with."""

import subprocess
import sys

from gossamer.node import genesis
from gossamer.node.chunkstore import ChunkStore
from gossamer.node.home import Home
from gossamer.node.recordstore import RecordStore
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest


def _has_snapshot(home: Home, manifest: Manifest) -> bool:
    if not home.ledger_path.exists():
        return False
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    try:
        return any(claim.round > 0 for claim in store.load_history().claims)
    finally:
        store.close()


def ensure_genesis(home: Home, manifest: Manifest) -> None:
    """Rebuild Phi_0 from the seed if it is not in the folder, in a process that may import torch.

    A folder that holds a later snapshot needs it no more. Raises StorageError, or ConfigError with that
    process's own explanation.
    """
    if _has_snapshot(home, manifest) or genesis.is_stored(manifest, ChunkStore(home.chunks_path)):
        return
    result = subprocess.run(
        [sys.executable, "-m", "gossamer.node.genesis", str(home.root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["the first parameters could not be built"]
        raise ConfigError(lines[-1].removeprefix("gossamer: "))
