"""Doors: links, questions, pins, certificates and what a folder keeps of an invitation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest

from gossamer.node.address import Contact, parse_contact
from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.rpc import (
    NONCE_HEADER,
    PROOF_HEADER,
    Asker,
    asker_for,
    asker_of,
    deliver,
    fetch_manifest,
    fetch_status,
)
from gossamer.node.daemon.network.tls import Certificate, LocalNode, client_context, cut
from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home, new_home, nodes_root
from gossamer.protocol.access.acl import Invitation, parse_grant
from gossamer.protocol.access.rpc_auth import ask, check_proof
from gossamer.protocol.errors import (
    ConfigError,
    NotAnsweredError,
    RefusedError,
    SignatureError,
    StorageError,
    UnreachableError,
)
from gossamer.protocol.limits import CREDENTIAL_BYTES_MAX
from gossamer.protocol.records import open_envelope
from tests.node.trainer_side import until
from tests.node.wires import End, get_chunk, linked, listening, put
from tests.protocol import builders
from tests.protocol.builders import SMALL, grant, identity

INVITED = builders.manifest(admission=builders.admission())
ALICE, BOB = identity(1), identity(2)


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


# -- links


async def test_both_ends_show_their_credentials_before_a_link_is_up() -> None:
    dialler, listener = End(1), End(2)
    dialler.credential, listener.credential = b"dialler's", b"listener's"
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        assert (out.credential, inward.credential) == (b"listener's", b"dialler's")
        assert listener.shown == [(dialler.identity.node_id, b"dialler's")]
        assert dialler.shown == [(listener.identity.node_id, b"listener's")]


@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_whoever_is_turned_away_hears_why_and_there_is_no_link(who: str) -> None:
    dialler, listener = End(1), End(2)
    judge, judged = (listener, dialler) if who == "dialler" else (dialler, listener)
    judge.refused[judged.identity.node_id] = "not invited, ask an owner"
    async with listening(dialler, listener):
        with pytest.raises(RefusedError, match="not invited, ask an owner"):
            await dialler.dial(listener)
        await until(lambda: not listener.server._sessions)
        assert dialler.links == []
        assert dialler.messages == listener.messages == []


async def test_a_link_that_was_hung_up_serves_no_chunk_however_slowly_it_closes() -> None:
    dialler, listener = End(1), End(2)
    blob = listener.hold(b"model")
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        assert await get_chunk(out, blob, 5) == b"model"
        inward._ending.set()  # as close_soon does, with a queue that the peer takes slowly
        with pytest.raises(RefusedError):
            await get_chunk(out, blob, 5)
        listener.wanted[blob] = 5
        with pytest.raises(RefusedError):
            await put(out, blob, b"model")
        assert not listener.arrived
        assert len(listener.server._sessions) == 1


# -- questions


async def test_strangers_get_no_manifest_no_status_and_no_chunk(node: End) -> None:
    blob = node.hold(b"model")
    async with aiohttp.ClientSession() as session:
        for path in ("manifest", "status", "status?digest=1", f"chunk/{blob.hex()}"):
            async with session.get(f"https://{node.address}{PREFIX}/{path}", ssl=client_context()) as answer:
                assert answer.status == 403
                assert await answer.text() in ("this swarm answers its members only", "no such session")
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
    monkeypatch.setattr(node.rpc, "_local", LocalNode(node.identity, SMALL.swarm_id, Certificate.fresh()))
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


# -- grants and revocations handed over


async def test_anybody_may_hand_over_what_an_owner_signed(node: End) -> None:
    await deliver(node.address, b"good credential")
    assert node.delivered == [b"good credential"]
    with pytest.raises(NotAnsweredError, match="refuses: no owner signed this"):
        await deliver(node.address, b"bad credential")
    with pytest.raises(UnreachableError):
        await deliver(node.address, b"good" + bytes(CREDENTIAL_BYTES_MAX))
    assert node.delivered == [b"good credential"]


# -- the certificate


def test_a_certificate_is_kept_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(first.fingerprint) == 32
    path.chmod(0o644)
    assert Certificate.of(path).fingerprint == first.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600
    assert Certificate.fresh().fingerprint != Certificate.fresh().fingerprint


@pytest.mark.parametrize("content", [b"", b"junk", b"half", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    path.write_bytes(content if content != b"half" else path.read_bytes()[:150])
    second = Certificate.of(path)
    assert second.fingerprint not in (first.fingerprint, b"")
    assert Certificate.of(path).fingerprint == second.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_certificate_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Certificate.of(tmp_path / "missing" / "tls.pem")


# -- the folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    home.key_path.write_bytes(sha256(b"identity 1").digest())  # as `builders.identity` makes them
    home.key_path.chmod(0o600)
    return home


def test_an_invitation_is_kept(home: Home) -> None:
    assert home.invitation() is None
    home.keep_invitation(invitation())
    assert home.invitation() == invitation()
    assert home.invitation_path.stat().st_mode & 0o777 == 0o600


def test_an_invitation_for_somebody_else_or_damaged(home: Home) -> None:
    with pytest.raises(ConfigError, match=f"is for node {BOB.node_id.hex()}.*{ALICE.node_id.hex()}"):
        home.keep_invitation(invitation(2))
    assert not home.invitation_path.exists()
    for content in (b"", b"junk", b"\xff", invitation().to_text().encode()[:-9]):
        home.invitation_path.write_bytes(content)
        with pytest.raises(StorageError, match=r"invitation is damaged .* --invite to give it again"):
            home.invitation()


def test_a_key_is_copied_into_a_new_folder_only(home: Home, tmp_path: Path) -> None:
    fresh, taken = Home(tmp_path / "fresh"), Home(tmp_path / "taken")
    for other in (fresh, taken):
        other.create()
    before = taken.identity().node_id
    for other in (fresh, taken):
        other.copy_key(home)
    assert fresh.identity().node_id == ALICE.node_id
    assert fresh.key_path.stat().st_mode & 0o777 == 0o600
    assert taken.identity().node_id == before
    empty = Home(tmp_path / "empty")
    empty.create()
    with pytest.raises(StorageError, match=f"cannot use {tmp_path / 'nowhere' / 'key'}"):
        empty.copy_key(Home(tmp_path / "nowhere"))
    assert not empty.has_key


@pytest.mark.parametrize(
    ("seed", "mode"), [(b"", 0o600), (bytes(32), 0o600), (b"k" * 32, 0o644)], ids=["cut", "zeros", "open"]
)
def test_a_machines_key_that_cannot_be_used_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: bytes, mode: int
) -> None:
    """Or the copy would still be there when the machine's own is restored from a backup."""
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    machine = Home(tmp_path)
    machine.key_path.write_bytes(seed)
    machine.key_path.chmod(mode)
    with pytest.raises(StorageError, match=f"{machine.key_path} (is damaged|can be read by others)"):
        new_home(None, SMALL.swarm_id)
    machine.key_path.write_bytes(b"k" * 32)
    machine.key_path.chmod(0o600)
    assert new_home(None, SMALL.swarm_id).identity().node_id == machine.identity().node_id


