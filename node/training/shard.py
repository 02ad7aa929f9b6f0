"""Which samples a node draws: a different order, or a different part, for each node.

Nobody knows how many nodes a swarm has, so the data cannot be divided among them. Instead, every node goes
through it in its own order, which follows from its node id; what all nodes see together is as if drawn at
random. If all nodes hold the same large dataset and none will get through it, `fraction` limits a node to a
random part, chosen by its id alone.
"""

from collections.abc import Iterator
from numbers import Real

import numpy as np
from torch.utils.data import Sampler

from gossamer.models.task import DataStream
from gossamer.protocol.errors import ConfigError


class Shard(Sampler[int]):
    """Indices into a dataset for one node: pass it to a DataLoader as its `sampler`.

    Each iteration is a new epoch with a new order. With several ranks in one trainer, each draws its own
    equal part of the node's order.
    """

    def __init__(
        self,
        size: int,
        *,
        node_id: bytes,
        begun_at: int = 0,
        fraction: float = 1.0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`begun_at` is the number of the node's inner steps so far: a node that resumes draws a new order.

        Raises ConfigError.
        """
        given: object = fraction  # NumPy's numbers and fractions, too
        if not (isinstance(given, Real) and 0 < fraction <= 1):
            raise ConfigError(f"fraction is {fraction!r:.60}: choose more than 0 and at most 1")
        stream = DataStream(seed=0, node_id=node_id)
        chosen = max(1, round(size * float(fraction)))
        part = np.random.default_rng(stream.derived_seed("part")).permutation(size)[:chosen]
        self.indices = np.sort(part)
        """The indices that this node draws from, sorted: int64[n]."""
        self._seed = stream.derived_seed(f"order from step {begun_at}")
        self._rank, self._ranks = rank, ranks
        self.epoch = 0
        """The epoch that the next iteration draws."""
        if size < 1 or chosen < ranks:
            raise ConfigError(
                f"{chosen} of {size} samples are too few for {ranks} ranks: give a larger dataset"
            )

    def __len__(self) -> int:
        return len(self.indices) // self._ranks

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self._seed, self.epoch)).permutation(self.indices)
        self.epoch += 1
        return iter(order[self._rank :: self._ranks][: len(self)].tolist())
