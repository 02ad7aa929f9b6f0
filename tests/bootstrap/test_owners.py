"""`gossamer.bootstrap.invites`: the key that lets in stays with a person, and is never lost to a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.bootstrap import invites as owners
from gossamer.protocol.access.acl import AccessList, Invitation, Revocation, Role, read_invitation
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, REASON_BYTES_MAX
from gossamer.protocol.manifest import Manifest
from tests.protocol import builders
from tests.protocol.builders import identity

ALICE = identity(1)


def created(path: Path) -> Identity:
    owners.write_owner(path, os.urandom(32))
    return owners.read_owner(path)


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return created(tmp_path / "my.owner")


@pytest.fixture
def manifest(owner: Identity) -> Manifest:
    return builders.manifest(admission=builders.admission("invited", owner))


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path, owner: Identity) -> None:
    path = tmp_path / "my.owner"
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_bytes()) == 32
    assert owners.read_owner(path).public_key == owner.public_key
    with pytest.raises(ConfigError, match=r"exists.*--owner-key"):
        owners.write_owner(path, bytes(32))
    assert owners.read_owner(path).public_key == owner.public_key
    with pytest.raises(StorageError, match="missing"):
        created(tmp_path / "missing" / "my.owner")


def test_a_key_that_cannot_be_used(tmp_path: Path, owner: Identity) -> None:
    path = tmp_path / "my.owner"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        owners.read_owner(path)
    with pytest.raises(ConfigError, match="no-such"):
        owners.read_owner(tmp_path / "no-such.owner")
    path.chmod(0o600)
    for damaged in (b"", b"short", bytes(32)):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"my\.owner is damaged or not an owner's key"):
            owners.read_owner(path)


def test_whose_key_it_is(tmp_path: Path, owner: Identity, manifest: Manifest) -> None:
    path = tmp_path / "my.toml"
    assert owners.owner_of(manifest, path, None).public_key == owner.public_key
    other = tmp_path / "other.owner"
    created(other)
    with pytest.raises(ConfigError, match="does not belong to an owner of swarm"):
        owners.owner_of(manifest, path, other)
    with pytest.raises(ConfigError, match=r"no owner's key .*elsewhere\.owner .*--owner-key"):
        owners.owner_of(manifest, tmp_path / "elsewhere.toml", None)


def test_the_only_manifest_with_a_key_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--manifest"):
        owners.find_manifest(None)
    for name in ("my.toml", "my.owner", "open.toml", "lost.owner"):
        (tmp_path / name).touch()
    assert owners.find_manifest(None) == Path("my.toml")
    assert owners.find_manifest(Path("x.toml")) == Path("x.toml")
    (tmp_path / "lost.toml").touch()
    with pytest.raises(ConfigError, match="--manifest"):
        owners.find_manifest(None)


@pytest.mark.parametrize("days", [0, 0.5, 30, 36_500])
@pytest.mark.parametrize("role", Role)
def test_what_is_signed_is_believed(owner: Identity, manifest: Manifest, days: float, role: Role) -> None:
    made = owners.invite(owner, manifest.swarm_id, ALICE.node_id, role=role, days=days, contacts=("a:1",))
    acl = AccessList(manifest.admission, manifest.swarm_id)
    assert acl.learn(made.grant.data) == made.grant
    assert acl.role_of(ALICE.node_id) is role
    assert (made.grant.expires == 0) == (days == 0)
    acl.learn(owners.revoke(owner, manifest.swarm_id, ALICE.node_id, last_round=7, reason="gone"))
    assert acl.role_of(ALICE.node_id) is None
    assert acl.counts(ALICE.node_id, 7) == (role is Role.TRAIN) and not acl.counts(ALICE.node_id, 8)


@pytest.mark.parametrize(
    "reason", ["", "Schlüssel weg – 5 €", "stolen \U0001f62d", "ключ украден", "चाबी चोरी हो गई"]
)
def test_a_reason_in_any_language(owner: Identity, manifest: Manifest, reason: str) -> None:
    acl = AccessList(manifest.admission, manifest.swarm_id)
    signed = owners.revoke(owner, manifest.swarm_id, ALICE.node_id, last_round=0, reason=reason)
    learnt = acl.learn(signed)
    assert isinstance(learnt, Revocation) and learnt.reason == reason


@pytest.mark.parametrize("reason", ["two\nlines", "r" * (REASON_BYTES_MAX + 1), "é" * REASON_BYTES_MAX])
def test_a_reason_that_no_node_would_take(owner: Identity, manifest: Manifest, reason: str) -> None:
    with pytest.raises(ConfigError, match="--reason"):
        owners.revoke(owner, manifest.swarm_id, ALICE.node_id, last_round=0, reason=reason)


def test_an_invitation_that_holds_too_much_is_not_made(owner: Identity, manifest: Manifest) -> None:
    def invitation(count: int) -> Invitation:
        contacts = tuple(f"h{number}.example:7700" for number in range(count))
        return owners.invite(owner, manifest.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=contacts)

    made = invitation(ADDRESSES_PER_PEER_MAX)
    assert read_invitation(made.to_text()) == made
    with pytest.raises(ConfigError, match="holds at most 8 addresses, not 9"):
        invitation(ADDRESSES_PER_PEER_MAX + 1)
