"""What only this node knows, kept across restarts: residuals, momenta, inner optimizer, data position.

Phi is the swarm's; all else that training needs is here. A checkpoint is one safetensors file, written aside
and renamed by a background thread, every few seconds after a delta, and again when the node leaves. When one
is read back, a fragment's residual counts only if it belongs to the last delta that we published of it: what
an older one holds has been sent since. It carries a checksum, since a flipped bit in a momentum would make
the node diverge at every start.
"""

import json
import logging
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gossamer.node.storage.home import write_atomically
from gossamer.node.training.outer import OuterLoop

FREQUENT_BYTES = 64 * 1024 * 1024
"""A state up to this size is saved often, a larger one now and then: copying and writing it takes time."""

FREQUENT_S = 5.0
SELDOM_S = 60.0

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
"""A state is copied over at most 64 inner steps, at least 2 MiB at each, which take about a millisecond."""

VERSION = "2"
CHECKSUM = "crc32"

_NOT_AS_WRITTEN = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading JSON, and using what it holds, comes to where something else was written."""

log = logging.getLogger("gossamer.checkpoint")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this node has come over all its runs."""

    steps: int = 0
    """Inner steps, and so batches drawn."""
    tokens: int = 0


def _optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The inner optimizers' state as named tensors and plain values, their parameters counted through.

    None for the values of a state that holds anything else (LBFGS keeps lists, FSDP2 on one rank sharded
    tensors, 8-bit optimizers quantised ones): half of it would do harm.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    start = 0
    for optimizer in optimizers:
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if type(value) is Tensor:
                    tensors[f"inner/{start + index}/{key}"] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    plain[f"{start + index}/{key}"] = value
                else:
                    return {}, None
        start += _parameters(optimizer)
    return tensors, plain


