"""Who is let in: credentials on a link, and what a folder keeps of an invitation and a key."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.home import Home, new_home
from gossamer.protocol.access.acl import Invitation, parse_grant
from gossamer.protocol.errors import (
    ConfigError,
    RefusedError,
    StorageError,
)
from gossamer.protocol.records import open_envelope
from tests.node.trainer_side import until
from tests.node.wires import End, Pair, get_chunk, linked, listening, put
from tests.protocol import builders
from tests.protocol.builders import SMALL, grant, identity

INVITED = builders.manifest(admission=builders.admission())
ALICE, BOB = identity(1), identity(2)


def invitation(node_id_of_number: int = 1) -> Invitation:
    data = grant(identity(node_id_of_number), INVITED)
    return Invitation(INVITED.swarm_id, parse_grant(open_envelope(data, INVITED.swarm_id)), ("a:1",))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    home.key_path.write_bytes(sha256(b"identity 1").digest())  # as `builders.identity` makes them
    home.key_path.chmod(0o600)
    return home


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


async def test_a_link_that_was_hung_up_serves_no_chunk_however_slowly_it_closes(secure_pair: Pair) -> None:
    _, listener, out, inward = secure_pair
    blob = listener.hold(b"model")
    assert await get_chunk(out, blob, 5) == b"model"
    inward._ending.set()  # as close_soon does, with a queue that the peer takes slowly
    listener.wanted[blob] = 5
    for request in (get_chunk(out, blob, 5), put(out, blob, b"model")):
        with pytest.raises(RefusedError):
            await request
    assert not listener.arrived
    assert len(listener.server._sessions) == 1


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
        other.identity(home)
    assert fresh.identity().node_id == ALICE.node_id
    assert fresh.key_path.stat().st_mode & 0o777 == 0o600
    assert taken.identity().node_id == before
    empty = Home(tmp_path / "empty")
    empty.create()
    with pytest.raises(StorageError, match=f"cannot use {tmp_path / 'nowhere' / 'key'}"):
        empty.identity(Home(tmp_path / "nowhere"))
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
