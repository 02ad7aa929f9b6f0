"""`publisher` and `transfers`: a full disk delays, and loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from gossamer.node.ipc import control, publisher
from gossamer.node.ipc.publisher import Publisher
from gossamer.node.network import keeping, local_chunks, transfers, uplink
from gossamer.node.network.local_chunks import LocalChunks
from gossamer.node.network.policing import Policing
from gossamer.node.network.transfers import Transfers
from gossamer.node.network.uploads import Uploads
from gossamer.node.phi import snapshots
from gossamer.node.phi.snapshots import SnapshotShelf
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol import effects as fx
from gossamer.protocol import messages as msg
from gossamer.protocol.chunks import split_payload
from gossamer.protocol.errors import PayloadError, RefusedError
from gossamer.protocol.greylist import Offence
from gossamer.protocol.history import Claim
from gossamer.protocol.limits import (
    ASKS_PER_LINK_MAX,
    FETCHES_MAX,
    PAYLOAD_CHUNK_BYTES_MIN,
    SMALL_CHUNK_BYTES,
    UPLOADS_MAX,
)
from tests.node.trainer_side import until


class FullDisk:
    """Makes a chunk store fail so many times."""

    def __init__(
        self, store: ChunkStore, times: int, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC
    ) -> None:
        self.left = times
        self._code = code
        self._put: Callable[..., None] = store.put
        monkeypatch.setattr(store, "put", self.put)

    def put(self, *args: object, **kwargs: object) -> None:
        if self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        self._put(*args, **kwargs)


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


# -- publishing


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
    payload = bytes(range(256)) * 1024  # two chunks
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


# -- transfers


class FakeLink:
    number = 7
    node_id = bytes(32)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.serving = asyncio.Lock()

    def send(self, data: bytes) -> None:
        self.sent.append(data)


class Line:
    """What `chunk_requests` would do over a link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transfers, "get_chunk", self.get_chunk)
        monkeypatch.setattr(transfers, "put_chunk", self.put_chunk)
        self.answer: bytes | Exception = b""
        self.put: list[bytes] = []
        self.got = 0

    async def get_chunk(self, link: object, blob: bytes, size: int) -> bytes:
        self.got += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def put_chunk(self, link: object, blob: bytes, data: bytes, turn: object) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.put.append(data)


