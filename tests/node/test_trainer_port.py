"""`trainer_port`: a delta is stored before it is signed; whether its trainer still steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.storage import disk as disk_module
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.daemon.trainer_port import STRIDES, Publisher, Pulse
from gossamer.node.ipc import messages as control
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.limits import PAYLOAD_CHUNK_BYTES_MIN
from gossamer.protocol.payloads import split_payload
from tests.node.full_disk import FullDisk, disk_of
from tests.node.trainer_side import until


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


class Core:
    """Signs what it is asked to, unless told not."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.told: list[control.ControlMessage] = []
        self.signs = True

    def dispatch(self, event: ev.Event) -> list[fx.Effect]:
        self.events.append(event)
        return [fx.Store(None, own=True)] if self.signs else []  # type: ignore[arg-type]

    @property
    def signed(self) -> list[int]:
        return [event.body.round for event in self.events if isinstance(event, ev.Publish)]


@contextlib.asynccontextmanager
async def publishing(chunks: ChunkStore, core: Core) -> AsyncIterator[Publisher]:
    disk = disk_of(chunks._root, on_closed=lambda: core.dispatch(ev.Paused()))
    publisher = Publisher(chunks, disk, core.dispatch, core.told.append)
    tasks = [asyncio.create_task(work.run()) for work in (publisher, disk)]
    try:
        yield publisher
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def publish(publisher: Publisher, payload: bytes, round_: int = 5) -> memoryview:
    """Hand a payload in, and wait until that is signed; returns where it was."""
    area = memoryview(bytearray(payload))
    publisher.hand_in(message(payload, round_), area)
    async with asyncio.timeout(10):
        await publisher.drained()
    return area


def message(payload: bytes, round_: int = 5) -> control.Publish:
    return control.Publish(round_, 3, 100, 10, 2.0, "int4", len(payload))


async def test_publishing_stores_before_it_signs(chunks: ChunkStore) -> None:
    core = Core()
    payload = bytes(range(256)) * 2048  # two chunks
    assert len(payload) == 2 * PAYLOAD_CHUNK_BYTES_MIN
    async with publishing(chunks, core) as publisher:
        area = await publish(publisher, payload)
    (event,) = core.events
    assert isinstance(event, ev.Publish)
    assert event.body.chunks == tuple(sha256(chunk).digest() for chunk in split_payload(payload))
    assert event.body.payload_bytes == len(payload)
    assert b"".join(chunks.get(blob) for blob in event.body.chunks) == payload
    assert not core.told and not publisher.acknowledged, "once its record is durable"
    with pytest.raises(ValueError, match="released"):
        area[0]


async def test_what_the_core_does_not_sign_is_done_with_at_once(chunks: ChunkStore) -> None:
    core = Core()
    core.signs = False
    async with publishing(chunks, core) as publisher:
        await publish(publisher, b"x")
    assert core.told == [control.Published(5)] and publisher.acknowledged == 5


async def test_what_was_acknowledged_stays_so_when_an_earlier_one_is_handed_over_again(
    chunks: ChunkStore,
) -> None:
    core = Core()
    core.signs = False
    async with publishing(chunks, core) as publisher:
        await publish(publisher, b"x", 5)
        await publish(publisher, b"y", 4)
    assert core.told == [control.Published(5), control.Published(4)] and publisher.acknowledged == 5


async def test_chunks_of_what_is_not_signed_are_not_reserved_but_for_a_delta_before(
    chunks: ChunkStore,
) -> None:
    """A trainer that attaches anew hands over again what is signed, and is not on disk yet."""
    core = Core()
    async with publishing(chunks, core) as publisher:
        await publish(publisher, b"x")
        core.signs = False
        for payload in (b"x", b"y"):
            await publish(publisher, payload)
            chunks.drop_unreserved(sha256(payload).digest())
    assert sha256(b"x").digest() in chunks
    assert sha256(b"y").digest() not in chunks


async def test_a_full_disk_delays_publishing(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.01)
    FullDisk(chunks, 3, monkeypatch)
    core = Core()
    async with publishing(chunks, core) as publisher_:
        await publish(publisher_, b"x")
    assert [type(event) for event in core.events] == [ev.Paused] * 3 + [ev.Publish]
    assert chunks.get(sha256(b"x").digest()) == b"x"


async def test_what_trainers_left_behind_waits_for_the_disk_up_to_a_bound(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.01)
    disk = FullDisk(chunks, 10**6, monkeypatch)
    core = Core()
    async with publishing(chunks, core) as publisher_:
        publisher_.hand_in(message(b"1", 1), memoryview(bytearray(b"1")))
        await until(lambda: core.events)  # it is being stored
        for round_ in (2, 3):
            publisher_.hand_in(message(b"n", round_), memoryview(bytearray(b"n")))
            assert publisher_.handed_in == round_
        disk.left = 0
        async with asyncio.timeout(10):
            await publisher_.drained()
    assert core.signed == [1, 3]
    assert "the delta of round 2 is lost" in caplog.text


def test_a_step_is_overdue_by_how_long_steps_take() -> None:
    pulse = Pulse()
    pulse.begin(100.0)
    assert pulse.overdue_s(100.0) == 0.0 and pulse.overdue_s(160.0) == 60.0
    pulse.note(500, 160.0)  # so many were done before it came
    assert pulse.usual_s == 0.0
    pulse.note(501, 180.0)
    assert pulse.usual_s == 20.0 * STRIDES
    pulse.note(501, 190.0)
    pulse.note(501, 300.0)
    assert pulse.overdue_s(300.0) == 120.0 - 20.0 * STRIDES, "reports without a step are none"


def test_nothing_is_overdue_before_a_trainer_has_come() -> None:
    assert Pulse().overdue_s(1e6) == 0.0


def test_who_goes_back_to_its_checkpoint_steps_too() -> None:
    pulse = Pulse()
    pulse.begin(0.0)
    pulse.note(500, 1.0)
    pulse.note(480, 3.0)
    assert pulse.overdue_s(3.0) == -2.0 * STRIDES


def test_who_evaluates_now_and_then_is_not_overdue_each_time() -> None:
    """With steps of a second and twenty minutes after each hundredth."""
    pulse, now, late = Pulse(), 0.0, []
    pulse.begin(now)
    for step in range(1000):
        pulse.note(step, now)
        length = 1200.0 if step % 100 == 99 else 1.0
        late.append(pulse.overdue_s(now + length))
        now += length
    assert late[99] > 1100.0, "nobody can know the first time"
    assert max(late[100:]) < 0.0
