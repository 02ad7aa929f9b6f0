"""`publisher`: stored before it is signed; a full disk delays, and loses nothing."""

from __future__ import annotations

import errno
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.ipc import control, publisher
from gossamer.node.ipc.publisher import Publisher
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol import effects as fx
from gossamer.protocol.chunks import split_payload
from gossamer.protocol.limits import PAYLOAD_CHUNK_BYTES_MIN
from tests.node.full_disk import FullDisk


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


class Core:
    """Signs what it is asked to, unless told not."""

    def __init__(self) -> None:
        self.events: list[fx.Event] = []
        self.signs = True

    def dispatch(self, event: fx.Event) -> list[fx.Effect]:
        self.events.append(event)
        return [fx.Store(None, own=True)] if self.signs else []  # type: ignore[arg-type]


def message(payload: bytes) -> control.Publish:
    return control.Publish(5, 3, 100, 10, 2.0, "int4", len(payload))


async def test_publishing_stores_before_it_signs(chunks: ChunkStore) -> None:
    core = Core()
    payload = bytes(range(256)) * 2048  # two chunks
    assert len(payload) == 2 * PAYLOAD_CHUNK_BYTES_MIN
    area = memoryview(bytearray(payload))
    assert await Publisher(chunks, core.dispatch).publish(message(payload), area)
    (event,) = core.events
    assert isinstance(event, fx.Publish)
    assert event.body.chunks == tuple(sha256(chunk).digest() for chunk in split_payload(payload))
    assert event.body.payload_bytes == len(payload)
    assert b"".join(chunks.get(blob) for blob in event.body.chunks) == payload
    with pytest.raises(ValueError, match="released"):
        area[0]


async def test_what_the_core_does_not_sign_is_told(chunks: ChunkStore) -> None:
    core = Core()
    core.signs = False
    area = memoryview(bytearray(b"x"))
    assert not await Publisher(chunks, core.dispatch).publish(message(b"x"), area)


async def test_chunks_of_what_is_not_signed_are_not_reserved_but_for_a_delta_before(
    chunks: ChunkStore,
) -> None:
    """A trainer that attaches anew hands over again what is signed, and is not on disk yet."""
    core = Core()
    publisher = Publisher(chunks, core.dispatch)
    await publisher.publish(message(b"x"), memoryview(bytearray(b"x")))
    core.signs = False
    for payload in (b"x", b"y"):
        await publisher.publish(message(payload), memoryview(bytearray(payload)))
        chunks.drop_unreserved(sha256(payload).digest())
    assert sha256(b"x").digest() in chunks
    assert sha256(b"y").digest() not in chunks


async def test_a_full_disk_pauses_publishing(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "DISK_RETRY_S", 0.01)
    FullDisk(chunks, 3, monkeypatch)
    core = Core()
    await Publisher(chunks, core.dispatch).publish(message(b"x"), memoryview(bytearray(b"x")))
    assert [type(event) for event in core.events] == [fx.Paused] * 3 + [fx.Publish]
    assert caplog.text.count("No space left on device; publishing pauses until there is space") == 1
    assert chunks.get(sha256(b"x").digest()) == b"x"
    FullDisk(chunks, 1, monkeypatch, errno.EROFS)
    await Publisher(chunks, core.dispatch).publish(message(b"x"), memoryview(bytearray(b"x")))
    assert "Read-only file system; publishing pauses until the folder can be written to" in caplog.text
