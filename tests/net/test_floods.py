"""Members and strangers that take all they can get from a real daemon: it serves the others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.tls import client_context
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.identity import Identity
from tests.net.live import Live
from tests.net.processes import gossamer
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
    assert [swarm.second.stop(), swarm.first.stop()] == [0, 0]
    assert still == pid, "the daemon was never restarted"
    assert "Traceback" not in swarm.first.log


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
    before = daemon.memory_info().rss
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
    assert status["misbehaviours_seen"] == 0
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
