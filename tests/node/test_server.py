"""The port: handshakes over TLS, strangers with little time and few bytes, and what a node listens on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from gossamer.node.daemon.network import links as link_module
from gossamer.node.daemon.network import server as server_module
from gossamer.node.daemon.network.links import PREFIX, SESSION_HEADER
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Connection, ConnectionLimiter
from gossamer.node.daemon.network.sockets import client_context
from gossamer.protocol.access.rate_limits import PER_ADDRESS, PER_NODE, Allowance, Resource
from gossamer.protocol.errors import (
    ConfigError,
    Offence,
    RefusedError,
)
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from tests.net.stranger import linked as stranger_linked
from tests.node.trainer_side import until
from tests.node.wires import End, Ends, Pair, get_chunk, linked, listening
from tests.protocol.builders import SMALL


@contextlib.asynccontextmanager
async def connected(
    end: End, *, tls: bool
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = end.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context() if tls else None)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def dribbles_to_its_end(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes
) -> None:
    """Send a piece now and then until the other side has had enough."""
    async with asyncio.timeout(60):
        with contextlib.suppress(OSError):
            while not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 0.03)


async def test_a_link_carries_messages_both_ways(pair: Pair) -> None:
    dialler, listener, out, inward = pair
    assert (out.node_id, inward.node_id) == (listener.identity.node_id, dialler.identity.node_id)
    assert out.outbound and not inward.outbound
    assert out.session == inward.session and out.address == listener.address
    out.send(b"there")
    inward.send(b"and back")
    await until(lambda: listener.messages == [b"there"] and dialler.messages == [b"and back"])
    out.close_soon()
    await until(lambda: dialler.gone == [out] and listener.gone == [inward])
    assert listener.server._sessions == {}


async def test_another_swarm_is_refused_with_a_reason() -> None:
    dialler, listener = End(1, swarm_id=bytes(32)), End(2)
    async with listening(dialler, listener):
        with pytest.raises(RefusedError, match=r"this node belongs to swarm .* not 000000000000"):
            await dialler.dial(listener)
        assert dialler.links == listener.links == []
        await until(lambda: len(listener.server.limiter) == 0)


async def test_a_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    listener = End(2)
    blame = Mock()
    monkeypatch.setattr(listener.scores, "blame_address", blame)
    async with listening(listener), aiohttp.ClientSession() as http:
        url = f"https://{listener.address}{PREFIX}/link"
        async with http.ws_connect(url, ssl=client_context()) as socket:
            await socket.receive_bytes()
            assert (await socket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: len(listener.server.limiter) == 0)
        assert blame.call_args.args[1] is Offence.STALLED


async def test_a_client_that_goes_away_in_the_handshake_did_nothing_wrong(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a few of them behind one address would have everybody there turned away."""
    _, listener = ends
    blame = Mock()
    monkeypatch.setattr(listener.scores, "blame_address", blame)
    async with aiohttp.ClientSession() as http:
        url = f"http{'s' if listener.tls else ''}://{listener.address}{PREFIX}/link"
        async with http.ws_connect(url, ssl=client_context()) as socket:
            await socket.receive_bytes()
        await until(lambda: len(listener.server.limiter) == 0)
    blame.assert_not_called()


async def test_an_idle_connection_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.2)
    listener = End(2)
    async with listening(listener):
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context())
        assert await asyncio.wait_for(reader.read(1), 60) == b""
        writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no.such.host.invalid"])
async def test_a_port_in_use_or_an_address_of_others_is_one_clear_line(host: str) -> None:
    first, second = End(1), End(2)
    async with listening(first):
        port = int(first.address.split(":")[1])
        problem = rf"^cannot listen on {host}:{port}: (?!unknown error)[\w ,]+; choose another --listen$"
        with pytest.raises(ConfigError, match=problem):
            await second.start(host, port)


