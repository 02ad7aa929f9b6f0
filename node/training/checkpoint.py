"""What only this node knows, kept across restarts: residuals, momenta, inner optimizer, data position.

Phi is the swarm's; all else that training needs is here. A checkpoint is one safetensors file, begun every
few seconds after a delta, and again when the node leaves. The training thread copies a share of it at each
step, and a background thread writes that and forgets it: there is never a second copy of the whole in memory.
When one is read back, a fragment's residual counts only if it belongs to the last delta that we published of
it: what an older one holds has been sent since.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.statefile import DTYPES, StateFile

FREQUENT_BYTES = 64 * 1024 * 1024
"""A state up to this size is saved often, a larger one now and then: copying and writing it takes time."""

FREQUENT_S = 5.0
SELDOM_S = 60.0

SHARE_BYTES = 2 * 1024 * 1024
SHARES = 64
"""A state is copied over at least 64 inner steps, or 2 MiB at each, which take about a millisecond."""

SHARES_AHEAD = 2
"""Shares that wait to be written; as long as so many do, no more is copied."""

VERSION = "1"

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

    None for the values of a state that holds anything else (LBFGS keeps lists): half of it would do harm.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    start = 0
    for optimizer in optimizers:
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dtype in DTYPES:
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


@dataclass(slots=True)
class _Part:
    """Tensors that are of one moment."""

    tensors: Mapping[str, Tensor]
    left: list[str]
    fragment: int | None = None
    round: int | None = None
    """That the fragment was last published in when the first of them was copied."""


class StateCopy:
    """What a checkpoint holds, copied to the CPU in shares, so that no inner step is held up by all of it.

    A fragment's residual and momentum are those of one round. The inner optimizer's tensors may be some steps
    apart from each other, which does no harm.
    """

    def __init__(self, outer: OuterLoop, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        inner, self._plain = _optimizer_state(optimizers)
        self._kinds = _kinds(optimizers) if optimizers else ""
        self._outer = outer
        self._rounds = [0] * len(outer.fragments)
        self._parts = [_Part(inner, list(inner))]
        for index, state in enumerate(outer.fragments):
            found = {}
            for i, slot in enumerate(state.fragment.slots):
                found[f"residual/{slot.spec.name}"] = state.residual[i]
                found[f"momentum/{slot.spec.name}"] = state.momentum[i]
            self._parts.append(_Part(found, list(found), index))
        self.tensors = {name: tensor for part in self._parts for name, tensor in part.tensors.items()}
        """What there is to copy, by name: the tensors themselves."""
        self._share = max(SHARE_BYTES, sum(tensor.nbytes for tensor in self.tensors.values()) // SHARES)

    @property
    def is_done(self) -> bool:
        """Whether all has been copied."""
        return not self._parts

    def next_share(self) -> dict[str, Tensor]:
        """Copy some more: tensors by name, on the CPU and contiguous. Some may come a second time."""
        share: dict[str, Tensor] = {}
        copied = 0
        while self._parts and copied < self._share:
            part = self._parts[-1]
            for name in self._next_of(part):
                share[name] = part.tensors[name].detach().to("cpu", copy=True).contiguous()
                copied += share[name].nbytes
            if not part.left:
                self._parts.pop()
        return share

    def _next_of(self, part: _Part) -> list[str]:
        """The next tensor; all of them if their fragment was published since the first was copied."""
        if part.fragment is not None:
            published = self._outer.fragments[part.fragment].last_published
            self._rounds[part.fragment] = published
            is_torn = part.round not in (None, published)
            part.round = published
            if is_torn:
                part.left = []
                return list(part.tensors)
        return [part.left.pop()] if part.left else []

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

    def file(self, path: Path) -> StateFile:
        """Where it is to be written; no disk is touched yet."""
        return StateFile(path, self.tensors, self.metadata(Progress()), growth=64 + 16 * len(self._rounds))


class _End(NamedTuple):
    """No share comes any more."""

    metadata: dict[str, str] | None
    """None if the checkpoint was given up."""


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy: StateCopy | None = None
        self._shares: Queue[dict[str, Tensor] | _End] = Queue()
        """From the training thread to the one that writes."""
        self._busy: threading.Thread | None = None
        self._saved_at = 0.0
        self._size = 0

    def is_due(self) -> bool:
        """Whether a checkpoint should be taken now: never while one is being written."""
        if self._copy is not None or (self._busy is not None and self._busy.is_alive()):
            return False
        interval = FREQUENT_S if self._size <= FREQUENT_BYTES else SELDOM_S
        return time.monotonic() - self._saved_at > interval

    def begin(self, copy: StateCopy) -> None:
        """Begin a checkpoint in place of one that is under way."""
        if self._copy is not None:
            self._shares.put(_End(None))
        if self._busy is not None:
            self._busy.join()
        file = copy.file(self._path)
        self._copy, self._size, self._saved_at = copy, file.size, time.monotonic()
        self._shares = Queue(SHARES_AHEAD + 2)  # so that neither a share nor the end waits in `advance`
        self._busy = threading.Thread(
            target=self._write, args=(file, self._shares), name="checkpoint", daemon=True
        )
        self._busy.start()

    def advance(self, progress: Progress) -> None:
        """Copy the next share of what was begun, unless the disk has enough to do already."""
        if self._copy is not None and self._shares.qsize() < SHARES_AHEAD:
            self._hand_over(self._copy, progress)

    def write(self, copy: StateCopy, progress: Progress) -> None:
        """Write a checkpoint, and return when it is on disk or cannot be."""
        self.begin(copy)
        while self._copy is not None:
            self._hand_over(copy, progress)
        assert self._busy is not None
        self._busy.join()

    def _hand_over(self, copy: StateCopy, progress: Progress) -> None:
        self._shares.put(copy.next_share())
        if copy.is_done:
            self._shares.put(_End(copy.metadata(progress)))
            self._copy = None

    def _write(self, file: StateFile, shares: "Queue[dict[str, Tensor] | _End]") -> None:
        item: dict[str, Tensor] | _End = {}
        try:
            while not isinstance(item := shares.get(), _End):
                file.put(item)
            if item.metadata is not None:
                file.finish(item.metadata)
        except OSError as error:
            log.warning("cannot save the trainer's state to %s: %s", self._path, error.strerror)
        finally:
            file.discard()
            while not isinstance(item, _End):  # who hands over must not wait for ever
                item = shares.get()


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
                return None
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        rounds: list[int] = json.loads(metadata["rounds"])
        progress = Progress(int(metadata["steps"]), int(metadata["tokens"]))
        if len(rounds) != len(outer.fragments) or not _fits(outer, tensors):
            return None
        has_inner = metadata.get("optimizers") == _kinds(optimizers) and bool(optimizers)
        if has_inner:
            _restore_inner(optimizers, tensors, json.loads(metadata["inner"]))
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # the last four: what JSON can hold, where something else was written
    for state, saved in zip(outer.fragments, rounds, strict=True):
        for i, slot in enumerate(state.fragment.slots):
            state.momentum[i].copy_(tensors[f"momentum/{slot.spec.name}"])
            if saved == state.last_published:
                state.residual[i].copy_(tensors[f"residual/{slot.spec.name}"])
    return progress, has_inner


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
