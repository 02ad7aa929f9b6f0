"""Links: a bounded queue, whom we dial, and what reaches the core."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from gossamer.node.daemon.network import links as link_module
from gossamer.node.daemon.network.links import LinkTable, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.sockets import client_context
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import (
    Offence,
    PeerError,
    RefusedError,
    SignatureError,
)
from gossamer.protocol.limits import SEND_QUEUE_BYTES_MAX
from gossamer.protocol.messages import Message, Ping, Records, decode, encode
from gossamer.protocol.records import HEADER_BYTES, RecordKind
from tests.node.trainer_side import until
from tests.node.wires import End, Ends, Pair, fresh_certificate, hung_up, listening, serving


async def test_messages_keep_their_order_and_are_counted(secure_pair: Pair) -> None:
    _, listener, out, inward = secure_pair
    messages = [bytes([i % 256]) * (i + 1) for i in range(500)]
    for message in messages:
        out.send(message)
    await until(lambda: len(listener.messages) == 500)
    assert listener.messages == messages
    total = sum(map(len, messages))
    assert (out.traffic.sent, inward.traffic.received) == (total, total)
    assert out.dropped == 0 and out._queued_bytes == 0


async def test_a_full_queue_drops_and_counts(secure_pair: Pair) -> None:
    _, listener, out, _ = secure_pair
    piece = bytes(1 << 20)
    for _ in range(20):
        out.send(piece)  # without a pause: nothing goes out in between
    fit = SEND_QUEUE_BYTES_MAX // len(piece)
    assert out.dropped == 20 - fit
    assert out._queued_bytes <= SEND_QUEUE_BYTES_MAX
    await until(lambda: len(listener.messages) == fit)
    out.send(b"room again")
    await until(lambda: listener.messages[-1] == b"room again")


async def test_closing_lets_the_queue_out_first(secure_pair: Pair) -> None:
    dialler, listener, out, _ = secure_pair
    for i in range(100):
        out.send(bytes([i]))
    out.close_soon()
    await until(lambda: dialler.gone and listener.gone)
    assert len(listener.messages) == 100


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_peer_that_takes_nothing_is_cut_off(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, who: str, hangs_up: bool
) -> None:
    """As a frozen process: its socket stays open and is never read. Likewise once it was hung up:
    it counts as no link any more, and whoever reads slowly enough could keep any number of them."""
    monkeypatch.setattr(link_module, "CLOSING_TIMEOUT_S" if hangs_up else "WRITE_TIMEOUT_S", 0.1)
    dialler, listener, out, inward = pair
    end, sender, other, frozen = dialler, out, listener, inward
    if who == "listener":
        end, sender, other, frozen = listener, inward, dialler, out
    stuck = asyncio.Event()

    async def never(link: PeerLink, data: bytes) -> None:
        await stuck.wait()

    monkeypatch.setattr(other, "message", never)
    try:
        while not (sender.dropped if hangs_up else end.gone):
            sender.send(bytes(1 << 20))
            await asyncio.sleep(0 if hangs_up else 0.005)
        if hangs_up:
            sender.close_soon()
        await until(lambda: end.gone == [sender])
        assert sender._queue or not hangs_up
    finally:
        stuck.set()
        frozen.close_soon()


async def test_a_rest_ends_with_the_link(secure_pair: Pair) -> None:
    _, _, _, inward = secure_pair
    resting = asyncio.create_task(inward.while_up(asyncio.sleep(3600.0)))
    await asyncio.sleep(0)
    inward.close_soon()
    async with asyncio.timeout(60):
        assert await resting is None


async def test_nobody_there_is_an_ordinary_error(ends: Ends) -> None:
    dialler, _ = ends
    for address in ("127.0.0.1:1", "no.such.host.invalid:80"):
        with pytest.raises((OSError, TimeoutError, aiohttp.ClientError)):
            await dialler.dial(address)


@pytest.mark.parametrize("first", [b"", b"\xc1", bytes(range(64, 128)), None, "text", "close"])
async def test_a_server_that_talks_nonsense_is_a_peer_error(first: bytes | str | None) -> None:
    async def nonsense(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if isinstance(first, bytes):
            await socket.send_bytes(first)
        elif first == "text":
            await socket.send_str("hello")
        if first is None:
            await asyncio.sleep(0.3)
        await socket.close()
        return socket

    dialler = End(1)
    async with serving(nonsense, fresh_certificate().context) as address, listening(dialler):
        with pytest.raises((PeerError, TimeoutError)):
            await dialler.dial(address)


async def test_a_man_in_the_middle_is_refused(secure: Ends) -> None:
    """He relays every byte of the handshake, under a certificate of his own."""
    dialler, listener = secure

    async def relay(request: web.Request) -> web.WebSocketResponse:
        inward = web.WebSocketResponse()
        await inward.prepare(request)
        async with aiohttp.ClientSession() as session:
            url = f"https://{listener.address}{request.path}"
            async with session.ws_connect(url, ssl=client_context()) as outward:

                async def pump(source: object, target: object) -> None:
                    async for message in source:  # type: ignore[attr-defined]
                        await target.send_bytes(message.data)  # type: ignore[attr-defined]
                    await target.close()  # type: ignore[attr-defined]

                back = asyncio.create_task(pump(outward, inward))
                await pump(inward, outward)
                await outward.close()
                await asyncio.gather(back, return_exceptions=True)
        return inward

    async with serving(relay, fresh_certificate().context) as address:
        with pytest.raises((SignatureError, RefusedError)):
            await dialler.dial(address, listener.identity.node_id)
    assert dialler.links == listener.links == []
    await hung_up(int(address.rpartition(":")[2]))


@pytest.mark.parametrize("pinned", [False, True])
async def test_whom_we_dial_cannot_send_us_on(pinned: bool) -> None:
    """To what only this machine can reach, say."""
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async def send_on(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://{inner}/admin/shutdown", headers={"Set-Cookie": "a=b"})

    certificate, dialler = fresh_certificate(), End(1)
    async with serving(note) as inner, serving(send_on, certificate.context) as address, listening(dialler):
        with pytest.raises(RefusedError, match="redirects us"):
            await dialler.dialler.connect(address, None, certificate.fingerprint if pinned else b"")
    assert not asked


@pytest.mark.parametrize("by_the_dialler", [True, False])
async def test_whoever_is_turned_away_is_no_link(ends: Ends, by_the_dialler: bool) -> None:
    """An address says nothing of who is there, where it was told without a node id."""
    dialler, listener = ends
    judge, judged = ends if by_the_dialler else (listener, dialler)
    while not judge.scores.refused_for(judged.identity.node_id):
        judge.scores.blame(judged.identity.node_id, "garbage", Offence.MALFORMED)
    with pytest.raises(RefusedError, match="turned away for misbehaviour"):
        await asyncio.wait_for(dialler.dial(listener), 60)
    assert dialler.links == []
    await until(lambda: listener.links == listener.gone)


async def test_another_node_than_expected_is_refused(ends: Ends) -> None:
    dialler, listener = ends
    with pytest.raises(SignatureError, match="not the one we dialled"):
        await dialler.dial(listener, End(3).identity.node_id)
    await until(lambda: len(listener.server.limiter) == 0)
    assert listener.links == []


# -- dials

HOME = "192.168.1.5:7700"


@pytest.mark.parametrize("made_up", ["", "host", "host:0", "host:port", "http://host:7700/"])
async def test_an_address_that_cannot_be_is_not_dialled(made_up: str) -> None:
    end = End(0)
    end.dialler.connect = AsyncMock()  # type: ignore[method-assign]
    await end.dialler.dial(fx.Dial(made_up, None))
    assert end.events == [ev.DialFailed(made_up)] and not end.dialler.connect.called


@pytest.mark.parametrize(
    "error",
    [None, ConnectionRefusedError(), TimeoutError(), aiohttp.ServerDisconnectedError(), RefusedError("no")],
)
async def test_the_core_is_told_of_each_link_that_did_not_come_up(error: Exception | None) -> None:
    """Or the address would pass for one that is being dialled, for ever. None: the node is turned away."""
    end, wanted = End(0), End(1).identity.node_id
    while error is None and not end.scores.refused_for(wanted):
        end.scores.blame(wanted, "garbage", Offence.MALFORMED)
    end.dialler.connect = AsyncMock(side_effect=error)  # type: ignore[method-assign]
    await end.dialler.dial(fx.Dial(HOME, wanted))
    assert end.events == [ev.DialFailed(HOME)]
    assert end.dialler.connect.called == (error is not None)


# -- the table


async def test_the_core_hears_of_links_and_a_peer_blamed_too_often_loses_its_own() -> None:
    dialler, other, listener = End(1), End(3), End(2)
    async with listening(dialler, other, listener):
        dialler.dial(listener)
        dialler.dial(listener)
        other.dial(listener)
        await until(lambda: len(listener.links) == 3)
        bad = [link for link in listener.links if link.node_id == dialler.identity.node_id]
        while not listener.scores.refused_for(dialler.identity.node_id):
            listener.table.blame(dialler.identity.node_id, "garbage", Offence.MALFORMED)
        assert [link.is_closing for link in bad] == [True, True]
        await until(lambda: len(listener.gone) == 2)
        (left,) = listener.table.values()
        assert left.node_id == other.identity.node_id
        kinds = [type(event).__name__ for event in listener.events]
        assert kinds == ["LinkUp"] * 3 + ["LinkDown"] * 2
    assert listener.table.dialled_by_others == 3


def test_each_message_goes_out_as_what_it_is() -> None:
    end, sent = End(0), []
    end.table[7] = cast(PeerLink, SimpleNamespace(send=sent.append))
    first, second = Ping(1), Ping(2)
    for message in (first, first, second, Ping(1)):
        end.table.send(7, message)
    end.table.send(8, first)
    assert sent == [encode(message) for message in (first, first, second, first)]


DELTA = (bytes([RecordKind.DELTA]) + bytes(HEADER_BYTES), True)
MEMBER = (bytes([RecordKind.MEMBER]) + bytes(HEADER_BYTES), False)


async def test_while_the_disk_takes_no_records_only_deltas_wait(
    secure_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, _, link = secure_pair
    received: list[Message] = []
    room = asyncio.Event()
    writer: Any = SimpleNamespace(has_room=False, room=room.wait)

    def dispatch(event: ev.Event) -> list[fx.Effect]:
        assert isinstance(event, ev.Received)
        received.append(decode(event.data))
        return []

    table = LinkTable(PeerScores(), cast(Any, None), writer, dispatch)
    for message in (Ping(1), Records((MEMBER,))):
        await table._receive(link, encode(message))
    assert received == [Ping(1), Records((MEMBER,))], "without a wait"
    waits = asyncio.create_task(table._receive(link, encode(Records((DELTA,)))))
    await asyncio.sleep(0.01)
    assert not waits.done() and len(received) == 2
    writer.has_room = True
    room.set()
    await waits
    assert received[2:] == [Records((DELTA,))], "the disk has caught up"
    writer.has_room = False
    room.clear()
    monkeypatch.setattr(link_module, "PAUSE_MAX_S", 0.01)
    await table._receive(link, encode(Records((DELTA, MEMBER))))
    assert received[3:] == [Records((MEMBER,))], "the delta comes again"


async def test_a_date_tells_how_far_a_peers_clock_is_ahead(
    secure_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = secure_pair[2]
    monkeypatch.setattr(link_module.time, "time", lambda: 40.5)
    for date in (None, "", "now", "Thu, 01 Jan 99999 00:01:40 GMT", "Thu, 32 Jan 1970 00:01:40 GMT"):
        link.note_date(date)
        assert link.clock_offset_s is None, date
    link.note_date("Thu, 01 Jan 1970 00:01:40 GMT")
    assert link.clock_offset_s == 60.0