def _parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _kinds(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """What a state belongs to: the optimizers' classes and their parameters' shapes, as text."""
    return json.dumps(
        [
            [
                type(optimizer).__name__,
                [list(p.shape) for group in optimizer.param_groups for p in group["params"]],
            ]
            for optimizer in optimizers
        ]
    )


class StateCopy:
    """What a checkpoint holds, copied to the CPU in shares, so that no inner step is held up by all of it.

    A fragment's residual and momentum are copied at one time, with the round that they belong to. The inner
    optimizer's tensors may be some steps apart from each other, which does no harm.
    """

    def __init__(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        inner, self._plain = _optimizer_state(optimizers)
        self._kinds = _kinds(optimizers) if optimizers else ""
        self._outer = outer
        self._rounds = [0] * len(outer.fragments)
        self._left: list[tuple[int | None, dict[str, Tensor]]] = [(None, {n: t}) for n, t in inner.items()]
        for index, state in enumerate(outer.fragments):
            found = {}
            for i, slot in enumerate(state.fragment.slots):
                found[f"residual/{slot.spec.name}"] = state.residual[i]
                found[f"momentum/{slot.spec.name}"] = state.momentum[i]
            self._left.append((index, found))
        self._share = max(SHARE_BYTES, sum(_nbytes(tensors) for _, tensors in self._left) // SHARES)
        self.tensors: dict[str, Tensor] = {}
        """What has been copied, by name."""

    def advance(self, *, to_end: bool = False) -> bool:
        """Copy the next share, or all that is left; returns whether nothing is."""
        copied = 0
        while self._left and (to_end or copied < self._share):
            index, tensors = self._left.pop()
            copied += _nbytes(tensors)
            for name, tensor in tensors.items():
                self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if index is not None:
                self._rounds[index] = self._outer.fragments[index].last_published
        return not self._left

    def metadata(self, progress: Progress) -> dict[str, str]:
        """What goes with the tensors, as text."""
        metadata = {
            "version": VERSION,
            "steps": str(progress.steps),
            "tokens": str(progress.tokens),
            "rounds": json.dumps(self._rounds),
        }
        if self._plain is not None and self._kinds:
            metadata["inner"] = json.dumps(self._plain)
            metadata["optimizers"] = self._kinds
        return metadata


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """CRC-32 of a checkpoint, against bad disks: it is nobody's but ours."""
    found = zlib.crc32(json.dumps(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def collect(
    outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer], progress: Progress
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copy everything to the CPU at once: tensors by name, and text metadata."""
    copy = StateCopy(outer, optimizers)
    copy.advance(to_end=True)
    return copy.tensors, copy.metadata(progress)


class CheckpointWriter:
    """Writes checkpoints in the background, the latest one wins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._busy: threading.Thread | None = None
        self._saved_at = 0.0
        self._size = 0

    def is_due(self) -> bool:
        """Whether a checkpoint should be taken now: never while one is being written."""
        if self._busy is not None and self._busy.is_alive():
            return False
        interval = FREQUENT_S if self._size <= FREQUENT_BYTES else SELDOM_S
        return time.monotonic() - self._saved_at > interval

    def write(self, tensors: dict[str, Tensor], metadata: dict[str, str], *, wait: bool = False) -> None:
        """Start writing; with `wait`, return when it is on disk."""
        if self._busy is not None:
            self._busy.join()
        self._saved_at = time.monotonic()
        self._busy = threading.Thread(
            target=self._write, args=(tensors, metadata), name="checkpoint", daemon=True
        )
        self._busy.start()
        if wait:
            self._busy.join()

    def _write(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        data = save(tensors, {**metadata, CHECKSUM: checksum(tensors, metadata)})
        self._size = len(data)
        try:
            write_atomically(self._path, data)
        except OSError as error:
            log.warning("cannot save the trainer's state to %s: %s", self._path, error.strerror)


def restore(
    path: Path, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Progress, bool] | None:
    """Take up a checkpoint. The fragments' `last_published` must say what others have of us.

    Returns how far the node had come, and whether the inner optimizers go on from there (some cannot be
    saved, and others than those that were saved begin afresh). None, with nothing changed, if there is no
    checkpoint or it does not fit the model.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != VERSION:
                raise ValueError("another release wrote it")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if metadata.pop(CHECKSUM) != checksum(tensors, metadata):
            raise ValueError("it is damaged")
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            raise ValueError("it is of another model")
        is_ours = metadata.get("optimizers") == _kinds(optimizers) and bool(optimizers)
        # A state that diverged since the last delta would make the model diverge again, at any learning rate.
        has_inner = is_ours and all(
            map(_is_finite, (t for n, t in tensors.items() if n.startswith("inner/")))
        )
        if has_inner:
            _restore_inner(optimizers, tensors, json.loads(metadata["inner"]))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, *_NOT_AS_WRITTEN) as error:
        log.warning("cannot use %s (%s): residuals and inner optimizer begin afresh", path, error)
        return None
    for state, saved in zip(outer.fragments, rounds, strict=True):
        for i, slot in enumerate(state.fragment.slots):
            state.momentum[i].copy_(tensors[f"momentum/{slot.spec.name}"])
            if saved == state.last_published:
                state.residual[i].copy_(tensors[f"residual/{slot.spec.name}"])
    return progress, has_inner


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; those of a byte are taken to be, for torch cannot tell of all such dtypes."""
    return tensor.itemsize == 1 or bool(tensor.isfinite().all())


def _fits(outer: OuterLoop, tensors: dict[str, Tensor]) -> bool:
    return all(
        tensors[f"{kind}/{slot.spec.name}"].shape == state.residual[i].shape
        for state in outer.fragments
        for i, slot in enumerate(state.fragment.slots)
        for kind in ("residual", "momentum")
    )


def _restore_inner(
    optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor], plain: dict[str, Any]
) -> None:
    """Load what `_optimizer_state` took, with the groups that the optimizers have now."""
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("inner/"):
            _, index, key = name.split("/", 2)
            state.setdefault(int(index), {})[key] = tensor
    for name, value in plain.items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = value
    counts = [_parameters(optimizer) for optimizer in optimizers]
    if any(not 0 <= index < sum(counts) for index in state):
        raise ValueError("state of more parameters than there are")
    start = 0
    for optimizer, count in zip(optimizers, counts, strict=True):
        own = {index - start: state[index] for index in state if start <= index < start + count}
        optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
        start += count
