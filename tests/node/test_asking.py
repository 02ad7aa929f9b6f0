"""`gossamer.node.daemon.network.rpc` and `gossamer.node.verify`: asking nodes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from gossamer.node import verify
from gossamer.node.address import parse_contact
from gossamer.node.daemon.network import rpc as asking
from gossamer.node.daemon.network import rpc as client
from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.rpc import fetch_status
from gossamer.node.daemon.network.tls import Certificate
from gossamer.protocol.errors import ConfigError, NobodyThereError, UnreachableError
from gossamer.protocol.limits import MANIFEST_BYTES_MAX
from tests.node.wires import connections_to, hung_up
from tests.protocol.builders import SMALL, manifest

Answer = Callable[[], bytes]


@contextlib.asynccontextmanager
async def answering(path: str, answer: Answer, status: int = 200) -> AsyncIterator[str]:
    """A plain HTTP server with one page; its address."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=answer(), status=status)

    app = web.Application()
    app.router.add_get(f"{PREFIX}/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def fetch_manifest(*addresses: str, swarm_id: str | None = None) -> Any:
    """It runs a loop of its own."""
    contacts = tuple(map(parse_contact, addresses))
    return await asyncio.to_thread(client.fetch_manifest, contacts, swarm_id, plaintext=True)


# -- the client


async def test_a_manifest_is_checked_against_the_swarm_id() -> None:
    async with answering("manifest", SMALL.canonical) as address:
        assert await fetch_manifest(address) == SMALL
        assert await fetch_manifest(address, swarm_id=SMALL.swarm_id.hex()) == SMALL
        assert await fetch_manifest(address, swarm_id=SMALL.swarm_id.hex()[:8].upper()) == SMALL
        assert await fetch_manifest("127.0.0.1:1", address) == SMALL, "the first that answers"
        with pytest.raises(ConfigError, match=f"{address} belongs to swarm {SMALL.swarm_id.hex()[:12]}"):
            await fetch_manifest(address, swarm_id=manifest(name="other").swarm_id.hex())


async def test_an_address_where_another_swarm_is_by_now_does_not_keep_a_node_from_the_others() -> None:
    other = manifest(name="other")
    async with (
        answering("manifest", other.canonical) as wrong,
        answering("manifest", SMALL.canonical) as right,
    ):
        for addresses in [(wrong, right), (right, wrong)]:
            assert await fetch_manifest(*addresses, swarm_id=SMALL.swarm_id.hex()) == SMALL
        with pytest.raises(ConfigError, match=f"{wrong} belongs to swarm"):
            await fetch_manifest("127.0.0.1:1", wrong, swarm_id=SMALL.swarm_id.hex())


async def test_waiting_helps_only_where_nobody_is_there_at_all() -> None:
    async with answering("other", bytes) as stranger, answering("manifest", bytes, 403) as member:
        for addresses, is_silent in [
            (["127.0.0.1:1"], True),
            (["no.such.host.invalid:7700"], True),
            (["127.0.0.1:1", stranger], False),
            (["127.0.0.1:1", member], False),
        ]:
            with pytest.raises(UnreachableError) as error:
                await fetch_manifest(*addresses)
            assert isinstance(error.value, NobodyThereError) == is_silent, addresses
            assert addresses[-1] in str(error.value), "what is to be mended is said first"


@pytest.mark.parametrize("data", [b"", b"junk", SMALL.canonical()[:-1]])
async def test_a_manifest_that_cannot_be_used(data: bytes) -> None:
    async with answering("manifest", lambda: data) as address:
        with pytest.raises(ConfigError, match="sent a manifest that cannot be used"):
            await fetch_manifest(address)


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async with answering("manifest", lambda: bytes(MANIFEST_BYTES_MAX + 1)) as address:
        with pytest.raises(UnreachableError, match="more than a node would"):
            await fetch_manifest(address)


async def test_who_sends_more_than_its_answer_is_no_node() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await asyncio.sleep(0.02)
            writer.writelines([b"{}", b"more"])
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=Certificate.fresh().context)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(UnreachableError, match="a status that cannot be read"):
        await fetch_status(f"{host}:{port}")
    server.close()
    await hung_up(port)


async def test_no_connection_outlasts_its_answer() -> None:
    """Though the server does not end TLS: the loop of `fetch_manifest` is over, and nothing else would."""
    is_over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(SMALL.canonical()))
        writer.write(SMALL.canonical())
        writer.transport.pause_reading()
        await is_over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=Certificate.fresh().context)
    host, port = server.sockets[0].getsockname()
    contacts = (parse_contact(f"{host}:{port}"),)
    assert await asyncio.to_thread(client.fetch_manifest, contacts, None, plaintext=False) == SMALL
    assert not connections_to(port)
    is_over.set()
    server.close()
    await hung_up(port)


