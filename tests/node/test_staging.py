"""`staging`: what is taken over is what was offered, and nothing waits for its way to a GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.models.task import named_tensors
from gossamer.node.ipc.shared_memory import SharedMemory
from gossamer.node.trainer import phi_updates as staging
from gossamer.node.trainer.checkpoint import CheckpointWriter
from gossamer.node.trainer.daemon_link import Offer
from gossamer.node.trainer.fragments import FragmentState
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.outer import OuterLoop
from gossamer.node.trainer.phi_updates import Staging
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads.payload import payload_length

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
    with busy_gpu() as behind:
        writer.step(node.outer, [], Progress(1, 1))
        assert not behind.query()
    while not (tmp_path / "c").exists():
        writer.step(node.outer, [], Progress(1, 1))
    writer.close()


@NEEDS_CUDA
def test_a_step_that_publishes_waits_for_few_answers() -> None:
    """The payload, and whether the step was taken; each is a halt."""
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


# -- the same without a GPU: what it is told, in which order


@dataclass
class Event:
    """Reached when a test says so."""

    is_reached: bool = False
    recorded: int = 0

    def record(self, stream: object = None) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


@dataclass
class Cuda:
    """Stands for torch.cuda: copies at once, and remembers in which stream, after waiting for what."""

    monkeypatch: pytest.MonkeyPatch
    answer: int = 0
    """What pinning comes to."""
    pinned: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    current: str = "loop"

    def __post_init__(self) -> None:
        for name in ("Stream", "Event", "current_stream", "stream", "device", "cudart"):
            self.monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        self.monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        self.monkeypatch.setattr(FragmentState, "gpu", torch.device("cpu"))
        copy = torch.Tensor.copy_

        def copied(target: torch.Tensor, source: torch.Tensor, **how: bool) -> torch.Tensor:
            self.told.append(f"copy in {self.current}")
            return copy(target, source, **how)

        self.monkeypatch.setattr(torch.Tensor, "copy_", copied)

    def Event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def Stream(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name="beside", wait_event=lambda event: self.told.append(f"beside waits, of {event.recorded}")
        )

    def current_stream(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name="loop", wait_stream=lambda stream: self.told.append(f"loop waits for {stream.name}")
        )

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def device(self, _: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert size > 0 and flags == staging.PORTABLE
        if not self.answer:
            self.pinned.append(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_there_is_room_for_one_that_is_sent_ahead(cuda: Cuda, rng: np.random.Generator) -> None:
    node = Node("cpu")
    (first, values), (second, _) = node.offer(0, rng), node.offer(1, rng)
    cuda.told.clear()
    for _ in range(3):
        node.staging.send_ahead(first)
        node.staging.send_ahead(second)
        assert not node.staging.has_come(first) and not node.staging.has_come(second)
    assert cuda.told == ["beside waits, of 1", "copy in beside"]
    cuda.events[-1].is_reached = True
    assert node.staging.has_come(first) and not node.staging.has_come(second)
    assert np.array_equal(node.staging.values(first).numpy(), values)
    assert cuda.told[2:] == ["loop waits for beside"], "it is not copied again"
    node.staging.leave(first)
    node.staging.send_ahead(second)
    assert cuda.told[3:] == ["beside waits, of 2", "copy in beside"], "behind what has read the first"


def test_one_that_was_not_sent_ahead_is_copied_in_the_loops_own_stream(
    cuda: Cuda, rng: np.random.Generator
) -> None:
    node = Node("cpu")
    (first, _), (second, values) = node.offer(0, rng), node.offer(1, rng)
    node.staging.send_ahead(first)
    node.staging.leave(first)
    cuda.told.clear()
    assert np.array_equal(node.staging.values(second).numpy(), values)
    assert cuda.told == ["loop waits for beside", "copy in loop"]


def test_memory_is_read_once_the_copy_has_ended(cuda: Cuda, rng: np.random.Generator) -> None:
    """Also of one that was outdated on its way."""
    node = Node("cpu")
    (first, _), (second, _) = node.offer(0, rng), node.offer(1, rng)
    assert node.staging.is_read(first), "nothing has begun to"
    node.staging.send_ahead(first)
    node.staging.leave(first)
    node.staging.values(second)
    assert not node.staging.is_read(first) and not node.staging.is_read(second)
    cuda.events[-2].is_reached = True
    assert node.staging.is_read(first) and not node.staging.is_read(second)
    node.staging.close()
    assert cuda.events[-1].is_reached and node.staging.is_read(second)


def test_each_daemons_memory_is_pinned_once_and_unpinned_before_it_goes(
    cuda: Cuda, rng: np.random.Generator
) -> None:
    """A view of it may be held for longer: a delta that is handed over to the next daemon."""
    node = Node("cpu")
    view = node.shared.payload
    for turn in range(4):
        offer, _ = node.offer(turn % 2, rng)
        node.staging.values(offer)
        node.staging.leave(offer)
        cuda.events[-1].is_reached = True
        assert node.staging.is_read(offer)
    assert cuda.pinned == [torch.frombuffer(node.shared.whole, dtype=torch.uint8).data_ptr()]
    node.shared = SharedMemory.create(node.manifest)
    offer, _ = node.offer(0, rng)
    node.staging.values(offer)
    gc.collect()
    assert cuda.pinned == [torch.frombuffer(node.shared.whole, dtype=torch.uint8).data_ptr()]
    assert bytes(view[:1]) == bytes(1)


def test_where_nothing_can_be_pinned_that_is_said(
    cuda: Cuda, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gossamer")
    cuda.answer = 2
    node = Node("cpu")
    offer, values = node.offer(0, rng)
    assert np.array_equal(node.staging.values(offer).numpy(), values)
    (said,) = [text for text in caplog.messages if "pinned" in text]
    assert "no memory can be pinned (CUDA error 2)" in said
    del node, offer
    gc.collect()
    assert cuda.pinned == []


@NEEDS_CUDA
def test_training_goes_on_where_nothing_can_be_pinned(rng: np.random.Generator) -> None:
    """CUDA tells of a failure once more at the next call, which is another's: here of pinning it twice."""
    node, other = Node("cuda"), Node("cuda")
    node.staging.values(node.offer(0, rng)[0])
    other.shared = node.shared
    offer, values = other.offer(1, rng)
    other.outer.apply(1, other.staging.values(offer), 1)
    held = torch.cat([theta.detach().flatten() for theta in other.outer.fragments[1].theta]).cpu().numpy()
    assert np.allclose(held, values / 2**24, atol=1e-6)
