"""Newer Phi: which offers a step applies, that they arrive as they were made, and how they reach a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.models.task import named_tensors
from gossamer.node.ipc.messages import SharedMemory
from gossamer.node.trainer import phi_updates
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.node.trainer.outer import FragmentState, OuterLoop
from gossamer.node.trainer.phi_updates import PhiUpdates
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import payload_length
from tests.node.gpus import Late

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
BUSY_CYCLES = 1_500_000_000
"""About a second of a GPU."""


@dataclass
class Link:
    """A daemon whose offers are made here."""

    offers: list[Offer] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)

    def take_offer(self) -> Offer | None:
        return self.offers.pop(0) if self.offers else None

    def took(self, offer: Offer) -> None:
        self.returned.append(offer.fragment)


class Node:
    """A model's outer loop, and the memory that its daemon offers Phi in."""

    def __init__(self, device: str, fragments: int = 2) -> None:
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2 * fragments))).to(device)
        self.manifest: Manifest = describe(self.model, name="t", codec="int4", fragments=fragments)
        self.outer = OuterLoop(dict(named_tensors(self.model)), self.manifest)
        self.link = Link()
        gpus = [state.gpu for state in self.outer.fragments]
        self.updates = PhiUpdates(cast(DaemonLink, self.link), self.manifest.plan().fragments, gpus)
        self.shared = SharedMemory.create(self.manifest)
        self.shared.close()  # the mapping stays

    def offer(self, index: int, rng: np.random.Generator, own_round: int = 0) -> tuple[Offer, np.ndarray]:
        """A fragment of some other Phi, and its values."""
        area = self.shared.phi(self.outer.fragments[index].fragment)
        area[:] = rng.integers(-(2**26), 2**26, area.size, dtype=np.int32)
        offer = Offer(index, 1, own_round, 1, self.shared)
        self.link.offers.append(offer)
        return offer, area.copy()

    def step(self, round_: int | None = None) -> list[int]:
        """Apply what a step would; returns the fragments."""
        offers = self.updates.for_step(round_)
        for offer in offers:
            self.outer.apply(offer.fragment, self.updates.values(offer), offer.merged_round)
            self.updates.done(offer)
        return [offer.fragment for offer in offers]

    def held(self, index: int) -> np.ndarray:
        theta = [tensor.detach().flatten() for tensor in self.outer.fragments[index].theta]
        return torch.cat(theta).cpu().numpy()


@pytest.fixture
def node() -> Node:
    return Node("cpu", fragments=8)


def offered(node: Node, *fragments: int) -> None:
    for fragment in fragments:
        node.offer(fragment, np.random.default_rng(fragment))


# -- which offers a step applies


def test_each_step_applies_the_oldest_offer(node: Node) -> None:
    offered(node, 2, 0, 1)
    assert [node.step() for _ in range(4)] == [[2], [0], [1], []]
    offered(node, 3, 4)
    assert node.step(round_=7) == [3], "also one that publishes another fragment"


def test_what_is_published_is_up_to_date_and_what_came_before_is_applied_too(node: Node) -> None:
    offered(node, 0, 3, 5)
    assert node.step(round_=3) == [0, 3]
    assert node.step() == [5]


def test_offers_that_are_forgotten_are_not_given_back(node: Node) -> None:
    """They are of a connection that is over."""
    offered(node, 0, 1)
    assert len(node.updates.all()) == 2
    node.updates.forget()
    assert node.updates.all() == [] and node.link.returned == []


# -- how they reach the model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_what_is_applied_is_what_was_offered(device: str, rng: np.random.Generator) -> None:
    """However the memory is used again once it is given back."""
    node = Node(device)
    for turn in range(40):
        _, values = node.offer(turn % 2, rng)
        while not node.step():
            time.sleep(0.0001)
        while len(node.link.returned) <= turn:
            node.updates.all()
        node.shared.phi(node.outer.fragments[turn % 2].fragment).fill(7)
        assert np.allclose(node.held(turn % 2), values / 2**24, atol=1e-6)


