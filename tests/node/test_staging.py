"""`staging`: what is taken over is what was offered, and nothing waits for its way to a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.models.task import named_tensors
from gossamer.node.ipc.daemon_link import Offer
from gossamer.node.ipc.shared import SharedMemory
from gossamer.node.training import staging
from gossamer.node.training.checkpoint import Progress
from gossamer.node.training.checkpointwriter import CheckpointWriter
from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.staging import Staging
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payload import payload_length

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
BUSY_CYCLES = 1_500_000_000
"""About a second of a GPU."""


class Node:
    """A model's outer loop, and the memory that its daemon offers Phi in."""

    def __init__(self, device: str, fragments: int = 2) -> None:
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
        self.manifest: Manifest = describe(self.model, name="t", codec="int4", fragments=fragments)
        self.outer = OuterLoop(dict(named_tensors(self.model)), self.manifest)
        self.staging = Staging(self.outer.fragments)
        self.shared = SharedMemory.create(self.manifest)
        self.shared.close()  # the mapping stays

    def offer(self, index: int, rng: np.random.Generator, own_round: int = 0) -> tuple[Offer, np.ndarray]:
        """A fragment of some other Phi, and its values."""
        area = self.shared.phi(self.outer.fragments[index].fragment)
        area[:] = rng.integers(-(2**26), 2**26, area.size, dtype=np.int32)
        return Offer(index, 1, own_round, 1, self.shared), area.copy()


def until_has_come(node: Node, offer: Offer) -> None:
    deadline = time.monotonic() + 30
    while not node.staging.has_come(offer):
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.001)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_taken_over_is_what_was_offered(device: str, rng: np.random.Generator) -> None:
    """However the memory is used again once it is read."""
    node = Node(device)
    for turn in range(40):
        offer, values = node.offer(turn % 2, rng)
        if turn % 3:
            node.staging.send_ahead(offer)
        if turn % 3 == 2:
            until_has_come(node, offer)
        found = node.staging.values(offer).clone()
        node.staging.leave(offer)
        while not node.staging.is_read(offer):
            time.sleep(0.0001)
        node.shared.phi(node.outer.fragments[turn % 2].fragment).fill(7)
        assert np.array_equal(found.cpu().numpy(), values)


@pytest.mark.parametrize("device", DEVICES)
def test_one_that_was_sent_ahead_and_is_outdated_is_in_nobodys_way(
    device: str, rng: np.random.Generator
) -> None:
    node = Node(device)
    (first, _), (second, values) = node.offer(0, rng), node.offer(1, rng)
    node.staging.send_ahead(first)
    node.staging.send_ahead(second)  # there is room for one
    node.staging.leave(first)
    node.staging.send_ahead(second)
    until_has_come(node, second)
    assert np.array_equal(node.staging.values(second).cpu().numpy(), values)


def test_on_the_cpu_nothing_is_copied(rng: np.random.Generator) -> None:
    node = Node("cpu")
    offer, _ = node.offer(0, rng)
    assert node.staging.has_come(offer)
    area = node.shared.phi(node.outer.fragments[0].fragment)
    assert node.staging.values(offer).data_ptr() == area.ctypes.data
    assert node.staging.is_read(offer)


@contextmanager
def busy_gpu() -> Iterator[torch.cuda.Event]:
    """A GPU that has much to do, and an event behind that. Calls that wait for it fail."""
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield behind
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_CUDA
def test_what_is_sent_ahead_does_not_wait_for_what_the_gpu_is_at(rng: np.random.Generator) -> None:
    node = Node("cuda")
    node.staging.values(node.offer(0, rng)[0])  # the memory is pinned by now
    offer, values = node.offer(1, rng)
    with busy_gpu() as behind:
        node.staging.send_ahead(offer)
        until_has_come(node, offer)
        assert not behind.query()
    assert np.array_equal(node.staging.values(offer).cpu().numpy(), values)