def test_a_machines_key_that_is_not_mounted_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    (tmp_path / "key").symlink_to(tmp_path / "stick" / "key")
    with pytest.raises(StorageError, match=f"cannot use {tmp_path}/key: .*; is its disk mounted"):
        new_home(None, SMALL.swarm_id)
    (tmp_path / "stick").mkdir()
    own = Home(tmp_path / "stick").identity().node_id
    assert new_home(None, SMALL.swarm_id).identity().node_id == own


# -- who asks


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
    assert asker_of(home).credential == b"", "members have seen it"
    home.invitation_path.unlink()
    assert (asker_of(home).swarm_id, asker_of(home).credential) == (SMALL.swarm_id, b"")


def test_the_node_of_this_machine_that_runs_there_asks(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    assert nodes_root() == tmp_path
    assert asker_for(None, "127.0.0.1:7700") is None
    home.adopt(SMALL)
    home.write_daemon(address="127.0.0.1:7700")
    assert asker_for(None, "127.0.0.1:7700") is None, "it ran there once: another one may now"
    home.lock.take()
    same = "127.0.0.1:7700", " 127.0.0.1:7700", "localhost:7700", f"gossamer://{'ab' * 32}@127.0.0.1:7700"
    for address in same:
        found = asker_for(None, address)
        assert found is not None and found.identity.node_id == ALICE.node_id
    assert asker_for(None, "127.0.0.1:7701") is None
    told = asker_for(home.root, "127.0.0.1:7701")
    assert told is not None and told.identity.node_id == ALICE.node_id
    for content in ("", "[]", "{}", json.dumps({"address": 1}), "\ud800".encode("utf-16", "surrogatepass")):
        data = content if isinstance(content, bytes) else content.encode()
        home.daemon_path.write_bytes(data)
        assert asker_for(None, "127.0.0.1:7700") is None
    home.lock.let_go()


def test_of_a_machines_nodes_the_running_one_asks(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One swarm after another on one port, the usual one."""
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    homes = [home, Home(tmp_path / "second"), Home(tmp_path / "third")]
    for each in homes:
        each.create()
        each.adopt(SMALL)
        each.write_daemon(address="127.0.0.1:7700")
    for each in homes:
        each.lock.take()
        found = asker_for(None, "127.0.0.1:7700")
        assert found is not None and found.identity.node_id == each.identity().node_id
        each.lock.let_go()


def test_a_user_without_a_home_folder_asks_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user whom its system does not know."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GOSSAMER_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert asker_for(None, "127.0.0.1:7700") is None
    with pytest.raises(ConfigError, match="GOSSAMER_HOME"):
        nodes_root()


# -- addresses that carry a node id


def test_contacts() -> None:
    plain, pinned = parse_contact(" host:1 "), parse_contact(f"gossamer://{ALICE.node_id.hex()}@host:1")
    assert plain == Contact("host:1") and str(plain) == "host:1"
    assert pinned == Contact("host:1", ALICE.node_id)
    assert parse_contact(str(pinned)) == pinned
    assert parse_contact("gossamer://host:1") == plain
    assert parse_contact(f"{ALICE.node_id.hex()}@[::1]:1") == Contact("[::1]:1", ALICE.node_id)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "HOST:PORT"),
        ("gossamer://", "HOST:PORT"),
        (f"gossamer://{'a' * 64}@", "HOST:PORT"),
        (f"gossamer://{'a' * 63}@host:1", "64 hex digits"),
        (f"gossamer://{'g' * 64}@host:1", "64 hex digits"),
        ("gossamer://@host:1", "64 hex digits"),
        (f"http://{'a' * 64}@host:1", "64 hex digits"),
        (f"{'a' * 64}@{'b' * 64}@host:1", "64 hex digits"),
    ],
)
def test_what_is_no_contact(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_contact(text)


# -- the database


def test_credentials_survive(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    store = RecordStore(path, INVITED.swarm_id)
    assert store.load_credentials() == []
    for number in (2, 1, 2):
        store.add_credential(bytes([number]) * 32, b"envelope %d" % number)
    store.close()
    again = RecordStore(path, INVITED.swarm_id)
    assert again.load_credentials() == [b"envelope 1", b"envelope 2"]
    again.close()


def test_a_connection_that_was_closed_twice_is_left_to_end() -> None:
    """As Python 3.11.2 has it, where other releases let it be cut."""
    transport = Mock(abort=Mock(side_effect=AttributeError("'NoneType' object has no attribute '_abort'")))
    cut(transport)
    assert transport.abort.called
