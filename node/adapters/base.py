"""What all adapters have in common: a place in the swarm while a framework trains.

A framework's callback inherits `Membership` and calls `_attach` when training begins, `_count` with every
micro-batch, `_step` after every optimizer step, and `_leave` or `_abandon` at the end. If an error ends
training, the `with`, the next training or the end of the process stops the node.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from gossamer.node.trainer.data import Schedule
from gossamer.node.trainer.peer import Peer

# --- Sums over the micro-batches of one optimizer step: their tokens, and their loss.

CountTokens = Callable[[Any], int | Tensor]
"""Batch -> number of tokens (or samples, always the same unit) in it: an int, or an integer tensor []."""


def tokens_in(batch: Any) -> int | Tensor:
    """The number of tokens in a batch of text, or of samples in any other batch.

    If the batch has ``input_ids``, all of these are tokens, or those that an ``attention_mask`` of the same
    shape selects. Otherwise the first tensor decides: a two-dimensional integer tensor holds tokens, and of
    any other, the first dimension counts samples. A batch without tensors is one sample.
    """
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
        mask = batch.get("attention_mask")
        return mask.sum() if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
    first = next(_tensors(batch), None)
    if first is None or first.ndim == 0:
        return 1
    is_text = first.ndim == 2 and not first.is_floating_point()
    return first.numel() if is_text else len(first)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings and sequences, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)


class StepCount(NamedTuple):
    """The micro-batches since the last step of the optimizer. Tensors stay on their device."""

    batches: int = 0
    tokens: int | Tensor = 0
    loss: float | Tensor = 0.0
    """The sum of the micro-batches' losses."""


class _LateShard(Sampler[int]):
    """`Peer.shard` of the peer that there is once training has begun."""

    def __init__(self, membership: "Membership", dataset: Sized) -> None:
        self._membership, self._dataset = membership, dataset
        self._peer: Peer | None = None
        self._shard: Iterable[int] = ()

    def __len__(self) -> int:
        is_alone = not (dist.is_available() and dist.is_initialized())
        return len(self._dataset) // (1 if is_alone else dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        peer = self._membership.peer
        if peer is None:
            raise RuntimeError("a shard draws while its callback trains, and that is not attached")
        if peer is not self._peer:
            self._peer, self._shard = peer, peer.shard(self._dataset)
        yield from self._shard


class Membership:
    """A node while a framework's loop runs. It may train several times, each time as a new `Peer`.

    A script need not leave it. In a `with`, an exception stops the node at once; otherwise the node goes on
    until this callback trains again, or the process ends.
    """

    def __init__(
        self,
        *,
        tokens: CountTokens = tokens_in,
        schedule: Schedule | None = None,
        finish: bool = True,
        **options: Any,
    ) -> None:
        """Takes what `Peer.attach` takes, and what concerns the framework.

        Args:
            tokens: counts the tokens of a batch; the default is `tokens_in`.
            schedule: the learning rate by the swarm's tokens (see `data`), instead of the framework's.
            finish: end with the swarm's own model, as `Peer.finish` does. Without it, training ends with what
                this node holds.

        Raises:
            TypeError: `Peer.attach` has no such argument, or `tokens` or `schedule` cannot be called.
        """
        if not callable(tokens):
            raise TypeError(f"tokens takes a function of a batch, not {tokens!r:.60}")
        if schedule is not None and not callable(schedule):
            raise TypeError(f"schedule takes a function of the swarm's tokens, not {schedule!r:.60}")
        inspect.signature(Peer.attach).bind(None, None, **options)
        self.peer: Peer | None = None
        """The peer of the current training, or of the last one."""
        self._options = options
        self._tokens = tokens
        self._schedule = schedule
        self._finishes = finish
        self._since = StepCount()
        self._has_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.peer is not None:
            self.peer.__exit__(kind, error, trace)
            self._forget()

    def shard(self, dataset: Sized) -> Sampler[int]:
        """A sampler for the trainer's own loader, made before it trains: `Peer.shard` of this node."""
        return _LateShard(self, dataset)

    # -- what a framework's callback calls

    def _attach(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Peer:
        """Become a node. One that an error left behind is stopped first. Raises what `Peer.attach` does."""
        self._abandon()
        self._since, self._has_left = StepCount(), False
        self.peer = Peer.attach(model, optimizers, **self._options)
        return self.peer

    def _count(self, batch: Any, loss: float | Tensor) -> None:
        """Count a micro-batch. Raises TypeError if `tokens` does not return one number for it."""
        tokens = self._tokens(batch)
        if not (tokens.numel() == 1 if isinstance(tokens, Tensor) else isinstance(tokens, Real)):
            raise TypeError(f"tokens returned {tokens!r:.60}: it must return one number for a batch")
        batches, so_far, losses = self._since
        mean = loss.detach().float() if isinstance(loss, Tensor) else loss
        self._since = StepCount(batches + 1, so_far + tokens, losses + mean)

    def _step(self, loss: float | Tensor) -> bool:
        """Tell the peer of an optimizer step and its mean loss. Returns whether to stop."""
        assert self.peer is not None
        tokens, self._since = int(self._since.tokens), StepCount()
        # All ranks step together, even one whose micro-batches were nothing but padding.
        self.peer.step(max(1, tokens), loss)
        return self.peer.should_stop or self.peer.finished

    def _leave(self) -> None:
        """Take over the swarm's own model, and leave. Does nothing if it has left already."""
        if self.peer is None or self._has_left:
            return
        self._has_left = True
        if self._finishes:
            self.peer.finish()
        self.peer.leave()
        self._forget()

    def _abandon(self) -> None:
        """Leave, and publish nothing more. Does nothing if the peer has left already; Ctrl-C may have cut
        `_leave` short."""
        if self.peer is not None:
            self._has_left = True
            self.peer.abandon()
            self._forget()

    def _forget(self) -> None:
        """Let the model go."""

    def _metrics(self) -> dict[str, Any]:
        """`Peer.metrics` for the framework's log."""
        return {f"gossamer/{key}": value for key, value in self.peer.metrics().items()} if self.peer else {}
