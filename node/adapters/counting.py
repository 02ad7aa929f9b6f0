"""Sums over the micro-batches of one optimizer step: their tokens, and their loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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


@dataclass(slots=True)
class StepCount:
    """The micro-batches since the last step of the optimizer. Tensors stay on their device."""

    batches: int = 0
    tokens: int | Tensor = 0
    loss: float | Tensor = 0.0
    """The sum of the micro-batches' losses."""

    def add(self, tokens: int | Tensor, loss: float | Tensor) -> None:
        """Count one micro-batch."""
        self.batches += 1
        self.tokens = self.tokens + tokens
        self.loss = self.loss + (loss.detach().float() if isinstance(loss, Tensor) else loss)
