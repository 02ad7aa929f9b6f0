"""The outer step of a fragment that is on one device, which is not waited for before the end.

Reading back how far a step goes would wait for all work queued on the device, and leave the device idle until
the next call arrives. So the device itself checks whether the longest possible step is sound, and keeps
everything as it was if it is not.
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
"""Smaller momenta count for nothing in fixed point, and are set to 0. Where nothing trains any more, as in
the embedding rows of words that no longer occur, momentum would otherwise fade until it is denormal and stay
so, which is 30 times slower on Intel CPUs."""


class DeviceStep:
    """One step of all of a fragment's parts. Making it queues the check of how far they reach."""

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
        # A bound on the values and on where the step ends. False if anything is NaN.
        self._is_sound: Tensor = (ref + learnt + step) * ONE < VALUE_LIMIT
        self._moved = torch.zeros_like(self._is_sound)

    def take(self, theta: Tensor, piece: Piece, section: SectionWriter | BucketWriter) -> None:
        """Encode a piece's step, and set the parameters to what all others will decode."""
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
        ref.sub_(step.copy_(sent), alpha=1.0 / ONE)  # scaling by a power of two is exact
        torch.where(self._is_sound, ref.to(theta.dtype), theta, out=theta)

    def outcome(self) -> tuple[bool, bool]:
        """Whether the step was taken, and whether it moved anything. Waits for the device."""
        is_sound, moved = torch.stack((self._is_sound, self._moved)).tolist()
        return is_sound, moved


def _learnt(theta: Tensor, piece: Piece) -> Tensor:
    """A piece's pseudo-gradient, float32: what bf16 cannot hold of `ref` is not part of it."""
    return piece.ref.to(theta.dtype).float() - theta.float()


def _largest(tensor: Tensor) -> Tensor:
    """The largest of a tensor's magnitudes, float32[]; NaN if any is."""
    if not tensor.numel():  # a script has emptied a parameter, which `Binding.check` reports
        return torch.zeros((), device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, inf)
    return largest
