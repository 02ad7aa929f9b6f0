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
from gossamer.protocol import events as ev
from gossamer.protocol.limits import PAYLOAD_CHUNK_BYTES_MIN
from gossamer.protocol.payloads import split_payload
from gossamer.protocol.records import Delta
from tests.node.full_disk import FullDisk, disk_of
from tests.protocol.builders import unsigned


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


class Core:
    """Signs what it is asked to, unless told not."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.sent: list[control.ControlMessage] = []
        self.signs = True

    def dispatch(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.Publish) and self.signs:
            body = event.body
            self.publisher.signed(
                unsigned(1, body.round, chunks=body.chunks, payload_bytes=body.payload_bytes)
            )

    publisher: Publisher

    def add(self, records: list[Delta], *, own: bool) -> None:
        """As the store of records."""
        assert own
        self.events.append(ev.Received(0, records[0].data))

    @property
    def signed(self) -> list[int]:
        return [event.body.round for event in self.events if isinstance(event, ev.Publish)]


@contextlib.asynccontextmanager
async def publishing(chunks: ChunkStore, core: Core) -> AsyncIterator[Publisher]:
    disk = disk_of(chunks._root, on_closed=lambda: core.dispatch(ev.Paused()))
    core.publisher = publisher = Publisher(chunks, core, disk, core.dispatch, core.sent.append)  # type: ignore[arg-type]
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
    async with asyncio.timeout(60):
        await publisher.drained()
    return area


def message(payload: bytes, round_: int = 5) -> control.Publish:
    return control.Publish(round_, 3, 100, 10, 2.0, "int4", len(payload))


async def test_a_delta_is_signed_then_durable_and_only_then_announced(chunks: ChunkStore) -> None:
    core = Core()
    payload = bytes(range(256)) * 2048  # two chunks
    assert len(payload) == 2 * PAYLOAD_CHUNK_BYTES_MIN
    async with publishing(chunks, core) as publisher:
        area = await publish(publisher, payload)
    event = core.events[0]
    assert [type(event) for event in core.events] == [ev.Publish, ev.Received, ev.Stored]
    assert core.events[-1].chunk == b"", "one of several"
    assert isinstance(event, ev.Publish)
    assert event.body.chunks == tuple(sha256(chunk).digest() for chunk in split_payload(payload))
    assert event.body.payload_bytes == len(payload)
    assert b"".join(chunks.get(blob) for blob in event.body.chunks) == payload
    assert core.sent == [control.Published(5)] and publisher.acknowledged == 5
    with pytest.raises(ValueError, match="released"):
        area[0]


async def test_what_the_core_does_not_sign_is_acknowledged_and_not_stored(chunks: ChunkStore) -> None:
    core = Core()
    async with publishing(chunks, core) as publisher:
        await publish(publisher, b"x", 5)
        core.signs = False
        await publish(publisher, b"y", 4)
    chunks.drop(sha256(b"x").digest())
    assert core.sent == [control.Published(5), control.Published(4)] and publisher.acknowledged == 5
    assert chunks.blobs == {sha256(b"x").digest()}, "what is signed stays until a sweep finds its record"
    assert [event.chunk for event in core.events if isinstance(event, ev.Stored)] == [b"x"]


async def test_a_full_disk_delays_what_trainers_left_behind(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PROBE_S", 0.01)
    FullDisk(chunks, 3, monkeypatch)
    core = Core()
    async with publishing(chunks, core) as publisher:
        for round_ in (1, 2):
            publisher.hand_in(message(b"n", round_), memoryview(bytearray(b"n")))
            assert publisher.handed_in == round_
        await publish(publisher, b"x", 3)
    assert [type(event) for event in core.events[:5]] == [ev.Publish, *[ev.Paused] * 3, ev.Received]
    assert core.signed == [1, 2, 3] and chunks.get(sha256(b"x").digest()) == b"x"


def test_a_step_is_overdue_by_how_long_steps_take() -> None:
    pulse = Pulse(100.0)
    assert pulse.overdue_s(100.0) == 0.0 and pulse.overdue_s(160.0) == 60.0
    pulse.note(500, 160.0)  # so many were done before it came
    assert pulse.usual_s == 0.0
    pulse.note(501, 180.0)
    assert pulse.usual_s == 20.0 * STRIDES
    pulse.note(501, 190.0)
    pulse.note(501, 300.0)
    assert pulse.overdue_s(300.0) == 120.0 - 20.0 * STRIDES, "reports without a step are none"


def test_who_evaluates_now_and_then_is_not_overdue_each_time() -> None:
    """With steps of a second and twenty minutes after each hundredth."""
    pulse, now, late = Pulse(0.0), 0.0, []
    for step in range(1000):
        pulse.note(step, now)
        length = 1200.0 if step % 100 == 99 else 1.0
        late.append(pulse.overdue_s(now + length))
        now += length
    assert late[99] > 1100.0, "nobody can know the first time"
    assert max(late[100:]) < 0.0
