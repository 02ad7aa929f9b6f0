"""`gossamer.node.daemon.network.rpc`: what a stranger's node answers is a status, or one clear line."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event
from unittest.mock import Mock

import aiohttp
import pytest

from gossamer.node.address import parse_address, parse_contact
from gossamer.node.daemon.dashboard.client import AdminClient
from gossamer.node.daemon.network import rpc as asking
from gossamer.node.daemon.network.rpc import (
    _reason,
    deliver,
    fetch_manifest,
    fetch_status,
    fingerprint_at,
    parse_status,
)
from gossamer.node.daemon.network.tls import Certificate
from gossamer.protocol.errors import NobodyThereError, UnreachableError
from tests.node.wires import End, listening
from tests.protocol.builders import SMALL


@asynccontextmanager
async def answering(banner: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that says this to whoever says anything, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(banner)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


def test_a_status() -> None:
    assert parse_status("host:1", b'{"swarm_id": "a", "node_id": "b"}') == {"swarm_id": "a", "node_id": "b"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"swarm_id": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        *(
            b'{"swarm_id": "a", "node_id": "b", ' + more + b"}"
            for more in (
                b'"x": NaN',
                b'"x": [-Infinity]',
                b'"x": 1e999',
                b'"merged_digest": 7',
                b'"phi_digest": [1]',
                b'"node_id": "\\u001b[2J"',
                b'"swarm_id": null',
            )
        ),
    ],
)
def test_what_is_no_status(body: bytes) -> None:
    with pytest.raises(UnreachableError, match="host:1 sent a status that cannot be read"):
        parse_status("host:1", body)


@pytest.mark.parametrize(
    ("banner", "plaintext", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, "the server there does not speak TLS: is this the address"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", True, "the server there does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", True, "sent a status that cannot be read"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", True, r"no.* \(HTTP status 404\)"),
        (b"", False, "the connection was closed"),
        (b"", True, "the connection was closed: the node may speak TLS .leave out --insecure-plaintext."),
    ],
)
def test_what_answers_is_no_node(banner: bytes, plaintext: bool, why: str) -> None:
    async def ask() -> None:
        async with answering(banner) as port:
            with pytest.raises(UnreachableError, match=why) as error:
                await fetch_status(f"127.0.0.1:{port}", plaintext=plaintext)
            assert "\n" not in str(error.value)

    asyncio.run(ask())


async def test_nobody_is_sent_on_to_another_address() -> None:
    status = b'{"swarm_id": "a", "node_id": "b"}'
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(status), status)
    found = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n"
    async with answering(ok) as elsewhere, answering(found % elsewhere) as port:
        with pytest.raises(UnreachableError, match=r"is not a Gossamer node \(HTTP status 302\)"):
            await fetch_status(f"127.0.0.1:{port}", plaintext=True)


@pytest.mark.parametrize("named", ["", f"gossamer://{'ab' * 32}@"])
@pytest.mark.parametrize("status", ["200 OK", "302 Found", "511 Network Authentication Required"])
async def test_a_sign_in_page_in_the_place_of_a_node_is_taken_for_one(status: str, named: str) -> None:
    """It ends TLS itself, perhaps, and has nothing that a node would: no proof, no manifest."""
    page = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>".encode()
    async with answering(page, Certificate.fresh().context) as port:
        for ask in (fetch_status(f"{named}127.0.0.1:{port}"), deliver(f"{named}127.0.0.1:{port}", b"")):
            with pytest.raises(UnreachableError, match=r"a web page answers.*sign in"):
                await ask


async def test_cookies_that_cannot_be_read_cost_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Commands have no log, and Python then prints each warning between their lines."""
    head = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nSet-Cookie: a,b=c\r\n\r\n"
    async with answering(head) as port:
        with pytest.raises(UnreachableError, match="HTTP status 404"):
            await fetch_status(f"localhost:{port}", plaintext=True)
        async with AdminClient(f"localhost:{port}") as top:
            with pytest.raises(UnreachableError, match="answers 404"):
                await anext(aiter(top.events()))
    assert caplog.messages == []


