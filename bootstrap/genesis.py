"""Making sure that a swarm's first node has Phi_0."""

import subprocess
import sys

from gossamer.node import genesis
from gossamer.node.chunkstore import ChunkStore
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest


def ensure_genesis(home: Home, manifest: Manifest) -> None:
    """Rebuild Phi_0 from the seed if it is not in the folder, in a process that may import torch.

    Raises ConfigError with that process's own explanation.
    """
    if genesis.is_stored(manifest, ChunkStore(home.chunks_path)):
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
