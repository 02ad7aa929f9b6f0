"""Requests outside a link: who is answered, by whom, and one clear line where there is no answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import pytest

from gossamer.node.address import Contact, parse_contact
from gossamer.node.daemon.network import rpc
from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.rpc import (
    NONCE_HEADER,
    PROOF_HEADER,
    Asker,
    asker_of,
    deliver,
    fetch_manifest,
    fetch_status,
    parse_status,
)
from gossamer.node.daemon.network.sockets import LocalNode, client_context
from gossamer.node.home import Home
from gossamer.protocol.access.acl import Invitation, parse_grant
from gossamer.protocol.access.handshake import ask, check_proof
from gossamer.protocol.errors import (
    ConfigError,
    NobodyThereError,
    NotAnsweredError,
    SignatureError,
    StorageError,
    UnreachableError,
)
from gossamer.protocol.limits import CREDENTIAL_BYTES_MAX, MANIFEST_BYTES_MAX
from gossamer.protocol.records import open_envelope
from tests.node.wires import End, answering, fresh_certificate, listening
from tests.protocol import builders
from tests.protocol.builders import SMALL, grant, identity, manifest

INVITED = builders.manifest(admission=builders.admission())
ALICE, BOB = identity(1), identity(2)

Answer = Callable[[], bytes]


async def manifest_at(*addresses: str, swarm_id: str | None = None) -> Any:
    """It runs a loop of its own."""
    contacts = tuple(map(parse_contact, addresses))
    return await asyncio.to_thread(rpc.fetch_manifest, contacts, swarm_id, plaintext=True)


async def test_a_manifest_is_checked_against_the_swarm_id() -> None:
    async with answering("manifest", SMALL.canonical) as address:
        assert await manifest_at(address) == SMALL
        assert await manifest_at(address, swarm_id=SMALL.swarm_id.hex()) == SMALL
        assert await manifest_at(address, swarm_id=SMALL.swarm_id.hex()[:8].upper()) == SMALL
        assert await manifest_at("127.0.0.1:1", address) == SMALL, "the first that answers"
        with pytest.raises(ConfigError, match=f"{address} belongs to swarm {SMALL.swarm_id.hex()[:12]}"):
            await manifest_at(address, swarm_id=manifest(name="other").swarm_id.hex())


async def test_waiting_helps_only_where_nobody_is_there_at_all() -> None:
    async with answering("other", bytes) as stranger, answering("manifest", bytes, 403) as member:
        for addresses, is_silent in [
            (["127.0.0.1:1"], True),
            (["no.such.host.invalid:7700"], True),
            (["127.0.0.1:1", stranger], False),
            (["127.0.0.1:1", member], False),
        ]:
            with pytest.raises(UnreachableError) as error:
                await manifest_at(*addresses)
            assert isinstance(error.value, NobodyThereError) == is_silent, addresses
            assert addresses[-1] in str(error.value), "what is to be mended is said first"


@pytest.mark.parametrize("data", [b"", b"junk", SMALL.canonical()[:-1]])
async def test_a_manifest_that_cannot_be_used(data: bytes) -> None:
    async with answering("manifest", lambda: data) as address:
        with pytest.raises(ConfigError, match="sent a manifest that cannot be used"):
            await manifest_at(address)


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async with answering("manifest", lambda: bytes(MANIFEST_BYTES_MAX + 1)) as address:
        with pytest.raises(UnreachableError, match="more than a node would"):
            await manifest_at(address)


@pytest.mark.parametrize("status", [503, 429])
async def test_a_node_that_will_answer_later_is_told_from_what_is_no_node(status: int) -> None:
    async with answering("status", lambda: b"this node is starting", status) as address:
        with pytest.raises(UnreachableError, match="cannot answer: this node is starting"):
            await fetch_status(address, plaintext=True)


@asynccontextmanager
async def saying(banner: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that says this to whoever says anything, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(banner)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


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
                b'"merged_digest": 7',
                b'"phi_digest": [1]',
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
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, "the server there does not speak TLS: is this a node"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", True, "the server there does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", True, "sent a status that cannot be read"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", True, r"no.* \(HTTP status 404\)"),
        (b"", False, "the connection was closed"),
        (b"", True, "the connection was closed: the node may speak TLS .leave out --insecure-plaintext."),
    ],
)
def test_what_answers_is_no_node(banner: bytes, plaintext: bool, why: str) -> None:
    async def ask() -> None:
        async with saying(banner) as port:
            with pytest.raises(UnreachableError, match=why) as error:
                await fetch_status(f"127.0.0.1:{port}", plaintext=plaintext)
            assert "\n" not in str(error.value)

    asyncio.run(ask())


async def test_nobody_is_sent_on_to_another_address() -> None:
    status = b'{"swarm_id": "a", "node_id": "b"}'
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(status), status)
    found = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n"
    async with saying(ok) as elsewhere, saying(found % elsewhere) as port:
        with pytest.raises(UnreachableError, match=r"is not a Gossamer node \(HTTP status 302\)"):
            await fetch_status(f"127.0.0.1:{port}", plaintext=True)


@pytest.mark.parametrize("node", ["", f"gossamer://{'ab' * 32}@"])
def test_nobody_waits_for_name_servers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """A command ends when it has said so, and not with the lookup, half a minute later."""
    never, ended = Event(), []

    def look_up(*_: object, **__: object) -> None:
        ended.append(never.wait(20))
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(rpc, "ASK_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(NobodyThereError, match="no answer in time"):
            fetch_manifest((parse_contact(f"{node}far.example:7700"),), None, plaintext=False)
        assert not ended
    finally:
        never.set()


@pytest.fixture
async def node() -> AsyncIterator[End]:
    """A node of an invited swarm, which answers nobody it has not vetted."""
    end = End(2)
    end.answers_anyone = False
    async with listening(end):
        yield end


def asker(credential: bytes = b"") -> Asker:
    return Asker(ALICE, SMALL.swarm_id, credential)


def invitation(node_id_of_number: int = 1) -> Invitation:
    data = grant(identity(node_id_of_number), INVITED)
    return Invitation(INVITED.swarm_id, parse_grant(open_envelope(data, INVITED.swarm_id)), ("a:1",))


async def test_strangers_get_no_manifest_no_status_and_no_chunk(node: End) -> None:
    blob = node.hold(b"model")
    async with aiohttp.ClientSession() as session:
        for path in ("manifest", "status", "status?digest=1", f"chunk/{blob.hex()}"):
            async with session.get(f"https://{node.address}{PREFIX}/{path}", ssl=client_context()) as answer:
                assert answer.status == 403
                assert await answer.text() in (
                    "this swarm answers its members only: ask with --dir, as one of them",
                    "no such session",
                )
    with pytest.raises(NotAnsweredError, match="refuses: this swarm answers its members only"):
        await fetch_status(node.address)


async def test_members_are_answered_and_vetted_first(node: End) -> None:
    found = await fetch_status(node.address, digest=True, asker=asker(b"my grant"))
    assert found["node_id"] == BOB.node_id.hex() and found["digest"] == "1"
    assert node.shown == [(ALICE.node_id, b"my grant")]
    contact = parse_contact(node.address)
    manifest = await asyncio.to_thread(fetch_manifest, (contact,), None, plaintext=False, asker=asker())
    assert manifest == SMALL
    node.refused[ALICE.node_id] = "your invitation ran out"
    with pytest.raises(NotAnsweredError, match="refuses: your invitation ran out"):
        await fetch_status(node.address, asker=asker())


async def test_a_question_for_another_swarm_channel_or_path_is_none(node: End) -> None:
    path = f"{PREFIX}/status"
    good = {"binding": node.local.fingerprint, "swarm_id": SMALL.swarm_id, "path": path}

    async def status_of(header: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"https://{node.address}{path}", ssl=client_context(), headers={"Gossamer-Ask": header}
            ) as answer,
        ):
            return answer.status

    def signed(unix_s: float = 0.0, **changes: object) -> str:
        said = {**good, **changes}
        return ask(ALICE, unix_s=unix_s or time.time(), credential=b"", **said).hex()  # type: ignore[arg-type]

    assert await status_of(signed()) == 200
    for wrong in (
        signed(binding=bytes(32)),
        signed(swarm_id=bytes(32)),
        signed(path=f"{PREFIX}/manifest"),
        signed(unix_s=time.time() - 1000),
        signed()[:-2],
        "junk",
        "",
    ):
        assert await status_of(wrong) == 403


@pytest.mark.parametrize("tls", [True, False])
async def test_a_pinned_contact_is_that_node_or_nobody(tls: bool) -> None:
    end = End(2, tls=tls)
    async with listening(end):
        right = str(Contact(end.address, BOB.node_id))
        wrong = str(Contact(end.address, ALICE.node_id))
        assert (await fetch_status(right, plaintext=not tls))["node_id"] == BOB.node_id.hex()
        with pytest.raises(UnreachableError, match="is node .* not .* as you were told"):
            await fetch_status(wrong, plaintext=not tls)
        with pytest.raises(SignatureError, match="not the one we dialled"):
            await End.dial(end, end, ALICE.node_id)


async def test_a_proof_of_another_channel_is_none(monkeypatch: pytest.MonkeyPatch, node: End) -> None:
    """As one in the middle would show, who relays to the right node over a channel of its own."""
    node.answers_anyone = True
    monkeypatch.setattr(node.rpc, "_local", LocalNode(node.identity, SMALL.swarm_id, fresh_certificate()))
    with pytest.raises(UnreachableError, match="does not prove which node it is"):
        await fetch_status(str(Contact(node.address, BOB.node_id)))


async def test_who_sends_a_nonce_is_shown_whose_channel_it_is(node: End) -> None:
    async with aiohttp.ClientSession() as session:
        for nonce, proven in (("ab" * 32, True), ("ab" * 31, False), ("zz", False), ("", False)):
            async with session.get(
                f"https://{node.address}{PREFIX}/status", ssl=client_context(), headers={NONCE_HEADER: nonce}
            ) as answer:
                proof = answer.headers.get(PROOF_HEADER)
                assert (proof is not None) == proven
                if proof is not None:
                    found = check_proof(bytes.fromhex(proof), node.local.fingerprint, bytes.fromhex(nonce))
                    assert found == BOB.node_id


async def test_anybody_may_hand_over_what_an_owner_signed(node: End) -> None:
    await deliver(node.address, b"good credential")
    assert node.delivered == [b"good credential"]
    with pytest.raises(NotAnsweredError, match="refuses: no owner signed this"):
        await deliver(node.address, b"bad credential")
    with pytest.raises(UnreachableError):
        await deliver(node.address, b"good" + bytes(CREDENTIAL_BYTES_MAX))
    assert node.delivered == [b"good credential"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    home.key_path.write_bytes(sha256(b"identity 1").digest())  # as `builders.identity` makes them
    home.key_path.chmod(0o600)
    return home


def test_a_folder_asks_as_its_node(home: Home) -> None:
    with pytest.raises(ConfigError, match=r"no node in .*--dir"):
        asker_of(home)
    home.keep_invitation(invitation())
    found = asker_of(home)
    assert (found.identity.node_id, found.swarm_id) == (ALICE.node_id, INVITED.swarm_id)
    assert found.credential == invitation().grant.data
    home.invitation_path.write_text("damaged")
    with pytest.raises(StorageError, match="invitation is damaged"):
        asker_of(home)
    home.adopt(SMALL)
    home.invitation_path.unlink()
    assert (asker_of(home).swarm_id, asker_of(home).credential) == (SMALL.swarm_id, b"")
