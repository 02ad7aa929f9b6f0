"""Chunks over HTTP: what is got, put, declined, charged for and kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from hashlib import sha256
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from gossamer.node.daemon.network import chunk_transfer as chunk_routes
from gossamer.node.daemon.network.chunk_transfer import LARGE_PIECE_BYTES, UploadLimits
from gossamer.node.daemon.network.links import PREFIX, SESSION_HEADER, PeerLink
from gossamer.node.daemon.network.sockets import WRITE_BUFFER_BYTES, client_context
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import PER_NODE, Allowance, Resource
from gossamer.protocol.errors import (
    PayloadError,
    RefusedError,
)
from gossamer.protocol.limits import (
    ASKS_PER_LINK_MAX,
    CHUNK_BYTES_MAX,
    SMALL_CHUNK_BYTES,
    UPLOADS_PER_MEMBER_MAX,
)
from gossamer.protocol.messages import Decline, Message, Want, decode
from gossamer.protocol.payloads import Chunk, pack_chunk
from tests.node.trainer_side import until
from tests.node.wires import End, Ends, Pair, fresh_certificate, get_chunk, linked, listening, put, serving


@pytest.mark.parametrize("size", [1, 300_000, CHUNK_BYTES_MAX])
async def test_chunks_are_got_and_put(pair: Pair, size: int) -> None:
    _, listener, out, inward = pair
    data = os.urandom(size)
    blob = listener.hold(data)
    assert await get_chunk(out, blob, size) == data
    assert (out.traffic.payload_received, inward.traffic.payload_sent) == (size, size)
    other = os.urandom(size)
    listener.wanted[sha256(other).digest()] = size
    await put(out, sha256(other).digest(), other)
    assert listener.arrived == {sha256(other).digest(): other}
    assert (out.traffic.payload_sent, inward.traffic.payload_received) == (size, size)


async def test_every_chunk_tells_both_what_time_it_is_at_the_other(pair: Pair) -> None:
    """Who is only dialled has no answers to read it from."""
    _, listener, out, inward = pair
    assert out.clock_offset_s is inward.clock_offset_s is None
    listener.wanted[sha256(b"chunk").digest()] = 5
    await put(out, sha256(b"chunk").digest(), b"chunk")
    for link in (out, inward):
        assert link.clock_offset_s == pytest.approx(0.0, abs=5.0)
        link.clock_offset_s = None
    await get_chunk(out, listener.hold(b"data"), 4)
    assert out.clock_offset_s == pytest.approx(0.0, abs=5.0)
    out.note_date("no date")
    assert out.clock_offset_s == pytest.approx(0.0, abs=5.0)


async def test_chunks_travel_packed_where_that_is_smaller(pair: Pair) -> None:
    _, listener, out, inward = pair
    data = os.urandom(1000) * 100
    blob, size = listener.hold(data), len(data)
    assert await get_chunk(out, blob, size) == data
    assert 1000 < out.traffic.payload_received == inward.traffic.payload_sent < 2000
    listener.wanted[blob] = size
    await put(out, blob, data)
    assert listener.arrived == {blob: data}
    assert 1000 < out.traffic.payload_sent == inward.traffic.payload_received < 2000


async def test_a_packed_chunk_is_no_longer_than_was_asked_for(pair: Pair) -> None:
    _, listener, out, inward = pair
    blob = listener.hold(bytes(CHUNK_BYTES_MAX))  # the record that says 1,000 may lie, not who holds it
    with pytest.raises(RefusedError, match="a chunk that is not"):
        await get_chunk(out, blob, 1000)
    listener.wanted[blob] = 1000
    with pytest.raises(RefusedError, match="did not take"):
        await put(out, blob, bytes(CHUNK_BYTES_MAX))
    assert not listener.scores.blamed and (listener.failed, listener.arrived) == ([(inward, blob)], {})


async def test_what_is_got_must_be_what_was_asked_for(pair: Pair) -> None:
    _, listener, out, _ = pair
    blob = listener.hold(b"honest")
    with pytest.raises(RefusedError, match="does not have"):
        await get_chunk(out, bytes(32), 6)
    for answer in (b"liar!!", b"", b"hones"):
        listener.chunks[blob] = answer
        with pytest.raises(PayloadError, match="a chunk that is not"):
            await get_chunk(out, blob, 6)
    listener.chunks[blob] = b"honest!" * 100_000  # the size may be a lie of whoever signed the record
    with pytest.raises(RefusedError, match="a chunk that is not"):
        await get_chunk(out, blob, 6)
    listener.chunks[blob] = b"honest"
    for most in (6, CHUNK_BYTES_MAX):  # a liar may have said that it is longer
        assert await get_chunk(out, blob, most) == b"honest"


async def test_what_is_longer_than_was_asked_for_is_not_read_to_its_end(pair: Pair) -> None:
    """It may have none."""
    _, listener, out, inward = pair
    blob = listener.hold(os.urandom(4 * CHUNK_BYTES_MAX))
    with pytest.raises(RefusedError, match="a chunk that is not"):
        await get_chunk(out, blob, 6)
    listener.wanted[blob] = 6
    with pytest.raises((RefusedError, aiohttp.ClientError, OSError)):
        await put(out, blob, listener.chunks[blob])
    await until(lambda: listener.failed)
    assert out.traffic.payload_received <= LARGE_PIECE_BYTES
    assert inward.traffic.payload_received <= LARGE_PIECE_BYTES


async def test_a_put_must_be_asked_for_and_hold_what_it_says(pair: Pair) -> None:
    _, listener, out, inward = pair
    blob = sha256(b"honest").digest()
    with pytest.raises(RefusedError, match="did not take"):
        await put(out, blob, b"honest")
    listener.wanted[blob] = 6
    for body in (b"liar!!", b"", b"hones", b"honest!" * 100_000):
        with pytest.raises((RefusedError, aiohttp.ClientError, OSError)):
            await put(out, blob, body)
    assert listener.arrived == {}
    assert listener.failed == [(inward, blob)] * 4, "each is known to have failed, so that others are asked"
    listener.wanted[blob] = CHUNK_BYTES_MAX + 1
    with pytest.raises(RefusedError):
        await put(out, blob, b"honest")
    assert listener.scores.blamed == 3, "for each body that was not what its hash said"
    for most in (6, CHUNK_BYTES_MAX):
        listener.wanted[blob] = most
        await put(out, blob, b"honest")
        assert listener.arrived.pop(blob) == b"honest"


async def test_a_chunk_that_cannot_be_stored_need_not_be_waited_for(pair: Pair) -> None:
    _, listener, out, inward = pair
    blob = sha256(b"data").digest()
    listener.wanted[blob] = 4
    listener.disk_is_full = True
    with pytest.raises(RefusedError):
        await put(out, blob, b"data")
    assert listener.failed == [(inward, blob)]


async def test_who_finds_our_line_full_is_told_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener, out, _ = pair
    blob = listener.hold(b"data")
    monkeypatch.setattr(chunk_routes, "TURN_PATIENCE_S", 0.05)
    monkeypatch.setattr(UploadLimits, "places", 0)
    declined: list[bytes] = []
    monkeypatch.setattr(
        listener.scores, "charge_misses", lambda node_id, count: declined.append(node_id) or 0.0
    )
    with pytest.raises(RefusedError, match="does not have"):
        await get_chunk(out, blob, 4)
    assert declined == [dialler.identity.node_id], "or it could ask again and again for nothing"
    monkeypatch.undo()
    assert await get_chunk(out, blob, 4) == b"data"


async def test_who_was_hung_up_while_it_waited_for_a_place_is_sent_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, listener, out, inward = pair
    blob = listener.hold(b"data")
    with monkeypatch.context() as patch:
        patch.setattr(chunk_routes, "TURN_PATIENCE_S", 3600.0)
        patch.setattr(chunk_routes, "STALL_CHECK_S", 0.01)
        patch.setattr(UploadLimits, "places", 0)
        asks = asyncio.create_task(get_chunk(out, blob, 4))
        await until(inward.uploads.sending.locked)
        inward._ending.set()  # as close_soon does, with a queue that the peer takes slowly
    with pytest.raises(RefusedError, match="does not have"):
        await asks
    assert inward.traffic.payload_sent == 0


async def test_who_takes_nothing_of_a_chunk_is_cut_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_routes, "FETCH_TIMEOUT_S", 0.2)
    _, listener, out, _ = pair
    blob = listener.hold(os.urandom(16 * CHUNK_BYTES_MAX))  # more than the system's buffers take
    host, port = listener.address.split(":")
    context = client_context() if listener.tls else None
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    head = f"GET {PREFIX}/chunk/{blob.hex()} HTTP/1.1\r\nHost: x\r\n"
    writer.write(f"{head}{SESSION_HEADER}: {out.session.hex()}\r\n\r\n".encode())
    limiter = listener.server.limiter
    await until(lambda: limiter.counts["connections"] == 2)
    await until(lambda: len(limiter) == 1)
    assert listener.gone == []
    writer.transport.abort()


async def test_little_of_a_chunk_waits_in_buffers_where_nobody_sees_how_fast_it_goes_out(
    secure_pair: Pair,
) -> None:
    _, listener, out, _ = secure_pair
    await get_chunk(out, listener.hold(b"data"), 4)
    guests = list(listener.server.limiter._open)
    assert [guest._transport.get_write_buffer_limits()[1] for guest in guests] == [WRITE_BUFFER_BYTES] * 2


async def test_without_a_session_there_is_nothing(pair: Pair) -> None:
    dialler, listener, out, inward = pair
    blob = listener.hold(b"data")
    session = PeerLink(out.node_id, out._socket, os.urandom(32), dialled=out.dialled)
    session.end = dialler  # type: ignore[attr-defined]
    with pytest.raises(RefusedError):
        await get_chunk(session, blob, 4)
    listener.wanted[blob] = 4
    with pytest.raises(RefusedError):
        await put(session, blob, b"data")
    url = f"http{'s' if listener.tls else ''}://{listener.address}{PREFIX}/chunk/{blob.hex()}"
    async with aiohttp.ClientSession() as http:
        for text in ("", "not hex", "ab" * 32):
            async with http.get(url, headers={SESSION_HEADER: text}, ssl=client_context()) as answer:
                assert answer.status == 403
    inward.close_soon()
    await until(lambda: listener.gone)
    with pytest.raises(RefusedError):
        await get_chunk(out, blob, 4)
    assert listener.arrived == {}


async def test_requests_of_a_link_are_pinned_to_its_certificate(secure_pair: Pair) -> None:
    """Whoever takes over the address after the handshake gets no session token."""
    _, _, out, _ = secure_pair
    seen: list[str] = []

    async def thief(request: web.Request) -> web.Response:
        seen.append(request.headers.get(SESSION_HEADER, ""))
        return web.Response(body=b"x")

    assert out.dialled is not None
    async with serving(thief, fresh_certificate().context) as address:
        out.dialled = replace(out.dialled, base_url=f"https://{address}{PREFIX}")
        with pytest.raises(aiohttp.ClientError):
            await get_chunk(out, bytes(32), 1)
    assert seen == []


def noted_sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which anybody sleeps from now on."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    return slept


@pytest.mark.parametrize("what", ["not here", "not asked for"])
async def test_chunks_that_are_not_here_or_not_asked_for_come_and_go_slowly(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(PER_NODE, Resource.MISSES, Allowance(0.001, 3.0))
    monkeypatch.setattr(limits, "PAUSE_MAX_S", 0.0123)
    _, listener, out, _ = pair
    slept = noted_sleeps(monkeypatch)
    for _ in range(6):
        with pytest.raises(RefusedError):
            await (get_chunk(out, bytes(32), 1) if what == "not here" else put(out, bytes(32), b"x"))
    assert slept.count(0.0123) == 3
    assert listener.gone == []


@pytest.mark.parametrize(
    ("chunk", "is_busy", "slowed"),
    [
        (os.urandom(SMALL_CHUNK_BYTES - 1), False, 5),
        (os.urandom(SMALL_CHUNK_BYTES), False, 0),
        (os.urandom(SMALL_CHUNK_BYTES), True, 2),
        (bytes(64 * SMALL_CHUNK_BYTES), False, 5),
    ],
    ids=["small", "not small", "declined", "packed to little"],
)
async def test_small_chunks_and_declined_ones_are_asked_for_slowly_too(
    monkeypatch: pytest.MonkeyPatch, chunk: bytes, is_busy: bool, slowed: int
) -> None:
    monkeypatch.setitem(PER_NODE, Resource.MISSES, Allowance(0.001, 3.0))
    monkeypatch.setattr(limits, "PAUSE_MAX_S", 0.0123)
    if is_busy:
        monkeypatch.setattr(chunk_routes, "UPLOADS_MAX", 0)
    dialler, listener = End(1, tls=False), End(2, tls=False)
    blob = listener.hold(chunk)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        slept = noted_sleeps(monkeypatch)
        for _ in range(8):
            with contextlib.suppress(RefusedError):
                await get_chunk(out, blob, len(chunk))
        await until(lambda: slept.count(0.0123) == slowed)
        monkeypatch.undo()


# -- what the core schedules


def declined(link: Any) -> list[Message]:
    return [decode(call.args[0]) for call in link.send.call_args_list]


@pytest.fixture
async def out(secure: Ends, monkeypatch: pytest.MonkeyPatch) -> PeerLink:
    """A link that its end has dialled."""
    link, _ = await linked(*secure)
    link.send = Mock()  # type: ignore[method-assign]
    return link


async def test_what_was_got_is_stored_and_reported(secure: Ends, out: PeerLink) -> None:
    dialler, listener = secure
    blob = listener.hold(b"data")
    dialler.events.clear()
    await dialler.transfers.get(out, fx.Get(out.number, blob, 4, 5.0))
    assert dialler.events == [ev.ChunkArrived(blob)] and dialler.arrived == {blob: b"data"}
    dialler.arrived.clear()
    dialler.core.fetcher.wants.keys_of = lambda blob: ()
    await dialler.transfers.get(out, fx.Get(out.number, blob, 4, 5.0))
    assert dialler.events == [ev.ChunkArrived(blob)] * 2
    assert not dialler.arrived, "given up meanwhile: nobody would ever remove it"


@pytest.mark.parametrize(("answer", "is_blamed"), [(None, False), (b"liar", True)])
async def test_a_failed_get_is_reported_for_another_try(
    secure: Ends, out: PeerLink, answer: bytes | None, is_blamed: bool
) -> None:
    dialler, listener = secure
    blob = sha256(b"data").digest()
    if answer is not None:
        listener.chunks[blob] = answer
    await dialler.transfers.get(out, fx.Get(out.number, blob, 4, 5.0))
    assert dialler.failed == [(out, blob)]
    assert dialler.scores.blamed == is_blamed


@pytest.mark.parametrize(
    ("data", "is_kept", "is_blamed"),
    [(b"data" * 99, True, False), (None, True, False), (b"liar" * 99, False, True), (b"liar", False, True)],
)
async def test_what_came_along_is_checked_stored_and_reported(
    secure: Ends, out: PeerLink, data: bytes | None, is_kept: bool, is_blamed: bool
) -> None:
    dialler, _ = secure
    chunk = b"data" * 99
    blob = sha256(chunk).digest()
    dialler.events.clear()
    sent = (pack_chunk(chunk) or b"") if data is None else data
    await dialler.transfers.keep(out, fx.Keep(out.number, blob, len(chunk), sent))
    assert dialler.arrived == ({blob: chunk} if is_kept else {})
    assert dialler.failed == ([] if is_kept else [(out, blob)])
    assert dialler.scores.blamed == is_blamed
    assert out.traffic.payload_received == len(sent)


async def test_a_get_ends_with_the_cores_patience_and_with_its_link(
    secure: Ends, out: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that answers none, and comes again and again, would have all our connections."""
    dialler, listener = secure
    monkeypatch.setattr(UploadLimits, "places", 0)
    monkeypatch.setattr(chunk_routes, "TURN_PATIENCE_S", 3600.0)
    blob = listener.hold(b"data")
    async with asyncio.timeout(60):
        await dialler.transfers.get(out, fx.Get(out.number, blob, 4, 0.001))
    assert dialler.failed == [(out, blob)]
    get = fx.Get(out.number, blob, 4, 3600.0)
    getting = [asyncio.create_task(dialler.transfers.get(out, get)) for _ in range(3)]
    assert not (await asyncio.wait(getting, timeout=0.05))[0]
    out.close_soon()
    async with asyncio.timeout(60):
        await asyncio.gather(*getting)
        await dialler.transfers.get(out, get)
    assert dialler.failed == [(out, blob)] * 5


