"""What strangers, liars and floods send to a node's port costs a log line, never the node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.sockets import client_context
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.identity import Identity, short
from tests.net.live import Live
from tests.net.processes import gossamer, wait_for
from tests.net.stranger import Stranger, linked
from tests.protocol.builders import row

pytestmark = pytest.mark.slow

RSS_MAX = 96 * 1024 * 1024
"""By how much the daemon may grow: full queues, once, and what the allocator keeps."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Shared by all tests here; whatever they did to it, it must end well."""
    swarm = Live(tmp_path_factory.mktemp("live"))
    pid = swarm.daemon().pid
    yield swarm
    still = swarm.daemon().pid
    begun = time.monotonic()
    statuses = [swarm.second.stop(), swarm.first.stop()]
    assert time.monotonic() - begun < 10
    assert statuses == [0, 0]
    assert still == pid, "the daemon was never restarted"
    assert "Traceback" not in swarm.first.log + swarm.second.log


# -- the command line against running nodes


def test_status_verify_and_id(live: Live) -> None:
    shown = gossamer("status", live.address)
    assert shown.returncode == 0 and live.manifest.swarm_id.hex()[:12] in shown.stdout
    full = json.loads(gossamer("status", live.address, "--json").stdout)
    assert full["swarm_id"] == live.manifest.swarm_id.hex()
    assert full["node_id"] in gossamer("id", "--dir", live.first.folder).stdout
    verified = gossamer("verify", live.address, live.other_address)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "identical: 2 replicas" in verified.stdout
    alone = gossamer("verify", live.address, live.address.replace("127.0.0.1", "localhost"))
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1
    text = gossamer("generate", "--dir", live.first.folder, "--prompt", "ab", "--length", 5)
    assert text.returncode == 0 and text.stdout.startswith("ab")


