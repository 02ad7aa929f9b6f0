"""The outer step of a fragment that is on one device, of which nothing is asked before the end.

Each look at how far a step goes would wait for all that the device was told before, and leave it without work
until the next call gets there. So the device itself finds whether the longest step that there can be is
sound, and keeps everything as it was if not.
"""

from math import inf

import torch
from torch import Tensor

from gossamer.node.training.encoders import SectionWriter
from gossamer.node.training.fragmentstate import FragmentState, Piece
from gossamer.node.training.payloadwriter import BucketWriter
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT
from gossamer.protocol.manifest import Outer

FADED = 2.0**-60
"""Momentum that weighs nothing in fixed point. Where nothing trains any more, as in the rows of words that
are never met, it would else fade until it is denormal and stay so: 30 times slower on Intel CPUs."""


class DeviceStep:
    """One step of all of a fragment's parts, which begin to be looked at here."""

    def __init__(self, state: FragmentState, outer: Outer) -> None:
        self._outer = outer
        reaches = [
            torch.stack(
                [_largest(piece.ref), _largest(_learnt(values[piece.span], piece)), _largest(piece.momentum)]
            )
            for part in state.parts
            for values in (part.values(),)
            for piece in part.pieces
        ]
        ref, learnt, momentum = torch.stack(reaches).amax(0).unbind()
        mu = outer.momentum
        step = outer.learning_rate * ((1.0 + mu) * learnt + mu * mu * momentum)
        # Of the values, and of where the step ends. Not so if anything is NaN.
        self._is_sound: Tensor = (ref + learnt + step) * ONE < VALUE_LIMIT
        self._moved = torch.zeros_like(self._is_sound)

    def take(self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter) -> None:
        """Encode a piece's step, and go on from where all others will see it."""
        _, ref, residual, momentum = piece
        step, mu = _learnt(theta, piece), self._outer.momentum
        if mu:
            newer = torch.hardshrink(torch.add(step, momentum, alpha=mu), FADED)
            torch.where(self._is_sound, newer, momentum, out=momentum)
            step.add_(momentum, alpha=mu)
        step.mul_(self._outer.learning_rate * ONE).round_()
        sent = torch.where(self._is_sound, step, 0.0).int()
        self._moved |= sent.any()
        if self._outer.ef_decay != 1.0:
            decayed = residual.float().mul_(self._outer.ef_decay).round_().int()
            torch.where(self._is_sound, decayed, residual, out=residual)
        residual.add_(sent).clamp_(1 - VALUE_LIMIT, VALUE_LIMIT - 1)
        section.write(residual, sent)
        sent.mul_(self._is_sound)
        residual.sub_(sent)
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # exact, as every power of two
        torch.where(self._is_sound, ref.to(theta.dtype), theta, out=theta)

    def outcome(self) -> tuple[bool, bool]:
        """Whether the step was taken, and whether it went anywhere. Waits for the device."""
        is_sound, moved = torch.stack((self._is_sound, self._moved)).tolist()
        return is_sound, moved


def _learnt(theta: Tensor, piece: Piece) -> Tensor:
    """What training has taken from a piece, float32: what bf16 cannot hold of `ref` is not in it."""
    return piece.ref.to(theta.dtype).float() - theta.float()


def _largest(tensor: Tensor) -> Tensor:
    """The largest of a tensor's magnitudes, float32[]; NaN if any is."""
    if not tensor.numel():  # a script has emptied a parameter, which is said where that is looked for
        return torch.zeros((), device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, inf)
    return largest
