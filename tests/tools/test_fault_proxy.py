"""The proxy itself: each fault does what it says to a plain TCP connection, and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gossamer.node.address import parse_address
from tests.tools.fault_proxy import Bandwidth, FaultProxy, Rule, own_loopback

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MEGABYTE = bytes(range(256)) * 4096


class Pair:
    """Node a dials node b, whose connections the test holds."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.rules = proxy.rules
        self.arrived: asyncio.Queue[Streams] = asyncio.Queue()
        self.target: tuple[str, int] | None = None
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def dial(self) -> Streams:
        """What node a has of a new connection."""
        host, port = parse_address(self.address)
        reader, writer = await asyncio.open_connection(host, port, local_addr=(own_loopback(0), 0))
        self._writers.append(writer)
        return reader, writer

    async def connect(self) -> tuple[Streams, Streams]:
        """Both ends of a new connection."""
        ours = await self.dial()
        return ours, await self.arrived.get()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self.arrived.put((reader, writer))

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.fixture
async def pair(seed: int) -> AsyncIterator[Pair]:
    proxy = FaultProxy(seed)
    pair = Pair(proxy)
    server = await asyncio.start_server(pair.accept, own_loopback(1), 0)
    pair.target = server.sockets[0].getsockname()
    await proxy.add("a", own_loopback(0), lambda: None)
    pair.address = await proxy.add("b", own_loopback(1), lambda: pair.target)
    async with asyncio.timeout(60):
        yield pair
    await proxy.close()
    await pair.close()
    server.close()
    await server.wait_closed()


async def nothing_comes(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(0.15):
            await reader.readexactly(1)
    except TimeoutError:
        return True
    return False


async def test_without_a_rule_bytes_pass_both_ways_and_ends_are_passed_on(pair: Pair) -> None:
    (reader, writer), (far_reader, far_writer) = await pair.connect()
    sending = asyncio.create_task(send(far_writer, MEGABYTE))
    writer.write(b"hello")
    assert await far_reader.readexactly(5) == b"hello"
    assert await reader.readexactly(len(MEGABYTE)) == MEGABYTE
    await sending
    assert pair.proxy.connections("a", "b") == 1
    writer.close()
    assert await far_reader.read() == b""


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def test_a_black_hole_holds_bytes_and_loses_none(pair: Pair) -> None:
    (reader, writer), (far_reader, far_writer) = await pair.connect()
    pair.rules.set("a", "b", Rule(black_hole=True))
    writer.write(b"held")
    assert await nothing_comes(far_reader)
    far_writer.write(b"the other way is open")
    assert await reader.readexactly(21) == b"the other way is open"
    pair.rules.heal()
    assert await far_reader.readexactly(4) == b"held"


async def test_a_connection_dialled_into_a_black_hole_opens_after_it(pair: Pair) -> None:
    pair.rules.split(["a"], ["b"])
    _, writer = await pair.dial()
    writer.write(b"hello")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await pair.arrived.get()
    pair.rules.heal()
    far_reader, _ = await pair.arrived.get()
    assert await far_reader.readexactly(5) == b"hello"


async def test_refused_connections_are_reset_and_open_ones_stay(pair: Pair) -> None:
    (_, writer), (far_reader, _) = await pair.connect()
    pair.rules.set("a", "b", Rule(refuse=True))
    reader, _ = await pair.dial()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.write(b"x")
    assert await far_reader.readexactly(1) == b"x"


async def test_latency_delays_and_does_not_narrow(pair: Pair) -> None:
    (_, writer), (far_reader, _) = await pair.connect()
    pair.rules.set("a", "b", Rule(latency_s=0.2))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    sending = asyncio.create_task(send(writer, MEGABYTE))
    assert await far_reader.readexactly(1) == MEGABYTE[:1]
    assert loop.time() - begun >= 0.2
    assert await far_reader.readexactly(len(MEGABYTE) - 1) == MEGABYTE[1:]
    assert loop.time() - begun < 64 * 0.2 / 2, "64 pieces, not 64 delays"
    await sending


async def test_bandwidth_is_shared_by_who_shares_it(pair: Pair) -> None:
    line = Bandwidth(8e6)
    pair.rules.set("a", "b", Rule(bandwidth=line))
    pair.rules.set("b", "a", Rule(bandwidth=line))
    (reader, writer), (far_reader, far_writer) = await pair.connect()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    half = MEGABYTE[: len(MEGABYTE) // 4]
    tasks = [asyncio.create_task(send(end, half)) for end in (writer, far_writer)]
    await asyncio.gather(far_reader.readexactly(len(half)), reader.readexactly(len(half)), *tasks)
    assert loop.time() - begun >= 2 * len(half) / 1e6 - 0.05


async def test_corruption_flips_single_bits(pair: Pair) -> None:
    (_, writer), (far_reader, _) = await pair.connect()
    pair.rules.set("a", "b", Rule(corrupt_every_bytes=50_000))
    sending = asyncio.create_task(send(writer, MEGABYTE))
    got = await far_reader.readexactly(len(MEGABYTE))
    await sending
    flips = [bin(x ^ y).count("1") for x, y in zip(got, MEGABYTE, strict=True) if x != y]
    assert 5 <= len(flips) <= 60
    assert set(flips) == {1}


async def test_whoever_is_not_a_node_meets_no_faults(pair: Pair) -> None:
    pair.rules.split(["a"], ["b"])
    host, port = parse_address(pair.address)
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"person")
    far_reader, _ = await pair.arrived.get()
    assert await far_reader.readexactly(6) == b"person"
    writer.close()
    await writer.wait_closed()


async def test_shapes(pair: Pair) -> None:
    def holes() -> set[tuple[str, str]]:
        return {(x, y) for x in "abcd" for y in "abcd" if x != y and pair.rules.of(x, y).black_hole}

    pair.rules.set("a", "c", Rule(latency_s=1))
    pair.rules.split("ab", "cd")
    assert holes() == {(x, y) for x in "ab" for y in "cd"} | {(y, x) for x in "ab" for y in "cd"}
    assert pair.rules.of("a", "c").latency_s == 1, "other rules stay"
    pair.rules.heal()
    assert holes() == set()
    assert pair.rules.of("a", "c").latency_s == 1
    pair.rules.connect_only("abcd", [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")])
    assert holes() == {("a", "c"), ("c", "a"), ("b", "d"), ("d", "b")}
