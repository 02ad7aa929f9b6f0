"""`gossamer.node.daemon.network.server`: handshakes over pinned TLS, and chunks for members only."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from gossamer.node.daemon.network import chunk_transfer as chunk_routes
from gossamer.node.daemon.network import server as transport_module
from gossamer.node.daemon.network import upload_limits as uplink
from gossamer.node.daemon.network.chunk_transfer import READ_PIECE_BYTES, get_chunk
from gossamer.node.daemon.network.connections import WRITE_BUFFER_BYTES
from gossamer.node.daemon.network.links import SESSION_HEADER, PeerLink
from gossamer.node.daemon.network.listening import Resolver
from gossamer.node.daemon.network.server import PREFIX
from gossamer.node.daemon.network.tls import Certificate, client_context
from gossamer.protocol.errors import (
    ConfigError,
    Offence,
    PayloadError,
    PeerError,
    RefusedError,
    SignatureError,
)
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from gossamer.protocol.payloads.chunks import pack_chunk
from tests.node.trainer_side import until
from tests.node.wires import End, hung_up, linked, listening, put


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


# -- links


async def test_a_link_carries_messages_both_ways(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    assert (out.node_id, inward.node_id) == (listener.identity.node_id, dialler.identity.node_id)
    assert out.outbound and not inward.outbound
    assert out.session == inward.session and out.address == listener.address
    out.send(b"there")
    inward.send(b"and back")
    await until(lambda: listener.messages == [b"there"] and dialler.messages == [b"and back"])
    out.close_soon()
    await until(lambda: dialler.gone == [out] and listener.gone == [inward])
    assert listener.transport._sessions == {}


def connections_of(end: End) -> int:
    assert end.transport.door is not None
    return end.transport.door.connections


async def test_another_swarm_is_refused_with_a_reason() -> None:
    dialler, listener = End(1, swarm_id=bytes(32)), End(2)
    async with listening(dialler, listener):
        with pytest.raises(RefusedError, match=r"this node belongs to swarm .* not 000000000000"):
            await dialler.dial(listener)
        assert dialler.links == listener.links == []
        await until(lambda: connections_of(listener) == 0)


async def test_another_node_than_expected_is_refused(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    with pytest.raises(SignatureError, match="not the one we dialled"):
        await dialler.dial(listener, End(3).identity.node_id)
    await until(lambda: connections_of(listener) == 0)
    assert listener.links == []


async def test_whoever_answers_and_is_turned_away_is_no_link(ends: tuple[End, End]) -> None:
    """An address says nothing of who is there, where it was told without a node id."""
    dialler, listener = ends
    while not dialler.scores.is_greylisted(listener.identity.node_id):
        dialler.scores.blame(listener.identity.node_id, "garbage", Offence.MALFORMED)
    with pytest.raises(RefusedError, match="turned away for misbehaviour"):
        await asyncio.wait_for(dialler.dial(listener), 5)
    assert dialler.links == []
    await until(lambda: listener.links == listener.gone)


async def test_whoever_dials_and_is_turned_away_is_told_so(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    while not listener.scores.is_greylisted(dialler.identity.node_id):
        listener.scores.blame(dialler.identity.node_id, "garbage", Offence.MALFORMED)
    with pytest.raises(RefusedError, match="turned away for misbehaviour"):
        await asyncio.wait_for(dialler.dial(listener), 5)
    assert dialler.links == listener.links == []


async def test_nobody_there_is_an_ordinary_error(ends: tuple[End, End]) -> None:
    dialler, _ = ends
    for address in ("127.0.0.1:1", "no.such.host.invalid:80"):
        with pytest.raises((OSError, TimeoutError, aiohttp.ClientError)):
            await dialler.dial(address)


async def serve(handler: object, context: ssl.SSLContext | None) -> tuple[web.AppRunner, str]:
    """A server that is no node; returns its address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    return runner, f"127.0.0.1:{runner.addresses[0][1]}"


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


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def silent(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await asyncio.sleep(1)
        return socket

    dialler = End(1)
    context = Certificate.fresh().context
    runner, address = await serve(silent, context)
    async with listening(dialler):
        with pytest.raises(TimeoutError):
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


async def test_requests_of_a_link_are_pinned_to_its_certificate(secure: tuple[End, End]) -> None:
    """Whoever takes over the address after the handshake gets no session token."""
    dialler, listener = secure
    out, _ = await linked(dialler, listener)
    seen: list[str] = []

    async def thief(request: web.Request) -> web.Response:
        seen.append(request.headers.get(SESSION_HEADER, ""))
        return web.Response(body=b"x")

    context = Certificate.fresh().context
    runner, address = await serve(thief, context)
    assert out.dialled is not None
    out.dialled = replace(out.dialled, base_url=f"https://{address}{PREFIX}")
    with pytest.raises(aiohttp.ClientError):
        await get_chunk(out, bytes(32), 1)
    assert seen == []
    await runner.cleanup()


async def test_a_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    listener = End(2)
    blame = Mock()
    monkeypatch.setattr(listener.scores, "blame_address", blame)
    async with listening(listener), aiohttp.ClientSession() as http:
        url = f"https://{listener.address}{PREFIX}/link"
        async with http.ws_connect(url, ssl=client_context()) as socket:
            await socket.receive_bytes()
            assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: connections_of(listener) == 0)
        assert blame.call_args.kwargs == {"stalled": True}