async def test_a_node_that_leaves_the_port_to_the_system_keeps_its_last_one() -> None:
    first, other, again = End(1), End(2), End(1)
    port = await first.start("127.0.0.1", 0)
    try:
        taken = await other.server.start("127.0.0.1", 0, last=port)
        assert taken not in (0, port), "somebody else's port is left alone"
    finally:
        await first.stop()
        await other.stop()
    try:
        assert await again.server.start("127.0.0.1", 0, last=port) == port
    finally:
        await again.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
async def test_plaintext_off_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="plaintext is for loopback only"):
        await End(1, tls=False).start(host, 0)


async def test_plaintext_and_tls_do_not_mix() -> None:
    plain, secure = End(1, tls=False), End(2)
    async with listening(plain, secure):
        for dialler, listener in ((plain, secure), (secure, plain)):
            with pytest.raises((aiohttp.ClientError, OSError, TimeoutError)):
                await dialler.dial(listener)


@pytest.mark.parametrize("old", ["dialler", "listener"])
async def test_who_speaks_no_tls_1_3_is_refused(old: str) -> None:
    dialler, listener = End(1), End(2)
    context = dialler.dialler._tls if old == "dialler" else listener.server.limiter.tls
    assert isinstance(context, ssl.SSLContext)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(dialler, listener):
        with pytest.raises(aiohttp.ClientConnectorError):
            await asyncio.wait_for(dialler.dial(listener), 60)
    assert dialler.links == listener.links == []


async def test_stopping_ends_links_and_leaves_no_task(secure: Ends) -> None:
    dialler, listener = secure
    await linked(dialler, listener)
    tasks = {t for t in asyncio.all_tasks() if t is not asyncio.current_task()}
    async with asyncio.timeout(60):
        await listener.stop()
        await dialler.stop()
        await asyncio.wait(tasks)
    assert len(listener.gone) == len(dialler.gone) == 1


async def test_a_node_that_listens_on_all_addresses_of_ipv6_is_reached_by_ipv4_too() -> None:
    """And says of itself the address that it was reached at, as whoever has IPv4 alone can dial it."""
    dialler, listener = End(1), End(2)
    async with listening(dialler):
        try:
            port = await listener.start("::", 0)
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
            await listener.stop()


async def test_a_tls_handshake_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TLS_HANDSHAKE_TIMEOUT_S", 0.2)
    listener = End(2)
    async with listening(listener):
        for first in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET /"):  # a ClientHello's beginning, and none
            async with connected(listener, tls=False) as (reader, writer):
                writer.write(first)
                async with asyncio.timeout(60):
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read(1) == b""
        await until(lambda: len(listener.server.limiter) == 0)
        assert listener.server.limiter.counts["tls_failed"] == 3


@pytest.mark.parametrize("end_of_headers", ["X-Slow: ", "Host: x\r\n\r\n"], ids=["dribbling", "answered"])
async def test_a_stranger_has_little_time(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, end_of_headers: str
) -> None:
    monkeypatch.setattr(server_module, "STRANGER_TIMEOUT_S", 0.3)
    _, listener = ends
    with contextlib.suppress(OSError):  # on a slow machine its time is over before the TLS handshake is
        async with connected(listener, tls=listener.tls) as (reader, writer):
            writer.write(f"GET {PREFIX}/status HTTP/1.1\r\n{end_of_headers}".encode())
            await dribbles_to_its_end(reader, writer, b"a" if end_of_headers == "X-Slow: " else b"")
    assert listener.server.limiter.counts["timed_out"] == 1
    await until(lambda: len(listener.server.limiter) == 0)


