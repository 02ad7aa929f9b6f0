"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gossamer.node.training import buckets
from gossamer.node.training.fragmentstate import FragmentState

DEVICES = ["cpu", "like-a-device", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def on_each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of which a test does not say where are on the CPU, and once more on a GPU if there is one.

    In between they are on the CPU, and worked through as on a device.
    """
    if request.param == "like-a-device":
        monkeypatch.setattr(FragmentState, "device", torch.device("cpu"))
    if request.param != "cuda":
        yield
        return
    # The same tensors go together as on the CPU.
    monkeypatch.setattr(buckets, "SMALL_NUMEL_DEVICE", buckets.SMALL_NUMEL)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