def test_a_second_node_in_the_same_folder_is_refused(live: Live) -> None:
    done = gossamer("bootstrap", live.manifest_path, "--dir", live.first.folder, "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert f"another node is running in {live.first.folder}" in done.stderr.splitlines()[-1]


# -- bytes from nobody


async def test_raw_bytes_and_half_open_connections(live: Live) -> None:
    host, port = live.address.split(":")
    lines = live.first.log.count("\n")
    open_files = live.daemon().num_fds()
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    for garbage in (
        b"\x00",
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(999),
    ):
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(garbage)
    tls = client_context()
    for garbage in (
        os.urandom(4096),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /gossamer/1/link HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /gossamer/1/chunk/zz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nExpect: \xff\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as plain, tls.wrap_socket(plain) as secure:
            try:
                secure.sendall(garbage)
                secure.settimeout(5)
                secure.recv(100)
            except (ssl.SSLError, OSError):
                pass
    assert (await live.status())["state"] == "serving"
    for connection in idle:
        connection.close()
    wait_for(lambda: live.daemon().num_fds() <= open_files + 3, 10, "descriptors given back")
    assert live.first.log.count("\n") - lines <= 15
    assert "Traceback" not in live.first.log


# -- members that misbehave


async def test_garbage_from_a_member_is_one_line_and_the_end_of_its_link(live: Live) -> None:
    before = (await live.status())["misbehaviours_seen"]
    async with linked(live.address, live.manifest.swarm_id) as peer:
        await peer.socket.send_bytes(os.urandom(1000))
        while (message := await peer.socket.receive(timeout=5)).type is aiohttp.WSMsgType.BINARY:
            pass
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    status = await until_status(live, "misbehaviours_seen", before + 1, 5)
    assert status["misbehaviours_seen"] == before + 1
    name = f"{short(peer.identity.node_id)} misbehaved"
    assert live.first.log.count(name) == 1


async def test_a_member_that_reads_nothing_is_cut_off_and_costs_bounded_memory(live: Live) -> None:
    daemon = live.daemon()
    async with linked(live.address, live.manifest.swarm_id) as peer:
        before = daemon.memory_info().rss
        peer.socket._response.connection.protocol.pause_reading()  # type: ignore[union-attr]
        rows = tuple((os.urandom(32), 0, 0) for _ in range(500))
        question = msg.encode(msg.RosterSummary(rows, False))
        try:
            async with asyncio.timeout(5):
                for _ in range(3000):
                    await peer.socket.send_bytes(question)
        except (TimeoutError, ConnectionError, aiohttp.ClientError):
            pass
        finally:
            peer.socket._response.connection.protocol.resume_reading()  # type: ignore[union-attr]
        assert daemon.memory_info().rss - before < 64 * 1024 * 1024
    assert (await live.status())["state"] == "serving"


# -- members and strangers that take all they can get: the others are served meanwhile


@contextlib.asynccontextmanager
async def flooder(live: Live) -> AsyncIterator[asyncio.subprocess.Process]:
    """A member at full speed, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.net.flooder", live.address, live.manifest.swarm_id.hex(), "120"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def until_status(live: Live, key: str, least: int, timeout: float) -> dict[str, Any]:
    async with asyncio.timeout(timeout):
        while (status := await live.status())[key] < least:
            await asyncio.sleep(0.2)
    return status


async def next_of(peer: Stranger, kind: type) -> Any:
    """The next message of a kind; others are read and left."""
    async with asyncio.timeout(20):
        while not isinstance(message := msg.decode(await peer.socket.receive_bytes()), kind):
            pass
    return message


async def test_a_member_at_full_speed_is_slowed_down_and_others_are_served(live: Live) -> None:
    daemon = live.daemon()
    before, blamed_before = daemon.memory_info().rss, (await live.status())["misbehaviours_seen"]
    async with flooder(live) as process:
        await until_status(live, "throttled", 20, 60)
        async with linked(live.address, live.manifest.swarm_id) as peer:
            for number in range(50):
                await peer.socket.send_bytes(msg.encode(msg.Ping(number)))
                assert (await next_of(peer, msg.Ack)).number == number
            author = Identity.from_seed(os.urandom(32))
            data = row(author, of=live.manifest).data
            await peer.socket.send_bytes(msg.encode(msg.Records(((data, False),))))
            async with asyncio.timeout(20):
                while author.node_id.hex() not in str(await live.status()):
                    await asyncio.sleep(0.1)
        status = await live.status()
        assert process.returncode is None, "it is slowed down, not thrown out"
    slowed = [link["throttled_s"] for link in status["links"]]
    assert len([seconds for seconds in slowed if seconds > 0]) == 1, "it alone"
    assert status["misbehaviours_seen"] == blamed_before
    assert daemon.memory_info().rss - before < RSS_MAX
    verified = gossamer("verify", live.address, live.other_address)
    assert verified.returncode == 0, verified.stdout


async def test_half_open_handshakes_do_not_keep_a_joiner_out(live: Live) -> None:
    """All from the joiner's own address, and far more than there is room for."""
    url = f"https://{live.address}{PREFIX}/link"
    connector = aiohttp.TCPConnector(limit=0, ssl=client_context(), force_close=True)
    held = 0

    async def hold(http: aiohttp.ClientSession) -> None:
        nonlocal held
        with contextlib.suppress(aiohttp.ClientError, OSError, TypeError):
            async with http.ws_connect(url, compress=0) as socket:
                await socket.receive_bytes()
                held += 1
                await socket.receive()

    async with aiohttp.ClientSession(connector=connector) as http:
        flood = [asyncio.create_task(hold(http)) for _ in range(2 * limits.STRANGERS_PER_ADDRESS_MAX)]
        async with asyncio.timeout(60):
            while held < limits.STRANGERS_PER_ADDRESS_MAX // 2:
                await asyncio.sleep(0.05)
        async with linked(live.address, live.manifest.swarm_id) as peer:
            await peer.socket.send_bytes(msg.encode(msg.Ping(7)))
            assert (await next_of(peer, msg.Ack)).number == 7
        status = await live.status()
        assert status["listener"]["strangers"] <= limits.STRANGERS_PER_ADDRESS_MAX
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    await asyncio.sleep(0.1)
