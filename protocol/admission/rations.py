"""How many bytes of our chunks a member may take: a few copies of all we hold, and of what newly comes.

An honest member takes each chunk once, and again if it loses its disk. One that takes more wastes our line. A
rate in bytes per second would fit only one size of model, so a ration grows with what there is to take.
"""

from dataclasses import dataclass

from gossamer.protocol import limits


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is to take at a moment, in bytes: held now, and come (or made here) since the start."""

    held: int
    came: int


@dataclass(slots=True)
class _Ration:
    left: float
    came: int
    time: float


class Rations:
    """The rations of all members, by node id."""

    def __init__(self) -> None:
        self._rations: dict[bytes, _Ration] = {}

    def __len__(self) -> int:
        return len(self._rations)

    def take(self, node_id: bytes, size: int, stock: Stock, now: float) -> bool:
        """Take `size` bytes of a member's ration if that many are left; returns whether they were."""
        full = limits.RATION_COPIES * max(stock.held, limits.RATION_BYTES_MIN)
        ration = self._rations.pop(node_id, None)
        if ration is None:
            ration = _Ration(full, stock.came, now)
        fresh = limits.RATION_COPIES * (stock.came - ration.came)
        earned = full * max(0.0, now - ration.time) / limits.RATION_PERIOD_S
        ration.left = min(full, ration.left + fresh + earned)
        ration.came, ration.time = stock.came, now
        self._rations[node_id] = ration  # moved to the end: the first came longest ago
        if len(self._rations) > limits.PEERS_WATCHED_MAX:
            del self._rations[next(iter(self._rations))]
        if size > ration.left:
            return False
        ration.left -= size
        return True