async def test_what_has_come_is_stored_though_its_link_ends_meanwhile(secure: Ends, out: PeerLink) -> None:
    """Nobody else may have it: its author has just died, say."""
    dialler, listener = secure
    blob = listener.hold(b"data")
    try_write, stored = dialler.try_write, asyncio.Event()

    async def slowly(work: Any, *arguments: object, **options: object) -> bool:
        stored.set()
        await until(lambda: dialler.gone)
        return await try_write(work, *arguments, **options)

    dialler.try_write = slowly  # type: ignore[method-assign]
    getting = asyncio.create_task(dialler.transfers.get(out, fx.Get(out.number, blob, 4, 3600.0)))
    await stored.wait()
    out.close_soon()
    await getting
    assert dialler.arrived == {blob: b"data"} and dialler.events[-1] == ev.ChunkArrived(blob)


async def test_while_the_disk_takes_nothing_nothing_is_fetched_or_asked_for(
    secure: Ends, out: PeerLink
) -> None:
    dialler, listener = secure
    blob = listener.hold(b"data")
    dialler.disk_is_full = True
    await dialler.transfers.get(out, fx.Get(out.number, blob, 4, 5.0))
    await dialler.transfers.ask(out, Want(blob))
    assert dialler.failed == [(out, blob)] * 2 and not out.traffic.payload_received and not declined(out)
    dialler.disk_is_full = False
    await dialler.transfers.ask(out, Want(blob))
    assert declined(out) == [Want(blob)]


