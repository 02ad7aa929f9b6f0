"""Fixtures that tests of the node share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from gossamer.node.trainer import daemon_link, encoders
from gossamer.protocol.records import Delta
from tests.node.gpus import pretend
from tests.node.wires import End, Ends, Pair, linked, listening
from tests.protocol.builders import identity, random_delta

GPUS = ["cuda"] if torch.cuda.is_available() else []


@pytest.fixture
def deltas(rng: np.random.Generator) -> list[Delta]:
    """Some records, newest first."""
    return [random_delta(rng, identity(n), round_)[0] for round_ in (3, 2, 1) for n in range(3)]


@pytest.fixture(params=["cpu", *GPUS])
def on_each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run with new tensors on the CPU by default, and once more on a GPU if there is one."""
    with _tensors_on(request.param, monkeypatch):
        yield


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are processed as on a GPU."""
    pretend(monkeypatch.setattr)


@pytest.fixture(params=[True, False], ids=["tls", "plaintext"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    """Two nodes' networks, once with TLS and once without."""
    dialler, listener = End(1, tls=request.param), End(2, tls=request.param)
    async with listening(dialler, listener):
        yield dialler, listener


@pytest.fixture
async def secure() -> AsyncIterator[Ends]:
    """Two nodes' networks, with TLS."""
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        yield dialler, listener


@pytest.fixture
async def pair(ends: Ends) -> Pair:
    return *ends, *await linked(*ends)


@pytest.fixture
async def secure_pair(secure: Ends) -> Pair:
    return *secure, *await linked(*secure)


@pytest.fixture
def reconnects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that has lost its daemon tries to reconnect at once."""
    monkeypatch.setattr(daemon_link, "RECONNECT_S", 0.02)


@contextmanager
def _tensors_on(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    # so that the same tensors are grouped as on the CPU
    monkeypatch.setattr(encoders, "SMALL_NUMEL_DEVICE", encoders.SMALL_NUMEL)
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
