"""Links: a bounded queue, whom we dial, and what reaches the core."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from gossamer.node.daemon.network import links as link_module
from gossamer.node.daemon.network.links import LinkTable, PeerLink, clock_offset
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.tls import Certificate, client_context
from gossamer.node.daemon.storage.records import RecordWriter
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
from tests.node.wires import End, hung_up, linked, listening


@pytest.fixture(params=[True, False], ids=["tls", "plaintext"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[tuple[End, End]]:
    dialler, listener = End(1, tls=request.param), End(2, tls=request.param)
    async with listening(dialler, listener):
        yield dialler, listener


@pytest.fixture
async def secure() -> AsyncIterator[tuple[End, End]]:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        yield dialler, listener


async def serve(handler: object, context: ssl.SSLContext | None) -> tuple[web.AppRunner, str]:
    """A server that is no node; returns its address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    return runner, f"127.0.0.1:{runner.addresses[0][1]}"


async def test_messages_keep_their_order_and_are_counted() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        messages = [bytes([i % 256]) * (i + 1) for i in range(500)]
        for message in messages:
            out.send(message)
        await until(lambda: len(listener.messages) == 500)
        assert listener.messages == messages
        total = sum(map(len, messages))
        assert (out.traffic.sent, inward.traffic.received) == (total, total)
        assert out.dropped == 0 and out._queued_bytes == 0


async def test_a_full_queue_drops_and_counts() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        piece = bytes(1 << 20)
        for _ in range(20):
            out.send(piece)  # without a pause: nothing goes out in between
        fit = SEND_QUEUE_BYTES_MAX // len(piece)
        assert out.dropped == 20 - fit
        assert out._queued_bytes <= SEND_QUEUE_BYTES_MAX
        await until(lambda: len(listener.messages) == fit)
        out.send(b"room again")
        await until(lambda: listener.messages[-1] == b"room again")


async def test_closing_lets_the_queue_out_first() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        for i in range(100):
            out.send(bytes([i]))
        out.close_soon()
        await until(lambda: dialler.gone and listener.gone)
        assert len(listener.messages) == 100


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_peer_that_takes_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, who: str, tls: bool
) -> None:
    """As a frozen process: its socket stays open and is never read."""
    monkeypatch.setattr(link_module, "WRITE_TIMEOUT_S", 0.2)
    dialler, listener = End(1, tls=tls), End(2, tls=tls)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        sender, frozen, end = (out, inward, dialler) if who == "dialler" else (inward, out, listener)
        stuck = asyncio.Event()

        async def never(data: bytes) -> None:
            await stuck.wait()

        other = dialler if who == "listener" else listener
        monkeypatch.setattr(other, "message", lambda link, data: never(data))
        begun = time.monotonic()
        try:
            while not end.gone and time.monotonic() - begun < 10:
                sender.send(bytes(1 << 20))
                await asyncio.sleep(0.005)
        finally:
            stuck.set()
            frozen.close_soon()
        assert end.gone == [sender], "the link has ended for us, whatever the other does"


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_link_that_was_hung_up_is_cut_though_its_queue_has_not_gone_out(
    monkeypatch: pytest.MonkeyPatch, who: str, tls: bool
) -> None:
    """It counts as no link any more: whoever reads slowly enough could keep any number of them."""
    monkeypatch.setattr(link_module, "CLOSING_TIMEOUT_S", 0.1)
    dialler, listener = End(1, tls=tls), End(2, tls=tls)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        sender, frozen = (out, inward) if who == "dialler" else (inward, out)
        end, other = (dialler, listener) if who == "dialler" else (listener, dialler)
        stuck = asyncio.Event()

        async def never(data: bytes) -> None:
            await stuck.wait()

        monkeypatch.setattr(other, "message", lambda link, data: never(data))
        try:
            while not sender.dropped:
                sender.send(bytes(1 << 20))
                await asyncio.sleep(0)
            sender.close_soon()
            await until(lambda: end.gone == [sender])
            assert sender._queue, "and all that waits goes with it"
        finally:
            stuck.set()
            frozen.close_soon()


async def test_a_rest_ends_with_the_link() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, inward = await linked(dialler, listener)
        resting = asyncio.create_task(inward.while_up(asyncio.sleep(60.0)))
        await asyncio.sleep(0)
        inward.close_soon()
        async with asyncio.timeout(5):
            assert await resting is None