def test_on_the_cpu_nothing_is_copied(node: Node, rng: np.random.Generator) -> None:
    offer, _ = node.offer(0, rng)
    area = node.shared.phi(node.outer.fragments[0].fragment)
    assert node.updates.values(offer).data_ptr() == area.ctypes.data


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
def test_a_step_that_applies_phi_does_not_wait_for_a_busy_gpu(rng: np.random.Generator) -> None:
    node = Node("cuda")
    node.offer(0, rng)
    while not node.step():  # all code is loaded, and the memory pinned
        time.sleep(0.001)
    _, values = node.offer(1, rng)
    loss = next(node.model.parameters()).sum()
    with busy_gpu() as behind:
        node.outer.step(10, loss)
        deadline = time.monotonic() + 30
        while not node.step():
            assert time.monotonic() < deadline, "it never arrives"
        assert not behind.query()
        assert node.link.returned == [0], "a busy GPU has still to read it"
    assert np.allclose(node.held(1), values / 2**24, atol=1e-6)
    node.updates.all()
    assert node.link.returned == [0, 1]


@NEEDS_CUDA
def test_a_step_that_copies_a_share_of_a_checkpoint_does_not_wait(tmp_path: Path) -> None:
    node = Node("cuda")
    writer = CheckpointWriter(tmp_path / "c")
    with busy_gpu() as behind:
        writer.step(node.outer, [], Progress(1, 1))
        assert not behind.query()
    while not (tmp_path / "c").exists():
        writer.step(node.outer, [], Progress(1, 1))
    writer.close()


@NEEDS_CUDA
def test_a_step_that_publishes_waits_for_the_payload_first_and_then_only_reads_how_far_it_went() -> None:
    node = Node("cuda")
    area = memoryview(bytearray(payload_length(CODECS["int4"], node.manifest.plan().fragments[0])))
    node.outer.publish(0, 2, area)
    node.outer.step(10, next(node.model.parameters()).sum())
    pieces = sum(len(part.pieces) for part in node.outer.fragments[0].parts)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as warned:
            node.outer.publish(0, 4, area)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(warned) <= 1 + 2 * pieces, [str(one.message) for one in warned]


# -- the same without a GPU


def test_memory_is_given_back_once_a_gpu_has_read_it(like_a_gpu: None, rng: np.random.Generator) -> None:
    node = Node("cpu")
    (_, first), (_, second) = node.offer(0, rng), node.offer(1, rng)
    assert node.step(round_=3) == [0, 1] and node.link.returned == []
    assert np.allclose(node.held(0), first / 2**24, atol=1e-6)
    assert np.allclose(node.held(1), second / 2**24, atol=1e-6)
    while len(node.link.returned) < 2:
        assert node.updates.all() == []
    assert node.link.returned == [0, 1]


class Runtime:
    """CUDA's runtime, as far as memory is pinned by it."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.pinned = answer, set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size > 0 and flags == phi_updates.PORTABLE
        self.pinned.add(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("answer", [0, 2])
def test_each_daemons_memory_is_pinned_once_and_unpinned_before_it_goes(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
    answer: int,
) -> None:
    """A view of it may be held for longer: a delta that is handed over to the next daemon."""
    caplog.set_level("INFO", "gossamer")
    runtime = Runtime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(phi_updates, "_end_of_work", Late)
    monkeypatch.setattr(FragmentState, "gpu", torch.device("cpu"))
    node = Node("cpu")
    view = node.shared.payload
    for is_new in (False, False, True):
        if is_new:
            node.shared = SharedMemory.create(node.manifest)
            node.shared.close()
        node.offer(0, rng)
        assert node.step() == [0]
        node.updates.close()
        while node.updates._read:
            node.updates.all()
        gc.collect()
        here = torch.frombuffer(node.shared.whole, dtype=torch.uint8).data_ptr()
        assert here in runtime.pinned and (len(runtime.pinned) == 1 or answer)
    assert caplog.text.count(f"no memory can be pinned (CUDA error {answer})") == (2 if answer else 0)
    assert bytes(view[:1]) == bytes(1)
