"""Which task a node runs: one that comes with Gossamer, or one in a file that its owner has named once.

A manifest only names what is trained, and that name is never looked up on this machine. Custom code runs here
only because the person at this machine gave its file to `gossamer node --task`, which the folder remembers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import Sampler

from gossamer.models import TaskError
from gossamer.models.registry import find_kind, task_names
from gossamer.models.task import DataStream
from gossamer.models.task_file import TaskFile, flag_for, is_own_name, load, parse_task_file
from gossamer.node.home import Home, manifest_of
from gossamer.node.trainer.draws import Draws
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.models.task import Task


# --- Learning-rate schedules by the swarm's tokens.
#
# A schedule does not depend on a node's own steps, so a newcomer is at the right place at once, and all nodes
# slow down together.

Schedule = Callable[[int], float]
"""Tokens that the swarm has trained on so far -> factor. `Task.lr_scale` of the built-in tasks is one."""


def constant(*, warm_up_tokens: int = 0) -> Schedule:
    """1, after a linear warm-up from nearly 0. Raises ConfigError."""
    return _warmed_up(warm_up_tokens, lambda tokens: 1.0)


def linear(total_tokens: int, *, warm_up_tokens: int = 0, floor: float = 0.0) -> Schedule:
    """Warm-up, then a straight line to `floor` at `total_tokens`, where it stays. Raises ConfigError."""
    return _falling(total_tokens, warm_up_tokens, floor, lambda part: 1.0 - part)


def cosine(total_tokens: int, *, warm_up_tokens: int = 0, floor: float = 0.1) -> Schedule:
    """Warm-up, then half a cosine to `floor` at `total_tokens` (arXiv 1608.03983). Raises ConfigError."""
    return _falling(total_tokens, warm_up_tokens, floor, lambda part: (1.0 + math.cos(math.pi * part)) / 2)


def _falling(total: int, warm_up: int, floor: float, shape: Callable[[float], float]) -> Schedule:
    if not total > warm_up:
        raise ConfigError(f"total_tokens is {total}: it must be more than warm_up_tokens, {warm_up}")
    if not 0 <= floor <= 1:
        raise ConfigError(f"floor is {floor}: it is a part of the peak learning rate, 0 to 1")

    def scale(tokens: int) -> float:
        part = min(1.0, (tokens - warm_up) / (total - warm_up))
        return floor + (1.0 - floor) * shape(part)

    return _warmed_up(warm_up, scale)


def _warmed_up(warm_up: int, after: Schedule) -> Schedule:
    if warm_up < 0:
        raise ConfigError(f"warm_up_tokens is {warm_up}: it cannot be negative")
    # Starts a little above 0: with steps of 0 there would never be tokens to warm up with.
    return lambda tokens: max(0.01, tokens / warm_up) if tokens < warm_up else after(tokens)


# --- Which samples a node draws: a different order, or a different part, for each node.
#
# Where nodes have data of their own (else see `draws`), every node goes through it in its own order, which
# follows from its node id; what all nodes see together is as if drawn at random. If all nodes hold the same
# large dataset and none will get through it, `fraction` limits a node to a random part, chosen by its id.


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


class DrawnShard(Sampler[int]):
    """Indices into the data that the whole swarm goes through, see `draws`; one pass draws as many as it has,
    divided among the ranks of this trainer."""

    def __init__(self, draws: Draws, ranks: int = 1) -> None:
        self._draws, self._ranks = draws, ranks

    def __len__(self) -> int:
        return self._draws.samples // self._ranks

    def __iter__(self) -> Iterator[int]:
        return self._draws.items(lambda sample: (sample,), len(self))


log = logging.getLogger("gossamer.node")


def remember_task(home: Home, text: str) -> None:
    """Store which file holds the swarm's task, as the command line names it.

    Raises ConfigError if the swarm trains something else, or StorageError.
    """
    home.keep_task(str(task_file(manifest_of(home), text)))


def check_trainable(home: Home) -> None:
    """Raise ConfigError if the swarm's task does not come with Gossamer and no file of it is known here.

    A file that differs from the one that the manifest was written with will do, and the log says so.
    """
    manifest = manifest_of(home)
    if manifest.task.name not in task_names():
        text = home.task()
        if text is None:
            raise ConfigError(f"{_what_to_type(manifest)}; or hold a replica with --observe")
        file = task_file(manifest, text)
        try:
            source = file.source()
        except TaskError as error:
            raise ConfigError(str(error)) from None
        if manifest.task.source not in ("", source):
            log.warning(
                "%s is not the file that the manifest was written with (%s, not %s): if that was not"
                " intended, use the other",
                file.path,
                source[:12],
                manifest.task.source[:12],
            )


def build_task(home: Home, manifest: Manifest, data: Sequence[Path] = ()) -> "Task":
    """The swarm's task, with this node's data. Raises ConfigError, or TaskError for a mistake in it."""
    name = manifest.task.name
    kind = find_kind(name) if name in task_names() else load(task_file(manifest, home.task()))
    return kind.task(manifest.task.options, data)


def task_file(manifest: Manifest, text: str | None) -> TaskFile:
    """The file of the swarm's task. `text` names it as a person at this machine has; None if nobody has.

    Raises ConfigError if nobody has named it, if it holds another task, or if it is not there.
    """
    swarm, name = manifest.swarm.name, manifest.task.name
    if name in task_names():
        raise ConfigError(f"swarm {swarm!r} trains {name!r}, which comes with Gossamer: leave --task out")
    if text is None:
        raise ConfigError(_what_to_type(manifest))
    try:
        file = parse_task_file(text)
    except TaskError as error:
        raise ConfigError(f"the swarm's task: {error}; --task says where it is") from None
    if file.name != name:
        raise ConfigError(
            f"swarm {swarm!r} trains {name!r}, but {text} is {file.name!r}: give the file of the swarm's task"
        )
    return file


def _what_to_type(manifest: Manifest) -> str:
    swarm, name = manifest.swarm.name, manifest.task.name
    if not is_own_name(name):
        return (
            f"swarm {swarm!r} trains {name!r}, which is a script of its own: join with Peer.attach in that"
            " script (docs/your-model.md)"
        )
    return (
        f"swarm {swarm!r} trains {name!r}, a custom task of its owner: get its file from them, read it, and"
        f" give it with {flag_for(name)}"
    )