async def test_nobody_there_is_an_ordinary_error(ends: tuple[End, End]) -> None:
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
    context = Certificate.fresh().context
    runner, address = await serve(nonsense, context)
    async with listening(dialler):
        with pytest.raises((PeerError, TimeoutError)):
            await dialler.dial(address)
    await runner.cleanup()


async def test_a_man_in_the_middle_is_refused(secure: tuple[End, End]) -> None:
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

    context = Certificate.fresh().context
    runner, address = await serve(relay, context)
    with pytest.raises((SignatureError, RefusedError)):
        await dialler.dial(address, listener.identity.node_id)
    assert dialler.links == listener.links == []
    await runner.cleanup()
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

    certificate = Certificate.fresh()
    inside, inner = await serve(note, None)
    outside, address = await serve(send_on, certificate.context)
    dialler = End(1)
    async with listening(dialler):
        with pytest.raises(RefusedError, match="redirects us"):
            await dialler.dialler.connect(address, None, certificate.fingerprint if pinned else b"")
    assert not asked
    await outside.cleanup()
    await inside.cleanup()


async def test_whoever_answers_and_is_turned_away_is_no_link(ends: tuple[End, End]) -> None:
    """An address says nothing of who is there, where it was told without a node id."""
    dialler, listener = ends
    while not dialler.scores.refused_for(listener.identity.node_id):
        dialler.scores.blame(listener.identity.node_id, "garbage", Offence.MALFORMED)
    with pytest.raises(RefusedError, match="turned away for misbehaviour"):
        await asyncio.wait_for(dialler.dial(listener), 5)
    assert dialler.links == []
    await until(lambda: listener.links == listener.gone)


async def test_another_node_than_expected_is_refused(ends: tuple[End, End]) -> None:
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
    end.table._links[7] = cast(PeerLink, SimpleNamespace(send=sent.append))
    first, second = Ping(1), Ping(2)
    for message in (first, first, second, Ping(1)):
        end.table.send(7, message)
    end.table.send(8, first)
    assert sent == [encode(message) for message in (first, first, second, first)]


DELTA = (bytes([RecordKind.DELTA]) + bytes(HEADER_BYTES), True)
MEMBER = (bytes([RecordKind.MEMBER]) + bytes(HEADER_BYTES), False)


class Full:
    """The table of a node whose disk takes no records, and what its core is told."""

    def __init__(self) -> None:
        self.has_room = False
        self._room = asyncio.Event()
        self.received: list[Message] = []
        nothing: Any = None
        self.table = LinkTable(PeerScores(), nothing, cast(RecordWriter, self), self.dispatch)

    def dispatch(self, event: ev.Event) -> list[fx.Effect]:
        assert isinstance(event, ev.Received)
        self.received.append(decode(event.data))
        return []

    async def room(self) -> None:
        await self._room.wait()

    def make_room(self) -> None:
        self.has_room = True
        self._room.set()

    async def receive(self, link: PeerLink, message: Message) -> None:
        await self.table._receive(link, encode(message))


async def test_while_the_disk_takes_no_records_only_deltas_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, link = await linked(dialler, listener)
        full = Full()
        for message in (Ping(1), Records((MEMBER,))):
            await full.receive(link, message)
        assert full.received == [Ping(1), Records((MEMBER,))], "without a wait"
        waits = asyncio.create_task(full.receive(link, Records((DELTA,))))
        await asyncio.sleep(0.01)
        assert not waits.done() and len(full.received) == 2
        full.make_room()
        await waits
        assert full.received[2:] == [Records((DELTA,))], "the disk has caught up"
        full.has_room = False
        full._room.clear()
        monkeypatch.setattr(link_module, "PAUSE_MAX_S", 0.01)
        await full.receive(link, Records((DELTA, MEMBER)))
        assert full.received[3:] == [Records((MEMBER,))], "the delta comes again"
        monkeypatch.setattr(link_module, "PAUSE_MAX_S", 3600.0)
        await asyncio.wait_for(full.receive(link, Records((DELTA,))), 5)
        assert full.received[4:] == [Records(())], "nobody waits again for a disk that was waited for in vain"


def test_a_date_tells_how_far_a_peers_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module.time, "time", lambda: 40.5)
    assert clock_offset("Thu, 01 Jan 1970 00:01:40 GMT") == 60.0
    for date in (None, "", "now", "Thu, 01 Jan 99999 00:01:40 GMT", "Thu, 32 Jan 1970 00:01:40 GMT"):
        assert clock_offset(date) is None, date