async def test_who_closes_after_a_question_has_closed() -> None:
    async with answering(b"", Certificate.fresh().context) as port:
        with pytest.raises(UnreachableError, match=r"\(the connection was closed\)"):
            await fetch_status(f"127.0.0.1:{port}")


@pytest.mark.parametrize("status", [400, 403, 503])
async def test_a_refusal_that_a_terminal_would_obey_is_not_shown(status: int) -> None:
    refusal = b"HTTP/1.1 %d No\r\nContent-Length: 8\r\n\r\n\x1b[2Jgone" % status
    async with answering(refusal) as port:
        with pytest.raises(UnreachableError, match=rf"is not a Gossamer node \(HTTP status {status}\)"):
            await fetch_status(f"127.0.0.1:{port}", plaintext=True)


@pytest.mark.parametrize(
    ("banner", "why"), [(b"SSH-2.0-OpenSSH\r\n", "does not speak TLS"), (b"", "the connection was closed")]
)
async def test_what_answers_is_not_the_node_that_was_named(banner: bytes, why: str) -> None:
    async with answering(banner) as port:
        with pytest.raises(UnreachableError, match=why):
            await fetch_status(f"gossamer://{'ab' * 32}@127.0.0.1:{port}")


async def test_nobody_is_where_a_node_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    node = f"gossamer://{'ab' * 32}"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(UnreachableError, match=r"\(connection refused\)"):
            await fetch_status(f"{node}@127.0.0.1:{port}")

        def two(host: str, *_: object, **__: object) -> list[object]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            other = {"two.example": "127.0.0.2", "no.example": "255.255.255.255"}[host]
            return [(*kind, ("127.0.0.1", port)), (*kind, (other, port))]

        monkeypatch.setattr(socket, "getaddrinfo", two)
        with pytest.raises(UnreachableError, match=r"\(connection refused\)"):
            await fetch_status(f"{node}@two.example:{port}")
        with pytest.raises(UnreachableError, match=r"\(none of its addresses can be reached\)"):
            await fetch_status(f"{node}@no.example:{port}")


async def test_a_manifest_may_take_longer_than_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_TIMEOUT_S", 1.0)
    body = SMALL.canonical()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        await asyncio.sleep(1.2)
        writer.write(body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        manifest = await asyncio.to_thread(fetch_manifest, (parse_contact(address),), None, plaintext=True)
        assert manifest.swarm_id == SMALL.swarm_id


def test_a_name_that_nobody_knows() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert _reason(aiohttp.ClientConnectorDNSError(Mock(), unknown), False) == "name or service not known"


@pytest.mark.parametrize("node", ["", f"gossamer://{'ab' * 32}@"])
def test_nobody_waits_for_name_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """A command ends when it has said so, and not with the lookup, half a minute later."""
    never, ended = Event(), []

    def look_up(*_: object, **__: object) -> None:
        ended.append(never.wait(20))
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(asking, "ASK_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(NobodyThereError, match="no answer in time"):
            fetch_manifest((parse_contact(f"{node}far.example:7700"),), None, plaintext=False)
        assert not ended
    finally:
        never.set()


async def test_a_name_with_an_address_that_leads_nowhere_is_asked_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a machine believes to have IPv6: nothing comes back from there, not even a refusal."""
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def connect_or_not(connection: socket.socket, address: tuple[str, int]) -> None:
        if address[0] == "127.0.0.9":
            await asyncio.Event().wait()
        await connect(connection, address)

    def both(host: str, port: int, **_: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("127.0.0.9", "127.0.0.1")
        ]

    listener = End(2)
    async with listening(listener):
        monkeypatch.setattr(loop, "sock_connect", connect_or_not)
        monkeypatch.setattr(socket, "getaddrinfo", both)
        _, port = parse_address(listener.address)
        found = await asyncio.wait_for(fingerprint_at(f"a.name:{port}"), 5)
    assert found == listener.local.fingerprint
