"""`door`: strangers have little time and few bytes, and give way to those who come to talk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from gossamer.node.daemon.network import chunk_transfer as chunk_routes
from gossamer.node.daemon.network import connections as door_module
from gossamer.node.daemon.network import connections as guest_module
from gossamer.node.daemon.network import links as link_module
from gossamer.node.daemon.network import upload_limits as uploads
from gossamer.node.daemon.network.chunk_transfer import get_chunk
from gossamer.node.daemon.network.connections import Connection, ConnectionLimiter, Gate
from gossamer.node.daemon.network.links import SESSION_HEADER
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import PREFIX
from gossamer.node.daemon.network.tls import client_context
from gossamer.protocol import limits
from gossamer.protocol.access.rate_limits import PER_ADDRESS, PER_NODE, Allowance, Resource
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.limits import CHUNK_BYTES_MAX, SMALL_CHUNK_BYTES
from tests.net.stranger import linked as stranger_linked
from tests.node.trainer_side import until
from tests.node.wires import End, linked, listening, put
from tests.protocol.builders import SMALL


@pytest.fixture(params=[True, False], ids=["tls", "plaintext"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[tuple[End, End]]:
    dialler, listener = End(1, tls=request.param), End(2, tls=request.param)
    async with listening(dialler, listener):
        yield dialler, listener


def door_of(end: End) -> ConnectionLimiter:
    assert end.transport.door is not None
    return end.transport.door


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
    async with asyncio.timeout(10):
        with contextlib.suppress(OSError):
            while not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 0.03)


# -- time


async def test_a_tls_handshake_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "TLS_HANDSHAKE_TIMEOUT_S", 0.2)
    listener = End(2)
    blame = Mock()
    monkeypatch.setattr(listener.scores, "blame_address", blame)
    async with listening(listener):
        for first in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET /"):  # a ClientHello's beginning, and none
            async with connected(listener, tls=False) as (reader, writer):
                writer.write(first)
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read(1) == b""
        await until(lambda: door_of(listener).connections == 0)
        assert door_of(listener).counts["tls_failed"] == 3
        assert [call.kwargs["stalled"] for call in blame.call_args_list] == [True, True, False]


async def test_headers_that_dribble(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "REQUEST_TIMEOUT_S", 0.3)
    _, listener = ends
    async with connected(listener, tls=listener.tls) as (reader, writer):
        writer.write(f"GET {PREFIX}/status HTTP/1.1\r\nX-Slow: ".encode())
        await dribbles_to_its_end(reader, writer, b"a")
    assert door_of(listener).counts["timed_out"] == 1
    await until(lambda: door_of(listener).connections == 0)


async def test_a_body_that_dribbles(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "STRANGER_TIMEOUT_S", 0.3)
    _, listener = ends
    async with connected(listener, tls=listener.tls) as (reader, writer):
        path = f"{PREFIX}/chunk/{'ab' * 32}"
        writer.write(f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n".encode())
        await dribbles_to_its_end(reader, writer, b"a")
    await until(lambda: door_of(listener).connections == 0)


async def test_a_stranger_that_says_too_much(ends: tuple[End, End]) -> None:
    _, listener = ends
    async with connected(listener, tls=listener.tls) as (reader, writer):
        path = f"{PREFIX}/chunk/{'ab' * 32}"
        writer.write(f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n".encode())
        await dribbles_to_its_end(reader, writer, bytes(200_000))
    await until(lambda: door_of(listener).counts["too_many_bytes"] == 1)


async def test_a_stranger_has_no_more_time_for_having_been_answered(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_module, "STRANGER_TIMEOUT_S", 0.5)
    _, listener = ends
    async with connected(listener, tls=listener.tls) as (reader, writer):
        writer.write(f"GET {PREFIX}/status HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        async with asyncio.timeout(5):
            with contextlib.suppress(OSError):
                await reader.read()
    assert door_of(listener).counts["timed_out"] == 1


async def test_a_connection_over_which_no_chunk_is_asked_for_any_more_is_let_go(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the door, which counts its files, whatever the HTTP server does."""
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(b"data")
    await get_chunk(out, blob, 4)
    assert door_of(listener).connections == 2
    monkeypatch.setattr(guest_module, "IDLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(guest_module, "REQUEST_TIMEOUT_S", 0.05)
    await get_chunk(out, blob, 4)
    await until(lambda: door_of(listener).connections == 1)
    assert door_of(listener).counts["timed_out"] == 1


async def test_links_and_their_chunks_outlive_what_strangers_have(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_module, "STRANGER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(guest_module, "STRANGER_BYTES_MAX", 4096)
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(os.urandom(1000))
    await get_chunk(out, blob, 1000)
    await asyncio.sleep(0.5)
    for _ in range(10):
        out.send(bytes(2000))
    await until(lambda: len(listener.messages) == 10)
    await get_chunk(out, blob, 1000)
    assert door_of(listener).counts["timed_out"] == 0
    assert dialler.gone == listener.gone == []


# -- number


async def test_half_open_handshakes_give_way_to_an_honest_hello(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same address, and opened anew whenever one is closed."""
    monkeypatch.setattr(door_module, "STRANGERS_PER_ADDRESS_MAX", 16)
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
        await until(lambda: opened > 20 and door_of(listener).counts["gave_way"] >= 4, 20)
        for _ in range(20):
            dialler.dial(listener)
            with contextlib.suppress(TimeoutError):
                await until(lambda: dialler.links, 1)
                break
        stop.set()
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert dialler.links, "it got through"
        dialler.links[0].send(b"and is served")
        await until(lambda: listener.messages == [b"and is served"])


async def test_too_many_connections_in_all(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "STRANGERS_MAX", 3)
    dialler, listener = ends
    await linked(dialler, listener)
    async with contextlib.AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(connected(listener, tls=False)) for _ in range(10)]
        await until(lambda: door_of(listener).counts["gave_way"] == 7)
        assert door_of(listener).connections == 4
        told = door_of(listener).describe()
        assert (told["refused"], told["causes"]) == (7, {"gave_way": 7})
        async with asyncio.timeout(5):
            for reader, _ in idle[:7]:  # the oldest went
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read(1) == b""
    assert listener.gone == []


async def test_no_more_connections_than_there_are_files_for(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "connections_allowed", lambda: 3)
    dialler, listener = ends
    await linked(dialler, listener)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(connected(listener, tls=False))
        await until(lambda: door_of(listener).counts["gave_way"] == 3)
        assert door_of(listener).connections == 3
    assert listener.gone == []


async def test_where_all_are_members_nobody_gives_way(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "connections_allowed", lambda: 1)
    dialler, listener = ends
    await linked(dialler, listener)
    async with connected(listener, tls=False):
        await until(lambda: door_of(listener).counts["no_room"] == 1)
        assert door_of(listener).connections == 1
    assert listener.gone == []


async def test_of_strangers_those_of_the_busiest_address_give_way_first(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "STRANGERS_MAX", 3)
    origins = iter("abbc")
    monkeypatch.setattr(guest_module, "origin_of", lambda host: next(origins))
    _, listener = ends
    async with contextlib.AsyncExitStack() as stack:
        for number in range(1, 5):
            await stack.enter_async_context(connected(listener, tls=False))
            await until(lambda number=number: door_of(listener).counts["connections"] == number)
        assert [guest.origin for guest in door_of(listener)._guests] == ["a", "b", "c"]


async def test_an_address_may_only_connect_so_fast(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PER_ADDRESS, Resource.CONNECTIONS, Allowance(0.01, 5.0))
    dialler, listener = ends
    await linked(dialler, listener)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            with contextlib.suppress(OSError):
                await stack.enter_async_context(connected(listener, tls=False))
        await until(lambda: door_of(listener).counts["too_fast"] == 6)
        assert door_of(listener).connections <= 5
    dialler.links[0].send(b"links stay")
    await until(lambda: listener.messages == [b"links stay"])


async def test_a_greylisted_address_is_refused_unless_somebody_there_is_linked(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_module, "origin_of", lambda host: "203.0.113.5")
    dialler, listener = ends
    for _ in range(30):
        listener.scores.blame_address("203.0.113.5", "handshakes failed")
    with pytest.raises((OSError, aiohttp.ClientError)):
        await dialler.dial(listener)
    assert door_of(listener).counts["greylisted"] >= 1
    listener.scores._greylist._scores.clear()
    await linked(dialler, listener)
    for _ in range(30):
        listener.scores.blame_address("203.0.113.5", "handshakes failed")
    neighbour = End(3, tls=listener.tls)
    async with listening(neighbour):
        await linked(neighbour, listener)
    assert len(listener.links) == 2


async def test_one_link_may_only_have_so_many_connections(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
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


async def test_what_came_by_a_link_ends_with_the_last_one_of_its_peer(ends: tuple[End, End]) -> None:
    dialler, listener = ends
    out, inward = await linked(dialler, listener)
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
        assert listener.transport.door is not None
        door = listener.transport.door
        assert door.connections == 5
        dialler.dial(listener)
        await until(lambda: len(listener.links) == 2)
        inward.close_soon()
        await until(lambda: listener.gone == [inward])
        await until(lambda: door.connections == 5)
        listener.links[-1].close_soon()
        await until(lambda: door.connections == 0)


# -- what members do


async def test_frames_that_never_become_a_message_are_read_slowly(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty pieces of a message that never ends: the message handler hears of none of them."""
    monkeypatch.setitem(PER_NODE, Resource.CPU, Allowance(0.01, 0.001))
    dialler, listener = ends
    async with stranger_linked(listener.address, SMALL.swarm_id, tls=listener.tls) as peer:
        transport = peer.socket._response.connection.transport  # type: ignore[union-attr]
        mask = bytes(4)
        transport.write(b"\x02\x80" + mask)
        async with asyncio.timeout(20):
            while transport.get_write_buffer_size() < 1 << 20:  # until TCP makes it wait
                transport.write((b"\x00\x80" + mask) * 10_000)
                await asyncio.sleep(0.001)
        assert listener.scores.throttled > 0
        assert listener.messages == []
        out, _ = await linked(dialler, listener)
        out.send(b"others are heard")
        await until(lambda: listener.messages == [b"others are heard"])
        transport.abort()


def test_who_has_lost_its_last_link_takes_nobody_elses_connections_along() -> None:
    door = ConnectionLimiter(asyncio.Protocol, None, PeerScores())
    guests = [
        Mock(node_id=node_id, is_link=is_link)
        for node_id in (b"one", b"two", None)
        for is_link in (False, True)
    ]
    door._guests = dict.fromkeys(guests)
    door.dismiss(b"one")
    assert [guest.abort.called for guest in guests] == [True, False, False, False, False, False]


async def test_a_connection_is_read_on_only_where_server_and_door_both_want_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        line: Any = writer.transport
        gate = Gate(line, Connection(ConnectionLimiter(asyncio.Protocol, None, PeerScores())))
        gate.close_for(0.01)
        gate.resume_reading()
        assert not line.is_reading()
        gate.pause_reading()
        await until(lambda: gate._closed_until is None)
        assert not line.is_reading()
        gate.resume_reading()
        assert line.is_reading()
        gate.close_for(0.0)
        gate.close_for(60.0)  # while it is closed: the first end is none
        for _ in range(3):
            await asyncio.sleep(0)
        assert not line.is_reading()
        gate.forget()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("frame", ["ping", "pong"])
async def test_control_frames_that_no_node_sends_end_the_link(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, frame: str
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_TIMEOUT_S", 0.01)  # the stranger does not answer
    _, listener = ends
    async with stranger_linked(listener.address, SMALL.swarm_id, tls=listener.tls) as peer:
        await (peer.socket.ping() if frame == "ping" else peer.socket.pong())
        await until(lambda: listener.gone)


@pytest.mark.parametrize("what", ["not here", "not asked for"])
async def test_chunks_that_are_not_here_or_not_asked_for_come_and_go_slowly(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(PER_NODE, Resource.MISSES, Allowance(5.0, 3.0))
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(door_module.asyncio, "sleep", note)
    for _ in range(6):
        with pytest.raises(RefusedError):
            await (get_chunk(out, bytes(32), 1) if what == "not here" else put(out, bytes(32), b"x"))
    assert len([seconds for seconds in slept if 0 < seconds <= 0.2]) >= 1
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
        monkeypatch.setattr(uploads, "UPLOADS_MAX", 0)
    dialler, listener = End(1, tls=False), End(2, tls=False)
    blob = listener.hold(chunk)
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        monkeypatch.setattr(chunk_routes.asyncio, "sleep", note)
        for _ in range(8):
            with contextlib.suppress(RefusedError):
                await get_chunk(out, blob, len(chunk))
        await until(lambda: len([seconds for seconds in slept if seconds == 0.0123]) == slowed)
        monkeypatch.undo()


async def test_what_is_no_chunk_is_charged_to_members_as_to_strangers(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, listener = ends
    out, _ = await linked(dialler, listener)
    blob = listener.hold(b"data")
    charged: list[str | None] = []

    def note(origin: str | None) -> float:
        charged.append(origin)
        return 0.0

    monkeypatch.setattr(listener.scores, "asked", note)
    await get_chunk(out, blob, 4)
    assert charged == []
    assert out.dialled is not None
    tls = client_context() if listener.tls else False
    async with aiohttp.ClientSession() as http:
        for number, path in enumerate(("status?digest=1&up_to=9", "manifest", "nothing"), 1):
            for headers in ({SESSION_HEADER: out.session.hex()}, {}):
                async with http.get(f"{out.dialled.base_url}/{path}", headers=headers, ssl=tls) as answer:
                    assert answer.status == (404 if path == "nothing" else 200)
            assert len(charged) == 2 * number


async def test_however_many_ask_at_once_the_event_loop_answers_one_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = End(2, tls=False)
    turn = 0
    turns: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def status(query: Mapping[str, str]) -> dict[str, Any]:
        turns.append(turn)
        return {}

    monkeypatch.setattr(listener.questions, "_status", status)
    async with listening(listener), contextlib.AsyncExitStack() as stack:
        asked = [await stack.enter_async_context(connected(listener, tls=False)) for _ in range(20)]
        await until(lambda: door_of(listener).connections == 20)
        counting = asyncio.create_task(count_turns())
        for _, writer in asked:
            writer.write(f"GET {PREFIX}/status HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await until(lambda: len(turns) == 20)
        counting.cancel()
    assert len(set(turns)) == 20