async def test_who_is_no_node_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 \(connection refused\)"):
        await fetch_status("127.0.0.1:1", plaintext=True)
    async with answering("other", bytes) as address:
        with pytest.raises(UnreachableError, match=r"not a Gossamer node \(HTTP status 404\)"):
            await fetch_status(address, plaintext=True)
        with pytest.raises(UnreachableError, match="no Gossamer node answers") as error:
            await fetch_status(address)  # TLS to a server without
        assert "\n" not in str(error.value)
    for body in (b"", b"{", b"[1]", b'"x"', b"{}", b"\xff"):
        async with answering("status", lambda body=body: body) as address:
            with pytest.raises(UnreachableError, match="cannot be read"):
                await fetch_status(address, plaintext=True)
    monkeypatch.setattr(asking, "ASK_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnreachableError, match="no answer"):
        await fetch_status(f"127.0.0.1:{silent.getsockname()[1]}", plaintext=True)


async def test_a_node_that_cannot_answer_yet_is_told_from_what_is_no_node() -> None:
    async with answering("status", lambda: b"this node is starting", 503) as address:
        with pytest.raises(UnreachableError, match="cannot answer: this node is starting"):
            await fetch_status(address, plaintext=True)


# -- verify


class Replica:
    """What a node answers, one status after another; the last one for ever."""

    def __init__(self, name: str, *states: tuple[str, str] | None, swarm: str = "s") -> None:
        self.name = name
        self.swarm = swarm
        self.states = list(states)

    def __call__(self) -> bytes:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        status = {"swarm_id": self.swarm, "node_id": self.name, "records": 3, "clock": 2}
        if state is not None:
            status["merged_digest"], status["phi_digest"] = state
        return json.dumps(status).encode()


async def verdict(*replicas: Answer, wait_s: float = 5.0) -> verify.Verdict:
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(answering("status", replica)) for replica in replicas]
        return await verify.verify(tuple(addresses), wait_s=wait_s, plaintext=True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ASK_INTERVAL_S", 0.01)


async def test_identical_replicas() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "p")), Replica("c", ("r", "p")))
    assert found.agreed and found.differing is None
    assert found.explain() == "identical: 3 replicas, 3 records, round 2, model p"


async def test_it_waits_until_they_hold_the_same_records() -> None:
    first = Replica("a", None, ("r1", "p1"), ("r2", "p2"), ("r3", "p3"))
    second = Replica("b", ("r0", "p0"), ("r2", "p2"), ("r3", "p3"))
    assert (await verdict(first, second)).agreed


async def test_the_same_records_and_another_model_is_the_proof() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "q")))
    assert not found.agreed and found.differing is not None
    assert "DIFFERENT models" in found.explain()


async def test_the_proof_counts_even_if_they_held_the_records_at_different_times() -> None:
    first = Replica("a", ("r1", "p1"), ("r2", "p2"))
    second = Replica("b", ("r0", "p0"), ("r1", "WRONG"), ("r5", "p5"))
    assert (await verdict(first, second)).differing is not None


async def test_who_has_answered_before_is_waited_for() -> None:
    """A busy node does not answer every question within its time."""
    first = Replica("a", ("r1", "p1"), ("r2", "p2"), ("r3", "p3"))
    second = Replica("b", ("r0", "p0"), ("r2", "p2"), ("r3", "p3"))
    silent = iter([False, True, True])

    def now_and_then() -> bytes:
        return b"" if next(silent, False) else second()

    assert (await verdict(first, now_and_then)).agreed
    once = iter([b'{"swarm_id": "s", "node_id": "b"}'])
    with pytest.raises(UnreachableError, match="cannot be read"):
        await verdict(first, lambda: next(once, b""), wait_s=0.1)
    with pytest.raises(UnreachableError, match="cannot be read"):
        await verdict(first, lambda: b"", wait_s=3600.0)


async def test_who_is_silent_hides_no_proof() -> None:
    answers = iter([b'{"swarm_id": "s", "node_id": "c"}'])
    found = await verdict(
        Replica("a", ("r1", "p1"), ("r2", "p2")),
        Replica("b", ("r0", "p0"), ("r2", "q2")),
        lambda: next(answers, b""),
    )
    assert found.differing is not None


async def test_half_an_answer_is_not_comparable() -> None:
    half = '{"swarm_id": "s", "node_id": "%s", "merged_digest": "r"}'
    found = await verdict((half % "a").encode, (half % "b").encode, wait_s=0.1)
    assert not found.agreed and found.differing is None


async def test_never_the_same_records_is_not_comparable() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("s", "q")), wait_s=0.1)
    assert not found.agreed and found.differing is None
    assert found.explain().startswith("not comparable")
    empty = await verdict(Replica("a", None), Replica("b", None), wait_s=0.1)
    assert not empty.agreed


async def test_different_swarms_and_one_node_twice_are_mistakes() -> None:
    with pytest.raises(ConfigError, match="different swarms"):
        await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "p"), swarm="t"))
    with pytest.raises(ConfigError, match="agrees with itself"):
        await verdict(Replica("a", ("r", "p")), Replica("a", ("r", "p")))
    async with answering("status", Replica("a", ("r", "p"))) as address:
        with pytest.raises(ConfigError, match="agrees with itself"):
            async with asyncio.timeout(20):
                await verify.verify((address, address), wait_s=0.1, plaintext=True)
