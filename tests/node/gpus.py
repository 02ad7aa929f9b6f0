"""Fake GPUs: training on the CPU that takes the code paths of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.node.ipc.shared_memory import SharedMemory
from gossamer.node.trainer import phi_updates
from gossamer.node.trainer.daemon_link import Offer
from gossamer.node.trainer.fragments import FragmentState


class Room:
    """The staging room of a GPU that copies at once."""

    def __init__(self, _: torch.device, numel: int) -> None:
        self.memory = torch.empty(numel, dtype=torch.int32, device="cpu")

    def send(self, offer: Offer, source: Tensor) -> None:
        self.values(offer, source)

    def has_arrived(self, _: Offer) -> bool:
        return True

    def values(self, _: Offer, source: Tensor) -> Tensor:
        return self.memory[: source.numel()].copy_(source)

    def leave(self, _: Offer) -> None:
        self.memory.fill_(7)

    def is_read(self, _: Offer) -> bool:
        return True

    def pin(self, _: SharedMemory) -> None:
        pass

    def close(self) -> None:
        pass


class LateRoom(Room):
    """The staging room of a GPU that takes some steps to copy, and reads what it was offered until then."""

    STEPS = 3

    def __init__(self, device: torch.device, numel: int) -> None:
        super().__init__(device, numel)
        self._ahead: tuple[Offer, Tensor] | None = None
        self._asked = 0
        self._unread: dict[Offer, int] = {}

    def send(self, offer: Offer, source: Tensor) -> None:
        if self._ahead is None:
            self._ahead, self._asked = (offer, source), 0

    def has_arrived(self, offer: Offer) -> bool:
        if self._ahead is None or offer is not self._ahead[0]:
            return False
        self._asked += 1
        return self._asked >= self.STEPS

    def values(self, offer: Offer, source: Tensor) -> Tensor:
        self._unread[offer] = self.STEPS
        return super().values(offer, source)

    def leave(self, offer: Offer) -> None:
        if self._ahead is not None and offer is self._ahead[0]:
            self._ahead = None
        super().leave(offer)

    def is_read(self, offer: Offer) -> bool:
        left = self._unread.pop(offer, 0)
        if left > 1:
            self._unread[offer] = left - 1
        return left <= 1


def pretend(room: type[Room]) -> None:
    """Use this room as a GPU's for the rest of this process."""
    phi_updates.Room = room
    FragmentState.gpu = torch.device("cpu")
