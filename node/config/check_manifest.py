"""A manifest's values: all of them are allowed, and yet some are seldom meant."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gossamer.models.errors import TaskError
from gossamer.models.registry import build_task, resolve_options, task_names
from gossamer.models.task_file import is_own_name
from gossamer.node import own_task
from gossamer.node.config.findings import Finding, error, ok, told, warning
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads.chunks import HASH_BYTES, chunk_sizes, payload_chunk_sizes
from gossamer.protocol.payloads.payload import payload_length

CLOCK_S = 120.0
SNAPSHOTS = 5
"""Snapshots on disk: usually two, four while old ones are downloaded, and one more while it is written."""

BLOCK_BYTES = 4096
"""Each chunk is a file, and most file systems allocate files in blocks of this size."""

FOLDERS = 256
"""The folders that hold the chunks; each takes a block."""

RECORD_BYTES = 1024
HASH_ROW_BYTES = 34
"""What a delta takes in the ledger, and what each chunk of its payload takes besides."""

_BELOW_FOUR_BITS = ("int2", "topk")


def check_manifest(
    manifest: Manifest, *, trains: bool = False, task: str | None = None, data: Sequence[Path] = ()
) -> Iterator[Finding]:
    """Say what the swarm is, and what is odd about it.

    `trains` says whether `gossamer node` is to train it, on `data`. `task` is the value of its --task, now or
    in an earlier run.
    """
    numel = manifest.plan().numel
    yield ok(
        "manifest",
        f"swarm {manifest.swarm.name!r} ({manifest.swarm_id.hex()[:12]}): {manifest.task.name},"
        f" {numel:,} parameters, {manifest.admission.mode}",
    )
    if manifest.task.name in task_names():
        yield from _check_task(manifest, trains, task, data)
    else:
        yield from _check_own_task(manifest, trains, task)
    for field, text in (*_odd_merging(manifest), *_odd_pace(manifest), *_odd_history(manifest)):
        yield warning(field, text)


def _check_task(
    manifest: Manifest, trains: bool, task: str | None, data: Sequence[Path]
) -> Iterator[Finding]:
    """A task that comes with Gossamer. If it is to be trained, this imports torch and reads the data."""
    name, options = manifest.task.name, manifest.task.options
    if task is not None:
        yield from told("task", lambda: str(own_task.task_file(manifest, task)))
    try:
        resolve_options(name, options)
    except TaskError as problem:
        yield error("task.options", str(problem))
        return
    if trains:
        from gossamer.models.checking import first_batch

        try:
            first_batch(build_task(name, options, data))
        except TaskError as problem:
            yield error("data", str(problem))


def _check_own_task(manifest: Manifest, trains: bool, task: str | None) -> Iterator[Finding]:
    """A custom task, in a file (which is not run here) or in a script."""
    name = manifest.task.name
    if is_own_name(name) and not trains and task is None:
        yield ok("task.name", f"{name!r} is a custom task in a file: nodes that train need --task")
        return
    try:
        difference = own_task.difference_of(manifest, own_task.task_file(manifest, task))
    except ConfigError as problem:
        yield (error if trains or task is not None else warning)("task.name", str(problem))
        return
    if difference:
        yield warning("task.source", difference)


def _odd_merging(manifest: Manifest) -> Iterator[tuple[str, str]]:
    outer, is_open = manifest.outer, manifest.admission.mode == "open"
    if outer.codec in _BELOW_FOUR_BITS and outer.momentum > 0:
        yield "outer.momentum", f"with {outer.codec}, momentum costs more than it gains; use 0"
    # topk sends such a short part of a delta that longer steps make up for it. The mean of several deltas is
    # shorter than each of them, unless the rule prevents it.
    by_mean = all(spec.averaging == "mean" for spec in manifest.layout.tensors)
    longer = 1.5 if by_mean else 1.0
    least, usual_most, most = (1.0, 3.0, 3.5) if outer.codec == "topk" else (0.4, 1.0, 1.0)
    usual = f"{least:g} to {longer * usual_most:g}"
    if outer.learning_rate > longer * most:
        yield "outer.learning_rate", f"{outer.learning_rate:g} overshoots; {usual} is usual"
    if outer.learning_rate < 0.1:
        yield (
            "outer.learning_rate",
            f"{outer.learning_rate:g} discards most of each window; {usual} is usual",
        )
    if outer.ef_decay < 0.5:
        yield "outer.ef_decay", f"{outer.ef_decay:g} forgets what the codec left out; 0.8 to 1 is usual"
    if outer.clip == 0 and is_open:
        yield (
            "outer.clip",
            "0 lets any member send a delta of any length; 1.5 is usual if anybody may join",
        )
    if outer.weight_cap == 0 and is_open:
        yield "outer.weight_cap", "0 lets any member claim any weight; 4 is usual if anybody may join"


def _odd_pace(manifest: Manifest) -> Iterator[tuple[str, str]]:
    pace = manifest.pace
    if 0 < pace.every_steps < manifest.layout.fragments:
        yield "pace.every_steps", "more fragments than steps in a window: several rounds per step"
    if 0 < pace.every_seconds < 1:
        yield (
            "pace.every_seconds",
            f"a delta every {pace.every_seconds:g} s keeps the network busier than training",
        )
    if pace.min_round_seconds > 60:
        yield "pace.min_round_seconds", f"no round can be shorter than {pace.min_round_seconds:g} s"
    if manifest.swarm.created > time.time() + CLOCK_S:
        yield (
            "swarm.created",
            "in the future: rounds are refused until then, or this machine's clock is wrong",
        )


def _odd_history(manifest: Manifest) -> Iterator[tuple[str, str]]:
    history = manifest.history
    if history.retain == 0:
        yield "history.retain", "0 keeps every payload for ever: the disk fills as long as the swarm runs"
    elif history.retain < 2 * (history.seal_after + history.snapshot_every):
        yield (
            "history.retain",
            f"a partition longer than {history.retain} rounds will not heal exactly;"
            f" {256 * manifest.layout.fragments} is usual",
        )
    if history.snapshot_every > 1000:
        yield "history.snapshot_every", "newcomers fetch every round since the last snapshot; 16 is usual"


def disk_needed(manifest: Manifest, members: int, trains: bool) -> int:
    """How many bytes a node's folder may grow to (docs/operating.md, Sizing); if `retain` is 0, in 256
    rounds."""
    layout, history = manifest.plan(), manifest.history
    codec = CODECS[manifest.outer.codec]
    payload = payload_chunk_sizes(max(payload_length(codec, fragment) for fragment in layout.fragments))
    deltas = members * ((history.retain or 256) + history.snapshot_every)
    record = RECORD_BYTES + HASH_ROW_BYTES * len(payload)
    pieces = chunk_sizes(layout.snapshot_bytes)
    snapshot = (*pieces, HASH_BYTES * len(pieces))
    trainer = 2 * 16 * layout.numel if trains else 0
    return (
        FOLDERS * BLOCK_BYTES
        + deltas * (_on_disk(payload) + record)
        + SNAPSHOTS * _on_disk(snapshot)
        + trainer
    )


def _on_disk(sizes: Iterable[int]) -> int:
    """Bytes that files of these sizes take on disk."""
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)