async def test_a_stranger_that_says_too_much(ends: Ends) -> None:
    _, listener = ends
    async with connected(listener, tls=listener.tls) as (reader, writer):
        path = f"{PREFIX}/chunk/{'ab' * 32}"
        writer.write(f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n".encode())
        await dribbles_to_its_end(reader, writer, bytes(200_000))
    await until(lambda: listener.server.limiter.counts["too_many_bytes"] == 1)


async def test_links_and_their_chunks_outlive_what_strangers_have(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STRANGER_TIMEOUT_S", 5.0)
    monkeypatch.setattr(server_module, "STRANGER_BYTES_MAX", 4096)
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(os.urandom(1000))
    await get_chunk(out, blob, 1000)
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 6.0)  # and all that was due meanwhile is done
    for _ in range(10):
        out.send(bytes(2000))
    await until(lambda: len(listener.messages) == 10)
    await get_chunk(out, blob, 1000)
    assert listener.server.limiter.counts["timed_out"] == 0
    assert dialler.gone == listener.gone == []


async def test_half_open_handshakes_give_way_to_an_honest_hello(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same address, and opened anew whenever one is closed."""
    monkeypatch.setattr(server_module, "STRANGERS_PER_ADDRESS_MAX", 16)
    dialler, listener = ends
    scheme = "https" if listener.tls else "http"
    url = f"{scheme}://{listener.address}{PREFIX}/link"
    stop = asyncio.Event()
    opened = 0

    async def holds_open(http: aiohttp.ClientSession) -> None:
        nonlocal opened
        while not stop.is_set():
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.ws_connect(url, ssl=client_context() if listener.tls else False) as socket:
                    opened += 1
                    await socket.receive_bytes()
                    await socket.receive()
            await asyncio.sleep(0.5)

    async with aiohttp.ClientSession() as http:
        flood = [asyncio.create_task(holds_open(http)) for _ in range(20)]
        await until(lambda: opened > 20 and listener.server.limiter.counts["gave_way"] >= 4)
        for _ in range(20):
            dialler.dial(listener)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await until(lambda: dialler.links)
                    break
        stop.set()
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert dialler.links, "it got through"
        dialler.links[0].send(b"and is served")
        await until(lambda: listener.messages == [b"and is served"])


async def test_too_many_connections_in_all(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STRANGERS_MAX", 3)
    dialler, listener = ends
    await linked(dialler, listener)
    async with contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(listener, tls=False)) for _ in range(10)]
        await until(lambda: listener.server.limiter.counts["gave_way"] == 7)
        assert len(listener.server.limiter) == 4
        told = listener.server.limiter.describe()
        assert (told["refused"], told["causes"]) == (7, {"gave_way": 7})
        async with asyncio.timeout(60):
            for reader, _ in idle[:7]:  # the oldest went
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read(1) == b""
    assert listener.gone == []


async def test_where_all_are_members_nobody_gives_way(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 1)
    dialler, listener = ends
    await linked(dialler, listener)
    async with connected(listener, tls=False):
        await until(lambda: listener.server.limiter.counts["no_room"] == 1)
        assert len(listener.server.limiter) == 1
    assert listener.gone == []


async def test_an_address_may_only_connect_so_fast(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PER_ADDRESS, Resource.CONNECTIONS, Allowance(0.01, 5.0))
    dialler, listener = ends
    await linked(dialler, listener)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            with contextlib.suppress(OSError):
                await stack.enter_async_context(connected(listener, tls=False))
        await until(lambda: listener.server.limiter.counts["too_fast"] == 6)
        assert len(listener.server.limiter) <= 5
    dialler.links[0].send(b"links stay")
    await until(lambda: listener.messages == [b"links stay"])


async def test_an_address_that_is_turned_away_hears_for_how_long(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "origin_of", lambda host: "203.0.113.5")
    dialler, listener = ends

    for _ in range(30):
        listener.scores.blame_address("203.0.113.5", Offence.HANDSHAKE)
    with pytest.raises(RefusedError, match=r"it turns our address away for another \d{3,} s"):
        await dialler.dial(listener)
    async with aiohttp.ClientSession() as http:
        url = f"{listener.local.scheme}://{listener.address}{PREFIX}/status"
        async with http.get(url, ssl=client_context()) as answer:
            assert answer.status == 429 and "turned away for misbehaviour" in await answer.text()
    assert listener.server.limiter.counts["greylisted"] == 2


async def test_what_speaks_no_tls_or_no_protocol_of_ours_costs_its_address_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the probes of a load balancer, behind which all peers may be."""
    monkeypatch.setattr(server_module, "origin_of", lambda host: "203.0.113.5")
    dialler, listener = ends
    for first in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/1.0\r\n\r\n"):
        for _ in range(10):
            async with connected(listener, tls=False) as (_, writer):
                writer.write(first)
    await until(lambda: len(listener.server.limiter) == 0)
    assert not listener.scores.refused_for("203.0.113.5")
    await linked(dialler, listener)


async def test_one_link_may_only_have_so_many_connections(pair: Pair) -> None:
    _, listener, out, _ = pair
    blob = listener.hold(b"data")
    assert out.dialled is not None
    url = f"{out.dialled.base_url}/chunk/{blob.hex()}"
    headers = {SESSION_HEADER: out.session.hex()}
    statuses = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(12):  # a connection each, all kept open
            http = await stack.enter_async_context(aiohttp.ClientSession())
            answer = await http.get(url, headers=headers, ssl=client_context() if listener.tls else False)
            statuses.append(answer.status)
    assert statuses.count(200) == 8
    assert statuses.count(429) == 4


async def test_what_came_by_a_link_ends_with_the_last_one_of_its_peer(pair: Pair) -> None:
    dialler, listener, out, inward = pair
    blob = listener.hold(bytes(CHUNK_BYTES_MAX))
    assert out.dialled is not None
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):  # none of them reads what it has asked for
            http = await stack.enter_async_context(
                aiohttp.ClientSession(read_bufsize=1024, auto_decompress=False)
            )
            answer = await http.get(
                f"{out.dialled.base_url}/chunk/{blob.hex()}",
                headers={SESSION_HEADER: out.session.hex()},
                ssl=client_context() if listener.tls else False,
            )
            stack.callback(answer.close)
        limiter = listener.server.limiter
        assert len(limiter) == 5
        dialler.dial(listener)
        await until(lambda: len(listener.links) == 2)
        inward.close_soon()
        await until(lambda: listener.gone == [inward])
        await until(lambda: len(limiter) == 5)
        listener.links[-1].close_soon()
        await until(lambda: len(limiter) == 0)


async def test_frames_that_never_become_a_message_are_read_slowly(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty pieces of a message that never ends: the message handler hears of none of them."""
    monkeypatch.setitem(PER_NODE, Resource.CPU, Allowance(0.01, 0.001))
    dialler, listener = ends
    async with stranger_linked(listener.address, SMALL.swarm_id, tls=listener.tls) as peer:
        transport = peer.socket._response.connection.transport  # type: ignore[union-attr]
        mask = bytes(4)
        transport.write(b"\x02\x80" + mask)
        async with asyncio.timeout(60):
            while transport.get_write_buffer_size() < 1 << 20:  # until TCP makes it wait
                transport.write((b"\x00\x80" + mask) * 10_000)
                await asyncio.sleep(0.001)
        assert listener.scores.throttled > 0
        assert listener.messages == []
        out, _ = await linked(dialler, listener)
        out.send(b"others are heard")
        await until(lambda: listener.messages == [b"others are heard"])
        transport.abort()


async def test_a_connection_is_read_on_only_where_http_and_its_budget_both_allow_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        line: Any = writer.transport
        connection = Connection(ConnectionLimiter(None, PeerScores()), asyncio.Protocol)
        connection._transport = line
        connection.pause_for(0.01)
        connection.resume_reading()
        assert not line.is_reading()
        connection.pause_reading()
        await until(lambda: "budget" not in connection._held_by)
        assert not line.is_reading()
        connection.resume_reading()
        assert line.is_reading()
        connection.pause_for(0.0)
        connection.pause_for(60.0)  # before the first pause ends, which then does not end this one
        for _ in range(3):
            await asyncio.sleep(0)
        assert not line.is_reading()
        connection.connection_lost(None)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("frame", ["ping", "pong"])
async def test_control_frames_that_no_node_sends_end_the_link(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, frame: str
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_TIMEOUT_S", 0.01)  # the stranger does not answer
    _, listener = ends
    async with stranger_linked(listener.address, SMALL.swarm_id, tls=listener.tls) as peer:
        await (peer.socket.ping() if frame == "ping" else peer.socket.pong())
        await until(lambda: listener.gone)
