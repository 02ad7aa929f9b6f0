"""The same swarm for real: node processes, links and clocks, as `gossamer swarm` starts them.

Nodes have new keys and so draw different data, and their timing is not controlled: no two runs give the same
figures.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.learning.gossamer import genesis
from benchmarks.learning.world import Point, World
from gossamer.bootstrap import manifests
from gossamer.bootstrap.local_swarm import LocalSwarm, SwarmOptions
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home


def train(world: World, **settings: Any) -> Iterator[Point]:
    """Yields two points: the beginning, and the end, at which all replicas are equal.

    `settings` are as for `gossamer.genesis`. Raises RuntimeError if the replicas do not end equal.
    """
    manifest, phi = genesis(world, **settings)
    scale = world.scale
    options = SwarmOptions(
        nodes=scale.workers,
        rounds=scale.windows * manifest.layout.fragments,
        codec=manifest.outer.codecs[0].name,
        every_steps=scale.steps,
        fragments=manifest.layout.fragments,
        seed=world.seed,
    )
    with tempfile.TemporaryDirectory(prefix="gossamer-learning-") as name:
        folder = Path(name)
        boot = Home(folder / "bootstrap")
        boot.create()
        boot.adopt(manifest)
        snapshots.store(phi, ChunkStore(boot.chunks_path))
        manifests.write(manifest, folder / "swarm.toml")
        summary = asyncio.run(LocalSwarm(options, manifest, folder).run())
    if not summary.identical or summary.val_loss_start is None or summary.val_loss_end is None:
        raise RuntimeError("the swarm did not come to an end that all its nodes agree on")
    sent = sum(node["payload_bytes_sent"] for node in summary.nodes) / scale.workers
    yield Point(0, 0.0, 0.0, summary.val_loss_start)
    published = sent / scale.workers  # divided by the receivers: other workers and the bootstrap peer
    yield Point(summary.tokens, published, sent, summary.val_loss_end)
