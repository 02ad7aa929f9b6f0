"""What a training loop passes to `step`, checked: the tokens that it trained on, and their loss."""

from typing import SupportsFloat, SupportsInt

import numpy as np
import torch
from torch import Tensor

from gossamer.protocol.limits import TOKENS_MAX


def token_count(tokens: SupportsInt) -> int:
    """A step's tokens as an int, from any type of number. Raises ValueError if it is not a valid count."""
    try:
        if isinstance(tokens, Tensor):
            tokens = tokens.item()  # only one wait for the device
        count = 0 if isinstance(tokens, bool | np.bool_) else int(tokens)
        if count == tokens and 1 <= count <= TOKENS_MAX:
            return count
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        pass
    raise ValueError(
        f"tokens is {tokens!r:.60}: give the step's tokens or samples, a whole number from 1 to 2**40"
    )


def mean_loss(loss: SupportsFloat | Tensor) -> float | Tensor:
    """A step's loss as a float, or as a tensor [] without its graph. Raises ValueError if it is not one
    number."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise ValueError(
                f"loss is {loss.dtype} of shape {list(loss.shape)}: step takes one number, loss.mean()"
            )
        if loss.is_meta or loss.is_nested or loss.layout is not torch.strided:
            raise ValueError(
                "loss is a tensor without a value, or a sparse or nested one: step takes a plain number"
            )
        return loss.detach().view(())
    try:
        return float(loss)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"loss is {loss!r:.60}: step takes the step's mean loss, float('nan') if there is none"
        ) from None
