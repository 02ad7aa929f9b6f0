"""`transfers`: chunks that are got and put, and what becomes of those that are not."""

from __future__ import annotations

import asyncio
import os
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gossamer.node.daemon.network import chunk_transfer as transfers
from gossamer.node.daemon.network import upload_limits as uplink
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import Offence, PayloadError, RefusedError
from gossamer.protocol.limits import ASKS_PER_LINK_MAX, SMALL_CHUNK_BYTES, UPLOADS_PER_MEMBER_MAX
from tests.node.trainer_side import until
from tests.node.transferring import Line, Setup


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


@pytest.fixture
def setup(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(chunks, Line(monkeypatch))


async def test_getting_stores_and_tells(setup: Setup) -> None:
    setup.line.answer = b"data"
    await setup.get(b"data")
    blob = sha256(b"data").digest()
    assert setup.events[0] == ev.ChunkArrived(blob)
    assert setup.chunks.get(blob) == b"data"


async def test_a_chunk_of_what_was_given_up_meanwhile_is_not_kept(setup: Setup) -> None:
    """Nobody would ever remove it."""
    setup.wanted_by = ()
    setup.line.answer = b"data"
    await setup.get(b"data")
    blob = sha256(b"data").digest()
    assert setup.events[0] == ev.ChunkArrived(blob), "it is under way no more"
    assert blob not in setup.chunks


async def test_a_get_ends_with_its_link(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers none, and comes again and again, would have all our connections."""
    never = asyncio.Event()

    async def get_chunk(link: object, blob: bytes, size: int) -> bytes:
        await never.wait()
        return b""

    monkeypatch.setattr(transfers, "get_chunk", get_chunk)
    effect = fx.Get(7, bytes(32), 4, 3600.0)
    await setup.transfers.get(setup.link, effect)  # type: ignore[arg-type]
    assert setup.events == [ev.ChunkFailed(7, bytes(32))], "the link was gone when its turn came"
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await setup.transfers.get(setup.link, fx.Get(7, bytes(32), 4, 0.001))  # type: ignore[arg-type]
    assert setup.events == 2 * [ev.ChunkFailed(7, bytes(32))], "the core waits no longer for it"
    getting = [
        asyncio.create_task(setup.transfers.get(setup.link, effect))  # type: ignore[arg-type]
        for _ in range(3)
    ]
    assert not (await asyncio.wait(getting, timeout=0.05))[0]
    setup.transfers.end(setup.link.number)
    assert not (await asyncio.wait(getting, timeout=0.05))[0], "hung up on: what is under way may still come"
    setup.transfers.gone(setup.link.number)
    await asyncio.wait(getting)
    assert all(task.cancelled() for task in getting)


async def test_what_has_come_is_kept_though_its_link_ends_as_it_is_stored(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else may have it: its author has just died, say."""
    stored, go_on, put = threading.Event(), threading.Event(), setup.chunks.put

    def slowly(*args: Any, **options: Any) -> None:
        stored.set()
        go_on.wait(10)
        put(*args, **options)

    monkeypatch.setattr(setup.chunks, "put", slowly)
    setup.line.answer = b"data"
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    blob = sha256(b"data").digest()
    getting = asyncio.create_task(setup.transfers.get(setup.link, fx.Get(7, blob, 4, 3600.0)))  # type: ignore[arg-type]
    await until(stored.is_set)
    setup.transfers.gone(setup.link.number)
    go_on.set()
    await getting
    assert setup.events[0] == ev.ChunkArrived(blob) and setup.chunks.get(blob) == b"data"


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
    assert setup.events == [ev.ChunkFailed(7, sha256(b"data").digest())]
    assert setup.blamed == [], "it may be the network, or the peer may not have it"


async def test_a_chunk_that_is_not_what_its_hash_says_is_an_offence(setup: Setup) -> None:
    setup.line.answer = PayloadError("sent a chunk that is not")
    await setup.get(b"data")
    assert setup.events == [ev.ChunkFailed(7, sha256(b"data").digest())]
    assert setup.blamed == [(setup.link.node_id, Offence.CHUNK)]


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
    """By the bytes that travel."""
    blobs = []
    sizes = SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES - 1, SMALL_CHUNK_BYTES + 1
    for data in (*map(os.urandom, sizes), bytes(8 * SMALL_CHUNK_BYTES)):
        blobs.append(sha256(data).digest())
        setup.chunks.put(blobs[-1], data)
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    for blob in blobs:
        setup.transfers.asked(setup.link, blob)  # type: ignore[arg-type]
    await until(lambda: len(setup.line.put) == 4 and len(setup.charged) >= 2)
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])
    assert setup.charged == [setup.link.node_id] * 2


async def test_nothing_waits_to_serve_a_link_that_has_ended(setup: Setup) -> None:
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    setup.transfers.gone(setup.link.number)
    await asyncio.wait([serving], timeout=5)
    assert serving.cancelled()


async def test_asking_for_too_much_is_declined(setup: Setup) -> None:
    setup.transfers.begin(setup.link)  # type: ignore[arg-type]
    serving = setup.transfers._serving[setup.link.number]
    await asyncio.sleep(0)
    for _ in range(ASKS_PER_LINK_MAX + 5):
        setup.transfers.asked(setup.link, bytes(32))  # type: ignore[arg-type]
    assert len(setup.link.sent) == ASKS_PER_LINK_MAX + 5 - UPLOADS_PER_MEMBER_MAX, "no room for so many"
    setup.transfers.end(setup.link.number)
    await asyncio.wait([serving])
