"""The losses of all fragments' windows, summed."""

from torch import Tensor


class Losses:
    """A sum for each window. What is on a device stays there until its window closes.

    A step adds to one number, whatever the number of windows, for each addition on a device is a call: that
    number goes into all sums whenever a window closes.
    """

    def __init__(self, windows: int) -> None:
        self._sums: list[float | Tensor] = [0.0] * windows
        self._since: float | Tensor = 0.0
        """Of the steps since a window closed."""

    def add(self, loss: float | Tensor) -> None:
        """Note one step's loss, a tensor [] of float32 on a device, or a number."""
        self._since = _sum(self._since, loss)

    def close(self, index: int) -> float | Tensor:
        """A window's sum; its next begins at 0."""
        self._sums = [_sum(before, self._since) for before in self._sums]
        closed, self._sums[index], self._since = self._sums[index], 0.0, 0.0
        return closed


def _sum(before: float | Tensor, loss: float | Tensor) -> float | Tensor:
    if isinstance(loss, Tensor) and isinstance(before, Tensor):
        loss = loss.to(before.device)  # of a model that is spread over devices, it may be on any
    return before + loss
