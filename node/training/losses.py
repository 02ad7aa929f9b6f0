"""The losses of all fragments' windows, summed."""

from torch import Tensor


class Losses:
    """A sum for each window. A loss on a device stays there until its window closes.

    Each addition on a device is a call, so a step adds to a single number, however many windows there are.
    That number is added to all sums whenever a window closes.
    """

    def __init__(self, windows: int) -> None:
        self._sums: list[float | Tensor] = [0.0] * windows
        self._since: float | Tensor = 0.0
        """Sum over the steps since a window last closed."""

    def add(self, loss: float | Tensor) -> None:
        """Add one step's loss: a tensor [] of float32 on a device, or a number."""
        self._since = _sum(self._since, loss)

    def close(self, index: int) -> float | Tensor:
        """Return a window's sum; the next window begins at 0."""
        self._sums = [_sum(before, self._since) for before in self._sums]
        closed, self._sums[index], self._since = self._sums[index], 0.0, 0.0
        return closed


def _sum(before: float | Tensor, loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor) and isinstance(before, Tensor):
        loss = loss.to(before.device)  # the loss of a model spread over devices may be on any of them
    return before + loss