@NEEDS_CUDA
def test_memory_is_kept_while_a_busy_gpu_has_still_to_read_it(rng: np.random.Generator) -> None:
    node = Node("cuda")
    offer, values = node.offer(1, rng)
    with busy_gpu() as behind:
        found = node.staging.values(offer).clone()
        node.staging.leave(offer)
        assert not node.staging.is_read(offer) and not behind.query()
    assert np.array_equal(found.cpu().numpy(), values)
    assert node.staging.is_read(offer)


@NEEDS_CUDA
def test_a_step_that_takes_phi_over_does_not_wait(rng: np.random.Generator) -> None:
    node = Node("cuda")
    offer, values = node.offer(1, rng)
    node.outer.apply(1, torch.zeros(values.size, dtype=torch.int32, device="cuda"), 0)  # all code is loaded
    loss = next(node.model.parameters()).sum()
    with busy_gpu() as behind:
        node.outer.step(10, loss)
        node.outer.apply(1, node.staging.values(offer), 1)
        node.staging.leave(offer)
        assert not behind.query()
    held = torch.cat([theta.detach().flatten() for theta in node.outer.fragments[1].theta]).cpu().numpy()
    assert np.allclose(held, values / 2**24, atol=1e-6)


@NEEDS_CUDA
def test_a_step_that_copies_a_share_of_a_checkpoint_does_not_wait(tmp_path: Path) -> None:
    node = Node("cuda")
    writer = CheckpointWriter(tmp_path / "c")
    writer.begin(node.outer, [])
    with busy_gpu() as behind:
        writer.advance(Progress(1, 1), wait=True)
        assert not behind.query()
    while not (tmp_path / "c").exists():
        writer.advance(Progress(1, 1), wait=True)
    writer.close()


@NEEDS_CUDA
def test_a_step_that_publishes_waits_for_few_answers() -> None:
    """How far it reaches, and whether it has moved; each is a halt."""
    node = Node("cuda")
    area = memoryview(bytearray(payload_length(CODECS["int4"], node.manifest.plan().fragments[0])))
    node.outer.publish(0, 2, area)
    node.outer.step(10, next(node.model.parameters()).sum())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as told:
            node.outer.publish(0, 4, area)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(told) <= 2, [str(one.message) for one in told]


@NEEDS_CUDA
def test_memory_is_pinned_as_long_as_it_is_known(rng: np.random.Generator) -> None:
    """Each daemon that is started again has memory of its own."""
    node = Node("cuda")
    offer, _ = node.offer(0, rng)
    node.staging.values(offer)
    node.staging.leave(offer)
    torch.cuda.synchronize()
    assert node.staging.is_read(offer)
    mapping = torch.frombuffer(node.shared.whole, dtype=torch.uint8)
    assert mapping.is_pinned()
    node.shared = SharedMemory.create(node.manifest)
    offer, values = node.offer(0, rng)
    assert np.array_equal(node.staging.values(offer).cpu().numpy(), values)
    gc.collect()
    assert not mapping.is_pinned()


@dataclass
class Runtime:
    """What CUDA is asked to pin."""

    answer: int = 0
    pinned: list[int] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size > 0 and flags == staging.PORTABLE
        if not self.answer:
            self.pinned.append(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


def test_memory_is_unpinned_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of it may be held for longer: a delta that is handed over to the next daemon."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    shared = Node("cpu").shared
    view = shared.payload
    staging._pin(shared)
    assert runtime.pinned == [torch.frombuffer(shared.whole, dtype=torch.uint8).data_ptr()]
    del shared
    gc.collect()
    assert runtime.pinned == [] and bytes(view[:1]) == bytes(1)


def test_where_nothing_can_be_pinned_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gossamer")
    runtime = Runtime(answer=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    shared = Node("cpu").shared
    staging._pin(shared)
    del shared
    gc.collect()
    (said,) = caplog.messages
    assert "no memory can be pinned (CUDA error 2)" in said
