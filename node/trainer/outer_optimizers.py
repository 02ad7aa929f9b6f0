"""Outer optimizers: what each node makes of a window's progress before it is compressed and published.

To add one, write a class like `Nesterov`, put it into `OPTIMIZERS`, and its name into `OUTER_OPTIMIZERS` of
`gossamer.protocol.manifest`, so that a manifest may name it. It runs on the device of the parameters, piece
by piece, in place; what it keeps is saved and restored with the node's checkpoint.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

FADED = 2.0**-60
"""Smaller momenta count for nothing in fixed point, and are set to 0. Where nothing trains any more, as in
the embedding rows of words that no longer occur, momentum would otherwise fade until it is denormal and stay
so, which is 30 times slower on Intel CPUs."""


class OuterOptimizer(Protocol):
    """Stateless itself: its buffers lie with the outer loop's state."""

    buffers: ClassVar[tuple[str, ...]]
    """The names of what it keeps, a float32 tensor of each parameter's shape, 0 at first."""

    def step(self, progress: Tensor, *buffers: Tensor, windows: float) -> None:
        """Turn a piece's pseudo-gradient (how far training has moved against the reference, float32[n]) into
        the step at learning rate 1, and update the buffers, float32[n]; all in place, without waiting for a
        device. Of zeros it must make zeros, as long as it has seen no others: they may be padding.

        `windows`: the inner steps behind the progress, as a multiple of the manifest's window, or of a usual
        one where the swarm sets its pace."""
        ...


class Nesterov:
    """Momentum in Nesterov's form, as in DiLoCo (arXiv 2311.08105): ``m = mu * m + g; step = g + mu * m``.

    A linear filter commutes with the sum over nodes. So each node keeps its own, the swarm needs no shared
    state, and nothing is lost when a member leaves. With a momentum of 0 it is plain SGD.

    Momentum reaches back over inner steps, not windows, whose lengths differ between nodes and with the load
    of a machine: over ``p`` windows it fades to ``mu**p``. The learning rate changes by
    ``(1 - mu**p) / (1 - mu)``, so that progress moves the model equally far in the end however it is cut.

    Where the swarm sets its pace, all windows get shorter together. Long ones want momentum and short ones
    none (docs/benchmarks.md), so it fades, from all in a usual window to none in a third of one. The
    learning rate changes by ``(1 + mu) / (1 + mu')``, so that progress moves the model equally far at once.
    """

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(self, manifest: Manifest) -> None:
        self._mu = manifest.outer.momentum
        self._is_paced = manifest.pace.is_set_by_swarm

    def step(self, progress: Tensor, *buffers: Tensor, windows: float) -> None:
        if self._mu:
            (momentum,), mu = buffers, self._mu**windows
            scale = (1 - mu) / (1 - self._mu)
            if self._is_paced:
                mu = self._mu * max(0.0, min((3 * windows - 1) / 2, 1.0))
                scale = (1 + self._mu) / (1 + mu)
            torch.add(progress, momentum, alpha=mu, out=momentum)
            torch.hardshrink(momentum, FADED, out=momentum)
            progress.add_(momentum, alpha=mu)
            if scale != 1.0:
                progress.mul_(scale)


OPTIMIZERS: dict[str, Callable[[Manifest], OuterOptimizer]] = {"nesterov": Nesterov}
"""Every outer optimizer by the name that manifests use."""


def optimizer_of(manifest: Manifest) -> OuterOptimizer:
    """The outer optimizer that a manifest names. Raises ConfigError if this version has none of that name."""
    name = manifest.outer.optimizer
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown outer optimizer {name!r}: choose from {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](manifest)