async def test_a_client_that_goes_away_in_the_handshake_did_nothing_wrong(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a few of them behind one address would have everybody there turned away."""
    _, listener = ends
    blame = Mock()
    monkeypatch.setattr(listener.scores, "blame_address", blame)
    async with aiohttp.ClientSession() as http:
        url = f"http{'s' if listener.tls else ''}://{listener.address}{PREFIX}/link"
        async with http.ws_connect(url, ssl=client_context()) as socket:
            await socket.receive_bytes()
        await until(lambda: connections_of(listener) == 0)
    blame.assert_not_called()


async def test_an_idle_connection_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "IDLE_TIMEOUT_S", 0.2)
    listener = End(2)
    async with listening(listener):
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context())
        assert await asyncio.wait_for(reader.read(1), 5) == b""
        writer.close()


# -- chunks


@pytest.mark.parametrize("size", [1, 300_000, CHUNK_BYTES_MAX])
async def test_chunks_are_got_and_put(ends: tuple[End, End], size: int) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    data = os.urandom(size)
    blob = listener.hold(data)
    assert await get_chunk(out, blob, size) == data
    assert (out.traffic.payload_received, inward.traffic.payload_sent) == (size, size)
    other = os.urandom(size)
    listener.wanted[sha256(other).digest()] = size
    await put(out, sha256(other).digest(), other)
    assert listener.arrived == {sha256(other).digest(): other}
    assert (out.traffic.payload_sent, inward.traffic.payload_received) == (size, size)


async def test_every_chunk_tells_both_what_time_it_is_at_the_other(ends: tuple[End, End]) -> None:
    """Who is only dialled has no answers to read it from."""
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
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


async def test_chunks_travel_packed_where_that_is_smaller(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    data = os.urandom(1000) * 100
    blob, size = listener.hold(data), len(data)
    assert await get_chunk(out, blob, size) == data
    assert 1000 < out.traffic.payload_received == inward.traffic.payload_sent < 2000
    listener.wanted[blob] = size
    await put(out, blob, data)
    assert listener.arrived == {blob: data}
    assert 1000 < out.traffic.payload_sent == inward.traffic.payload_received < 2000


async def test_a_packed_chunk_is_no_longer_than_was_asked_for(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    blob = listener.hold(bytes(CHUNK_BYTES_MAX))  # the record that says 1,000 may lie, not who holds it
    with pytest.raises(RefusedError, match="a chunk that is not"):
        await get_chunk(out, blob, 1000)
    listener.wanted[blob] = 1000
    with pytest.raises(RefusedError, match="did not take"):
        await put(out, blob, bytes(CHUNK_BYTES_MAX))
    assert not listener.scores.blamed and (listener.failed, listener.arrived) == ([(inward, blob)], {})


async def test_what_comes_packed_is_checked_like_anything(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob, size = listener.hold(b"honest" * 1000), 6000
    frame = pack_chunk(b"liar!!" * 1000)
    assert frame is not None
    for body in (frame, frame[:-1], frame + b"x", b"no frame", b"", bytes(size)):
        listener.frames[blob] = body
        with pytest.raises(PayloadError):
            await get_chunk(out, blob, size)
    del listener.frames[blob]
    assert await get_chunk(out, blob, size) == b"honest" * 1000


async def test_what_is_got_must_be_what_was_asked_for(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
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


async def test_what_is_longer_than_was_asked_for_is_not_read_to_its_end(ends: tuple[End, End]) -> None:
    """It may have none."""
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    blob = listener.hold(os.urandom(4 * CHUNK_BYTES_MAX))
    with pytest.raises(RefusedError, match="a chunk that is not"):
        await get_chunk(out, blob, 6)
    listener.wanted[blob] = 6
    with pytest.raises((RefusedError, aiohttp.ClientError, OSError)):
        await put(out, blob, listener.chunks[blob])
    await until(lambda: listener.failed)
    assert out.traffic.payload_received <= READ_PIECE_BYTES
    assert inward.traffic.payload_received <= READ_PIECE_BYTES


async def test_a_put_must_be_asked_for_and_hold_what_it_says(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
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


async def test_a_chunk_that_cannot_be_stored_need_not_be_waited_for(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    blob = sha256(b"data").digest()
    listener.wanted[blob] = 4
    listener.disk_is_full = True
    with pytest.raises(RefusedError):
        await put(out, blob, b"data")
    assert listener.failed == [(inward, blob)]


async def test_who_finds_our_line_full_is_told_so(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(b"data")
    monkeypatch.setattr(uplink, "TURN_PATIENCE_S", 0.05)
    monkeypatch.setattr(uplink.Uplink, "places", 0)
    declined: list[bytes] = []
    monkeypatch.setattr(listener.scores, "declined", lambda node_id: declined.append(node_id) or 0.0)
    with pytest.raises(RefusedError, match="does not have"):
        await get_chunk(out, blob, 4)
    assert declined == [dialler.identity.node_id], "or it could ask again and again for nothing"
    monkeypatch.undo()
    assert await get_chunk(out, blob, 4) == b"data"


async def test_what_is_not_here_waits_for_no_place(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    monkeypatch.setattr(uplink, "TURN_PATIENCE_S", 3600.0)
    monkeypatch.setattr(uplink.Uplink, "places", 0)
    with pytest.raises(RefusedError, match="does not have"):
        await asyncio.wait_for(get_chunk(out, bytes(32), 4), 5)


async def test_who_was_hung_up_while_it_waited_for_a_place_is_sent_nothing(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    blob = listener.hold(b"data")
    with monkeypatch.context() as patch:
        patch.setattr(uplink, "TURN_PATIENCE_S", 3600.0)
        patch.setattr(uplink, "LOOK_S", 0.01)
        patch.setattr(uplink.Uplink, "places", 0)
        asks = asyncio.create_task(get_chunk(out, blob, 4))
        await until(inward.serving.locked)
        inward._closing = True  # as close_soon does, with a queue that the peer takes slowly
    with pytest.raises(RefusedError, match="does not have"):
        await asks
    assert inward.traffic.payload_sent == 0


async def test_who_takes_nothing_of_a_chunk_is_cut_off(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_routes, "FETCH_TIMEOUT_S", 0.2)
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(os.urandom(16 * CHUNK_BYTES_MAX))  # more than the system's buffers take
    host, port = listener.address.split(":")
    context = client_context() if listener.tls else None
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    head = f"GET {PREFIX}/chunk/{blob.hex()} HTTP/1.1\r\nHost: x\r\n"
    writer.write(f"{head}{SESSION_HEADER}: {out.session.hex()}\r\n\r\n".encode())
    door = listener.transport.door
    assert door is not None
    await until(lambda: door.counts["connections"] == 2)
    await until(lambda: door.connections == 1)
    assert listener.gone == []
    writer.transport.abort()


async def test_whoever_takes_a_chunk_slowly_gets_all_of_it(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    data = os.urandom(16 * CHUNK_BYTES_MAX)  # more than the system's buffers take
    blob = listener.hold(data)
    async with asyncio.timeout(10):
        assert await get_chunk(out, blob, len(data)) == data


async def test_little_of_a_chunk_waits_in_buffers_where_nobody_sees_how_fast_it_goes_out(
    secure: tuple[End, End],
) -> None:
    dialler, listener = secure
    out, _ = await linked(dialler, listener)
    await get_chunk(out, listener.hold(b"data"), 4)
    assert listener.transport.door is not None
    guests = list(listener.transport.door._guests)
    assert [guest._transport.get_write_buffer_limits()[1] for guest in guests] == [WRITE_BUFFER_BYTES] * 2


async def test_without_a_session_there_is_nothing(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
    blob = listener.hold(b"data")
    session = PeerLink(9, out.node_id, out._socket, os.urandom(32), dialled=out.dialled)
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


# -- listening


async def test_a_port_in_use_is_one_clear_line() -> None:
    first, second = End(1), End(2)
    async with listening(first):
        port = int(first.address.split(":")[1])
        with pytest.raises(ConfigError) as error:
            await second.transport.start("127.0.0.1", port)
        assert str(error.value).startswith(f"cannot listen on {first.address}: ")
        assert "choose another --listen" in str(error.value) and "\n" not in str(error.value)
    await second.transport.stop()


async def test_a_node_that_leaves_the_port_to_the_system_keeps_its_last_one() -> None:
    first, other, again = End(1), End(2), End(1)
    port = await first.transport.start("127.0.0.1", 0)
    try:
        taken = await other.transport.start("127.0.0.1", 0, last=port)
        assert taken not in (0, port), "somebody else's port is left alone"
    finally:
        await first.transport.stop()
        await other.transport.stop()
    try:
        assert await again.transport.start("127.0.0.1", 0, last=port) == port
    finally:
        await again.transport.stop()


async def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    end = End(1)
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(
            ConfigError, match=rf"cannot listen on {host}:0: (?!unknown error)[\w ,]+; choose"
        ):
            await end.transport.start(host, 0)
    await end.transport.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
async def test_plaintext_off_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="plaintext is for loopback only"):
        await End(1, tls=False).transport.start(host, 0)


async def test_plaintext_and_tls_do_not_mix() -> None:
    plain, secure = End(1, tls=False), End(2)
    async with listening(plain, secure):
        for dialler, listener in ((plain, secure), (secure, plain)):
            with pytest.raises((aiohttp.ClientError, OSError, TimeoutError)):
                await dialler.dial(listener)


@pytest.mark.parametrize("old", ["dialler", "listener"])
async def test_who_speaks_no_tls_1_3_is_refused(old: str) -> None:
    dialler, listener = End(1), End(2)
    context = dialler.transport._client_ssl if old == "dialler" else listener.transport._server_ssl
    assert isinstance(context, ssl.SSLContext)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(dialler, listener):
        with pytest.raises(aiohttp.ClientConnectorError):
            await asyncio.wait_for(dialler.dial(listener), 5)
    assert dialler.links == listener.links == []


async def test_stopping_ends_links_and_leaves_no_task(secure: tuple[End, End]) -> None:
    dialler, listener = secure
    await linked(dialler, listener)
    tasks = {t for t in asyncio.all_tasks() if t is not asyncio.current_task()}
    async with asyncio.timeout(3):
        await listener.transport.stop()
        await dialler.transport.stop()
        await asyncio.wait(tasks)
    assert len(listener.gone) == len(dialler.gone) == 1


async def test_a_node_that_listens_on_all_addresses_of_ipv6_is_reached_by_ipv4_too() -> None:
    """And says of itself the address that it was reached at, as whoever has IPv4 alone can dial it."""
    dialler, listener = End(1), End(2)
    async with listening(dialler):
        try:
            port = await listener.transport.start("::", 0)
        except ConfigError as error:
            pytest.skip(f"no IPv6 here: {error}")
        try:
            for number, host in enumerate(("127.0.0.1", "[::1]"), 1):
                listener.address = f"{host}:{port}"
                dialler.dial(listener)
                await until(lambda number=number: len(listener.links) == number)
            assert [link.socket_name() for link in listener.links] == [("127.0.0.1", port), ("::1", port)]
            assert [link.origin for link in listener.links] == [None, None]
        finally:
            await listener.transport.stop()


async def test_a_node_that_listens_on_one_address_dials_its_own_kind_from_it_and_the_other_too() -> None:
    dialler, listener = End(1), End(2)
    await dialler.transport.start("127.0.0.2", 0)
    try:
        port = await listener.transport.start("::", 0)
    except ConfigError as error:
        await dialler.transport.stop()
        pytest.skip(f"no IPv6 here: {error}")
    try:
        for number, host in enumerate(("127.0.0.1", "[::1]"), 1):
            dialler.dial(f"{host}:{port}")
            await until(lambda number=number: len(listener.links) == number)
        names = [link._socket.get_extra_info("peername")[0] for link in listener.links]
        assert names == ["::ffff:127.0.0.2", "::1"]
    finally:
        await dialler.transport.stop()
        await listener.transport.stop()
        await asyncio.gather(*dialler.dials, return_exceptions=True)


async def test_names_that_nobody_can_look_up_hold_neither_the_disk_up_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that is out of reach holds each lookup up for half a minute."""
    asked, answer = [], threading.Event()

    def wait(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        answer.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    dialler = End(1)
    async with listening(dialler):
        monkeypatch.setattr(socket, "getaddrinfo", wait)
        names = {f"n{number}.example.org" for number in range(40)}
        dials = [dialler.dial(f"{name}:7700") for name in names]
        try:
            await until(lambda: set(asked) == names)
            assert await asyncio.wait_for(asyncio.to_thread(os.getpid), 5) == os.getpid()
        finally:
            answer.set()
        for dial in dials:
            with pytest.raises(aiohttp.ClientConnectorError, match="Temporary failure"):
                await dial
        monkeypatch.undo()
        (found, *_) = await Resolver().resolve("localhost", 7700, socket.AF_INET)
        assert (found["host"], found["port"], found["family"]) == ("127.0.0.1", 7700, socket.AF_INET)


@pytest.mark.parametrize("name", ["a" * 64 + ".example.org", "a..example.org"])
async def test_what_cannot_be_a_name_is_an_error_like_others(name: str) -> None:
    with pytest.raises(OSError, match="is not a host name"):
        await asyncio.wait_for(Resolver().resolve(name), 10)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_an_address_is_no_name_that_this_machine_has_to_have_a_way_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its own interfaces are of the other family, as the system's lookups see it."""
    look_up = socket.getaddrinfo

    def of_the_other_family(*arguments: Any, flags: int, **options: Any) -> list[Any]:
        if flags & socket.AI_ADDRCONFIG:
            raise socket.gaierror(socket.EAI_FAMILY, "Address family for hostname not supported")
        return look_up(*arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_the_other_family)
    (found,) = await Resolver().resolve(address, 7700, socket.AF_UNSPEC)
    assert found["host"] == address


async def test_where_no_thread_can_be_started_a_lookup_is_an_error_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="cannot start a thread"):
        await Resolver().resolve("localhost")


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
            await dialler.transport.dial(address, None, certificate.fingerprint if pinned else b"")
    assert not asked
    await outside.cleanup()
    await inside.cleanup()


async def test_a_body_that_is_not_what_its_headers_say_is_refused_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dialler, listener = End(1, tls=False), End(2, tls=False)
    blob = sha256(b"chunk").digest()
    listener.wanted[blob] = 5
    async with listening(dialler, listener), aiohttp.ClientSession() as client:
        out, _ = await linked(dialler, listener)
        headers = {"Content-Encoding": "gzip", SESSION_HEADER: out.session.hex()}
        for path in ("credential", f"chunk/{blob.hex()}"):
            url = f"http://{listener.address}{PREFIX}/{path}"
            async with client.put(url, data=b"garbage", headers=headers) as response:
                assert response.status == 400, await response.text()
    assert [failed for _, failed in listener.failed] == [blob]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_who_stops_after_a_peer_has_sent_too_much_stops_all_the_same(secure: tuple[End, End]) -> None:
    """aiohttp closes such a connection twice, and keeps it while the peer does not agree to end TLS."""
    dialler, listener = secure
    data, is_over = b"chunk", asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        await asyncio.sleep(0.02)
        writer.writelines([data, b"more"])
        writer.transport.pause_reading()
        await is_over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=Certificate.fresh().context)
    link, _ = await linked(dialler, listener)
    assert link.dialled is not None
    host, port = server.sockets[0].getsockname()
    link.dialled = replace(link.dialled, base_url=f"https://{host}:{port}", ssl=client_context())
    link.close_soon()
    await until(lambda: dialler.gone == [link])
    assert await get_chunk(link, sha256(data).digest(), len(data)) == data
    await dialler.transport.stop()
    is_over.set()
    server.close()
    await hung_up(port)
