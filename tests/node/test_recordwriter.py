"""`recordwriter`: batches, our own first stored and then spoken of, and a disk that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from gossamer.node.daemon.storage import records as recordwriter
from gossamer.node.daemon.storage.records import RecordWriter
from gossamer.protocol.errors import StorageError
from gossamer.protocol.records import Delta
from tests.protocol.builders import unsigned


class FakeStore:
    """Notes what it is given, and fails when told."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[Delta], bool]] = []
        self.failures = 0

    def add(self, deltas: Iterable[Delta], *, durable: bool) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("the disk is full")
        self.batches.append((list(deltas), durable))


class Setup:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.told: list[Delta] = []
        self.failed = 0
        self.writer = RecordWriter(self.store, self._told, self._note_failure)  # type: ignore[arg-type]

    def _note_failure(self) -> None:
        self.failed += 1

    def _told(self, delta: Delta) -> None:
        assert any(delta in batch for batch, _ in self.store.batches), "told before it was stored"
        self.told.append(delta)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup()
    task = asyncio.create_task(setup.writer.run())
    yield setup
    task.cancel()
    await asyncio.wait([task])


async def test_what_waits_is_written_together(setup: Setup) -> None:
    deltas = [unsigned(n, 1) for n in range(100)]
    for delta in deltas:
        setup.writer.add(delta, own=False)
    await setup.writer.drained()
    assert setup.store.batches == [(deltas, False)]
    assert setup.told == []


async def test_our_own_are_durable_before_anyone_is_told(setup: Setup) -> None:
    other, own = unsigned(1, 1), unsigned(2, 1)
    setup.writer.add(other, own=False)
    setup.writer.add(own, own=True)
    await setup.writer.drained()
    assert setup.store.batches == [([other, own], True)]
    assert setup.told == [own]


async def test_a_disk_that_fails_is_tried_again_and_nothing_is_lost(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recordwriter, "RETRY_S", 0.01)
    setup.store.failures = 3
    first, second = unsigned(1, 1), unsigned(1, 2)
    setup.writer.add(first, own=True)
    await asyncio.sleep(0)
    setup.writer.add(second, own=True)
    async with asyncio.timeout(5):
        await setup.writer.drained()
    assert setup.told == [first, second]
    assert [delta for batch, _ in setup.store.batches for delta in batch] == [first, second]
    assert setup.failed == 3
    assert caplog.text.count("the disk is full") == 1, "which may be so for days"


async def test_whoever_brings_too_much_waits(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordwriter, "BACKLOG_MAX", 3)
    monkeypatch.setattr(recordwriter, "RETRY_S", 0.2)
    setup.store.failures = 1
    for n in range(5):
        setup.writer.add(unsigned(n, 1), own=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await setup.writer.room()
    async with asyncio.timeout(5):
        await setup.writer.room()
        await setup.writer.drained()
    assert sum(len(batch) for batch, _ in setup.store.batches) == 5


async def test_added_while_telling_is_written_too(setup: Setup) -> None:
    later = unsigned(9, 9)
    setup.writer._on_own_stored = lambda delta: setup.writer.add(later, own=False)
    setup.writer.add(unsigned(1, 1), own=True)
    await setup.writer.drained()
    assert setup.store.batches[-1][0] == [later]
