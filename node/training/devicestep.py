"""The outer step of a fragment that is on one device, of which nothing is asked before the end.

Each look at how far a step goes would wait for all that the device was told before, and leave it without work
until the next call gets there. So the device itself finds whether the longest step that there can be is
sound, and takes none of it if not: all numbers that the step is made with are such that nothing changes then.
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
    """One step of all of a fragment's parts, whose values begin to be looked at here."""

    def __init__(self, state: FragmentState, outer: Outer, device: torch.device) -> None:
        self.values = [part.values() for part in state.parts]
        """Of each part."""
        self._outer = outer
        reaches = [
            torch.stack([_largest(row[piece.span]), _largest(piece.ref), _largest(piece.momentum)])
            for part, row in zip(state.parts, self.values, strict=True)
            for piece in part.pieces
        ]
        here, momentum = torch.stack(reaches).amax(0).split((2, 1))
        at, mu = here.amax(), outer.momentum
        # ``lr * (g + mu * (mu * m + g))``: what has been learnt is no more than twice the larger of both.
        step = outer.learning_rate * (2.0 * (1.0 + mu) * at + mu * mu * momentum[0])
        self._is_sound: Tensor = (at + step) * ONE < VALUE_LIMIT  # not so if anything is NaN
        self._mu = self._or(mu, 1.0)
        self._scale = self._or(outer.learning_rate * ONE, 0.0)
        self._decay = self._or(outer.ef_decay, 1.0)
        self._moved = torch.zeros((), dtype=torch.bool, device=device)

    def _or(self, number: float, otherwise: float) -> Tensor:
        """A float32[] on the device: the one if the step is sound, or the other."""
        chosen: Tensor = self._is_sound.float().mul_(number - otherwise).add_(otherwise)
        return chosen

    def take(self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter) -> None:
        """Encode a piece's step, and go on from where all others will see it."""
        _, ref, residual, momentum = piece
        learnt = ref.to(theta.dtype).float() - theta.float()  # what bf16 cannot hold of `ref` is not progress
        step = torch.where(self._is_sound, learnt, 0.0)
        if self._outer.momentum:
            torch.addcmul(step, momentum, self._mu, out=momentum)
            torch.hardshrink(momentum, FADED, out=momentum)
            step.add_(momentum, alpha=self._outer.momentum)
        step.mul_(self._scale).round_()
        self._moved |= step.any()
        if self._outer.ef_decay != 1.0:
            residual.copy_(residual.float().mul_(self._decay).round_())
        sent = step.int()
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


def _largest(tensor: Tensor) -> Tensor:
    """The largest of a tensor's magnitudes, float32[]; NaN if any is."""
    if not tensor.numel():  # a script has emptied a parameter, which is said where that is looked for
        return torch.zeros((), device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, inf)
    return largest.float()