class Noted(Policing):
    """Notes who is blamed, and charged for small chunks."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup

    def blame(self, node_id: bytes, reason: str, offence: Offence) -> None:
        self._setup.blamed.append((node_id, offence))

    def gave_little(self, node_id: bytes) -> float:
        self._setup.charged.append(node_id)
        return super().gave_little(node_id)


class Setup:
    def __init__(self, chunks: ChunkStore, line: Line) -> None:
        self.chunks = chunks
        self.line = line
        self.wanted_by: tuple[bytes, ...] = (b"key",)
        """Keys under which the core wants any chunk."""
        wants = SimpleNamespace(keys_of=lambda blob: self.wanted_by)
        self.core: Any = SimpleNamespace(
            ledger=[], holdings=SimpleNamespace(revoked=()), fetcher=SimpleNamespace(wants=wants)
        )
        self.events: list[fx.Event] = []
        self.blamed: list[tuple[bytes, Offence]] = []
        self.charged: list[bytes] = []
        self.link = FakeLink()
        self.local = LocalChunks(chunks, SnapshotShelf(chunks, 16), self.core, self.events.append)
        self.transfers = Transfers(
            self.local,
            Uploads(),
            Noted(self),
            asyncio.create_task,
        )

    async def get(self, data: bytes) -> None:
        blob = sha256(data).digest()
        await self.transfers.get(self.link, fx.Get(7, blob, len(data), 5.0))  # type: ignore[arg-type]

    async def ask(self, data: bytes) -> None:
        await self.transfers.ask(self.link, msg.Ask(sha256(data).digest()))  # type: ignore[arg-type]


@pytest.fixture
def setup(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(chunks, Line(monkeypatch))


async def test_getting_stores_and_tells(setup: Setup) -> None:
    setup.line.answer = b"data"
    await setup.get(b"data")
    blob = sha256(b"data").digest()
    assert setup.events[0] == fx.ChunkArrived(blob)
    assert setup.chunks.get(blob) == b"data"


async def test_a_chunk_of_what_was_given_up_meanwhile_is_not_kept(setup: Setup) -> None:
    """Nobody would ever remove it."""
    setup.wanted_by = ()
    setup.line.answer = b"data"
    await setup.get(b"data")
    blob = sha256(b"data").digest()
    assert setup.events[0] == fx.ChunkArrived(blob), "it is under way no more"
    assert blob not in setup.chunks


@pytest.mark.parametrize(
    "error",
    [
        RefusedError("no"),
        aiohttp.ServerDisconnectedError(),
        ConnectionResetError(),
        TimeoutError(),
        aiohttp.ClientPayloadError(),
        aiohttp.ServerFingerprintMismatch(b"", b"", "", 1),
    ],
)
async def test_a_failed_get_is_reported_for_another_try(setup: Setup, error: Exception) -> None:
    setup.line.answer = error
    await setup.get(b"data")
    assert setup.events == [fx.ChunkFailed(7, sha256(b"data").digest())]
    assert setup.blamed == [], "it may be the network, or the peer may not have it"


async def test_a_chunk_that_is_not_what_its_hash_says_is_an_offence(setup: Setup) -> None:
    setup.line.answer = PayloadError("sent a chunk that is not")
    await setup.get(b"data")
    assert setup.events == [fx.ChunkFailed(7, sha256(b"data").digest())]
    assert setup.blamed == [(setup.link.node_id, Offence.CHUNK)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "No space left on device; fetching pauses until there is space"),
        (errno.ENOENT, "No such file or directory; fetching pauses until the folder can be written to"),
        (errno.EROFS, "Read-only file system; fetching pauses until the folder can be written to"),
    ],
)
async def test_a_disk_that_takes_nothing_pauses_fetching_and_what_came_is_kept_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, said: str
) -> None:
    monkeypatch.setattr(keeping, "DISK_RETRY_S", 0.01)
    monkeypatch.setattr(keeping, "PATIENCE_S", 0.01)
    disk = FullDisk(setup.chunks, 10**6, monkeypatch, code)
    setup.line.answer = b"data"
    await asyncio.gather(*(setup.get(b"data") for _ in range(FETCHES_MAX)))  # all those under way
    assert setup.line.got == FETCHES_MAX
    trying = asyncio.create_task(setup.local.keeping.run())
    for n in range(100):
        await setup.get(b"%d" % n)
        await setup.ask(b"%d" % n)
    assert setup.line.got == FETCHES_MAX and not setup.link.sent, "or it would be thrown away"
    assert {type(event) for event in setup.events} == {fx.ChunkFailed} and len(setup.events) == 216
    await until(lambda: disk.left < 10**6 - FETCHES_MAX - 3)
    assert [record.getMessage() for record in caplog.records] == [f"cannot store a payload: {said}"]
    setup.events.clear()
    disk.left = 0
    blob = sha256(b"data").digest()
    await until(lambda: setup.events == [fx.ChunkArrived(blob)])
    assert setup.line.got == FETCHES_MAX and setup.chunks.get(blob) == b"data"
    setup.line.answer = b"more"
    await setup.get(b"more")
    assert fx.ChunkArrived(sha256(b"more").digest()) in setup.events
    await setup.ask(b"more")
    assert setup.link.sent == [msg.encode(msg.Ask(sha256(b"more").digest()))]
    trying.cancel()
    await asyncio.wait([trying])


async def test_what_could_not_be_kept_and_is_of_no_use_any_more_holds_nothing_up(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "DISK_RETRY_S", 0.01)
    FullDisk(setup.chunks, 1, monkeypatch)
    setup.line.answer = b"data"
    await setup.get(b"data")
    assert not setup.local.keeping.works
    setup.wanted_by = ()
    trying = asyncio.create_task(setup.local.keeping.run())
    assert await setup.local.can_keep()
    assert sha256(b"data").digest() not in setup.chunks
    trying.cancel()
    await asyncio.wait([trying])


async def test_reading_finds_damage(setup: Setup) -> None:
    blob, other = sha256(b"data").digest(), bytes(32)
    delta = SimpleNamespace(
        record_id=b"r", body=SimpleNamespace(chunks=(blob, other), payload_bytes=PAYLOAD_CHUNK_BYTES_MIN + 1)
    )
    setup.core.ledger.append(delta)
    assert await setup.local.read_chunk(blob) is None and setup.events == []
    setup.chunks.put(blob, b"data")
    assert await setup.local.read_chunk(blob) == b"data"
    setup.chunks._path(blob).write_bytes(b"damaged")
    assert await setup.local.read_chunk(blob) is None
    (event,) = setup.events
    assert isinstance(event, fx.Need) and event.key == b"r" and dict(event.chunks).keys() == {blob, other}


async def test_damage_of_a_snapshot_is_the_archives_to_mend(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    root = snapshots.store(np.arange(4, dtype=np.int32), setup.chunks)
    setup.local._shelf.restore([Claim(2, 1, bytes(32), root)])
    lost: list[bytes] = []
    setup.local.on_snapshot_lost = lost.append
    blob = setup.chunks.get(root)
    setup.chunks._path(blob).write_bytes(b"damaged")
    assert await setup.local.read_chunk(blob) is None
    assert lost == [blob] and setup.events == []
    assert "fetching it again" not in caplog.text


async def test_what_can_be_read_again_has_arrived(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_chunks, "LOOK_AGAIN_S", 0.01)
    blob = sha256(b"data").digest()
    setup.chunks.put(blob, b"data")
    file = setup.chunks._path(blob)
    file.rename(tmp_path / "away")
    assert await setup.local.read_chunk(blob) is None
    looking = asyncio.create_task(setup.local.run())
    (tmp_path / "away").rename(file)
    await until(lambda: setup.events == [fx.ChunkArrived(blob)])
    assert await setup.local.read_chunk(blob) == b"data"
    looking.cancel()
    await asyncio.wait([looking])


async def test_what_is_asked_for_is_put_or_declined(setup: Setup) -> None:
    here, gone = sha256(b"here").digest(), bytes(32)
    setup.chunks.put(here, b"here")
    setup.transfers.asked(setup.link, here)  # type: ignore[arg-type]
    assert setup.link.sent == [msg.encode(msg.Decline(here))], "not before the link is served"
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    for blob in (here, gone, here):
        setup.transfers.asked(setup.link, blob)  # type: ignore[arg-type]
    await until(lambda: len(setup.line.put) == 2)
    assert setup.link.sent[1:] == [msg.encode(msg.Decline(gone))]
    setup.line.answer = ConnectionResetError()
    setup.transfers.asked(setup.link, here)  # type: ignore[arg-type]
    await until(lambda: len(setup.link.sent) == 3)
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])
    setup.transfers.asked(setup.link, here)  # type: ignore[arg-type]
    assert setup.link.sent[3:] == [msg.encode(msg.Decline(here))], "nor after"


async def test_a_full_line_is_waited_for_only_with_what_is_here(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, gone = sha256(b"here").digest(), bytes(32)
    setup.chunks.put(here, b"here")
    monkeypatch.setattr(uplink.Uplink, "places", 0)
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    monkeypatch.setattr(uplink, "TURN_PATIENCE_S", 3600.0)
    setup.transfers.asked(setup.link, gone)  # type: ignore[arg-type]
    await until(lambda: setup.link.sent == [msg.encode(msg.Decline(gone))])
    monkeypatch.setattr(uplink, "TURN_PATIENCE_S", 0.05)
    setup.transfers.asked(setup.link, here)  # type: ignore[arg-type]
    await until(lambda: setup.link.sent[1:] == [msg.encode(msg.Decline(here))])
    await until(lambda: len(setup.charged) == 2)
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])


async def test_small_chunks_that_are_put_are_charged_for(setup: Setup) -> None:
    blobs = []
    for data in (bytes(SMALL_CHUNK_BYTES), bytes(SMALL_CHUNK_BYTES - 1), bytes(SMALL_CHUNK_BYTES + 1)):
        blobs.append(sha256(data).digest())
        setup.chunks.put(blobs[-1], data)
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    for blob in blobs:
        setup.transfers.asked(setup.link, blob)  # type: ignore[arg-type]
    await until(lambda: len(setup.line.put) == 3 and setup.charged)
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])
    assert setup.charged == [setup.link.node_id]


async def test_asking_for_too_much_is_declined(setup: Setup) -> None:
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    for _ in range(ASKS_PER_LINK_MAX + 5):
        setup.transfers.asked(setup.link, bytes(32))  # type: ignore[arg-type]
    assert len(setup.link.sent) == ASKS_PER_LINK_MAX + 5 - UPLOADS_MAX, "no room for so many"
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])