async def test_what_is_asked_for_is_put_or_declined(secure: Ends, out: PeerLink) -> None:
    dialler, listener = secure
    here, gone = dialler.hold(b"here"), bytes(32)
    listener.wanted[here] = 4
    for blob in (here, gone):
        await dialler.transfers.put(out, blob)
    assert listener.arrived == {here: b"here"} and declined(out) == [Decline(gone)]
    del listener.wanted[here]
    await dialler.transfers.put(out, here)
    assert declined(out)[1:] == [Decline(here)], "the peer takes it no more"


async def test_a_full_line_is_waited_for_only_with_what_is_here(
    secure: Ends, out: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, _ = secure
    here, gone = dialler.hold(b"here"), bytes(32)
    monkeypatch.setattr(UploadLimits, "places", 0)
    monkeypatch.setattr(chunk_routes, "TURN_PATIENCE_S", 3600.0)
    await asyncio.wait_for(dialler.transfers.put(out, gone), 60)
    monkeypatch.setattr(chunk_routes, "TURN_PATIENCE_S", 0.05)
    await dialler.transfers.put(out, here)
    assert declined(out) == [Decline(gone), Decline(here)]


async def test_asking_for_too_much_is_declined_at_once(
    secure: Ends, out: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, _ = secure
    monkeypatch.setattr(UploadLimits, "places", 0)
    monkeypatch.setattr(chunk_routes, "TURN_PATIENCE_S", 3600.0)
    blob = dialler.hold(b"data")
    puts = [asyncio.create_task(dialler.transfers.put(out, blob)) for _ in range(ASKS_PER_LINK_MAX + 5)]
    await until(lambda: len(declined(out)) == ASKS_PER_LINK_MAX + 5 - UPLOADS_PER_MEMBER_MAX)
    out.close_soon()
    async with asyncio.timeout(60):
        await asyncio.gather(*puts)


async def test_small_chunks_that_are_put_are_charged_for(
    secure: Ends, out: PeerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes that travel."""
    dialler, listener = secure
    charged: list[bytes] = []
    monkeypatch.setattr(dialler.scores, "charge_misses", lambda node_id: charged.append(node_id) or 0.0)
    sizes = SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES - 1, SMALL_CHUNK_BYTES + 1
    for data in (*map(os.urandom, sizes), bytes(8 * SMALL_CHUNK_BYTES)):
        listener.wanted[blob := dialler.hold(data)] = len(data)
        await dialler.transfers.put(out, blob)
    assert len(listener.arrived) == 4 and charged == [out.node_id] * 2


async def test_a_chunk_that_turns_out_to_be_damaged_is_reported(secure: Ends, out: PeerLink) -> None:
    _, listener = secure
    blob = listener.hold(b"data")

    def read(blob: bytes, rate: float) -> Chunk:
        raise MissingChunkError(blob)

    listener.store.to_send = read
    with pytest.raises(RefusedError, match="does not have"):
        await get_chunk(out, blob, 4)
    assert listener.damaged == [blob]
