"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gossamer.node.ipc.daemon_link import Offer
from gossamer.node.ipc.shared import SharedMemory
from gossamer.node.training import buckets, staging
from gossamer.node.training.fragmentstate import FragmentState

GPUS = ["cuda"] if torch.cuda.is_available() else []


class Room:
    """Of a GPU that copies at once."""

    is_free = True

    def __init__(self, _: torch.device, numel: int) -> None:
        self.memory = torch.empty(numel, dtype=torch.int32, device="cpu")

    def send_ahead(self, offer: Offer, source: Tensor) -> None:
        self.values(offer, source)

    def has_come(self, _: Offer) -> bool:
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


@pytest.fixture(params=["cpu", *GPUS])
def on_each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of which a test does not say where are on the CPU, and once more on a GPU if there is one."""
    with _tensors_on(request.param, monkeypatch):
        yield


@pytest.fixture(params=["cpu", "like-a-gpu", *GPUS])
def also_like_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same, and in between they are on the CPU, and worked through as on a GPU."""
    if request.param == "like-a-gpu":
        monkeypatch.setattr(FragmentState, "gpu", torch.device("cpu"))
        monkeypatch.setattr(staging, "_Room", Room)
    with _tensors_on("cpu" if request.param == "like-a-gpu" else request.param, monkeypatch):
        yield


@contextmanager
def _tensors_on(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    # The same tensors go together as on the CPU.
    monkeypatch.setattr(buckets, "SMALL_NUMEL_DEVICE", buckets.SMALL_NUMEL)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
