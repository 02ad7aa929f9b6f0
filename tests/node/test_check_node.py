"""`check_node`: what `gossamer node` would refuse at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.cli import config_check as check_node
from gossamer.bootstrap.cli.config_check import Answers
from gossamer.bootstrap.invites import invite
from gossamer.node.home import Home
from gossamer.protocol.access.acl import Role
from tests.node.findings import INVITED, errors, founding, invited_home, look
from tests.protocol.builders import OWNER


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return invited_home(tmp_path, monkeypatch)


def test_an_invitation_that_comes_before_the_key(home: Home, tmp_path: Path) -> None:
    text = invite(OWNER, INVITED.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    for folder, said in (
        ('dir = "d"\n', f"gossamer id --dir {home.root} prints"),
        ("", "gossamer id prints"),
    ):
        (tmp_path / "n.toml").write_text(f'[node]\n{folder}invite = "{text}"\nobserve = true\n')
        found_there = look(tmp_path / "n.toml").get("invite", [])
        assert [level for level, _ in found_there] == ["error"]
        assert found_there[0][1].endswith(said)
    assert not home.key_path.exists()


def test_an_invitation_for_somebody_else_or_elsewhere(home: Home, tmp_path: Path) -> None:
    own, other = home.identity().node_id, bytes(32)
    for swarm_id, node_id, part in (
        (INVITED.swarm_id, other, "is for node"),
        (other, own, "for a different swarm"),
    ):
        text = invite(OWNER, swarm_id, node_id, role=Role.TRAIN, days=1, contacts=()).to_text()
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\ninvite = "{text}"\nobserve = true\n')
        assert [part in said for level, said in look(tmp_path / "n.toml")["invite"] if level == "error"] == [
            True
        ]


@pytest.mark.parametrize("folder", ['dir = "d"\n', ""], ids=["the folder's", "the machine's"])
def test_a_key_that_cannot_be_used_is_said_and_whom_it_invites_is_not(
    home: Home, tmp_path: Path, folder: str
) -> None:
    machine = Home(tmp_path / "home")
    machine.create()
    text = invite(OWNER, INVITED.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    (tmp_path / "n.toml").write_text(f'[node]\n{folder}invite = "{text}"\nobserve = true\n')
    key = (home if folder else machine).key_path
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    said = look(tmp_path / "n.toml")
    assert errors(said) == {
        "key": f"{key} is damaged (a secret key is not 32 zeros); restore it from a backup"
    }


def test_an_invitation_that_cannot_be_read_is_said_of_that(home: Home, tmp_path: Path) -> None:
    for wrong, part in (("nowhere", "No such file"), ("gossamer-invitation:AAAA", "damaged")):
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\ninvite = "{wrong}"\nobserve = true\n')
        said = look(tmp_path / "n.toml")
        assert [part in text for level, text in said["invite"] if level == "error"] == [True]
        assert [level for level, _ in said["dir"]] == ["ok"]


def test_what_a_node_would_not_train_with(home: Home, tmp_path: Path) -> None:
    found_there = Home(tmp_path / "text")
    found_there.create()
    found_there.adopt(manifests.read(founding(tmp_path)))
    (tmp_path / "blank").mkdir()
    addresses = ", ".join(f'"127.0.0.1:{port}"' for port in range(1, 10))
    (tmp_path / "n.toml").write_text(
        '[node]\ndir = "text"\njoin = ["127.0.0.1:1"]\ntrust = ["abc"]\ntask = "my.py:Mine"\n'
        f'data = ["blank"]\nadvertise = [{addresses}]\n'
    )
    said = errors(look(tmp_path / "n.toml"))
    assert said.keys() == {"node", "task", "data", "advertise"}
    assert "trust in" in said["node"] and "'abc' is not a node id" in said["node"]
    assert "leave --task out" in said["task"] and "no text in" in said["data"]
    assert "8 addresses at most, not 9" in said["advertise"]
    (tmp_path / "n.toml").write_text('[node]\ndir = "text"\njoin = ["127.0.0.1:1"]\n')
    assert errors(look(tmp_path / "n.toml")) == {}


def test_a_folder_of_another_swarm_than_is_pinned(home: Home, tmp_path: Path) -> None:
    for pinned, found_there in ((INVITED.swarm_id.hex()[:12].upper(), False), ("ffff", True)):
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\nobserve = true\nswarm-id = "{pinned}"\n')
        assert ("swarm-id" in look(tmp_path / "n.toml")) is found_there


def test_who_is_invited_to_look_on_needs_no_device(home: Home, tmp_path: Path) -> None:
    for role, needs_one in ((Role.OBSERVE, False), (Role.TRAIN, True)):
        own = home.identity().node_id
        text = invite(OWNER, INVITED.swarm_id, own, role=role, days=30, contacts=("a:1",)).to_text()
        (tmp_path / "n.toml").write_text(f'[node]\ndir = "d"\ndevice = "cpu"\ninvite = "{text}"\n')
        assert ("device" in look(tmp_path / "n.toml")) is needs_one


def test_a_folder_of_another_swarm_is_not_a_bootstrap_peers(home: Home, tmp_path: Path) -> None:
    founding(tmp_path)
    (tmp_path / "n.toml").write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "d"\n')
    said = errors(look(tmp_path / "n.toml"))
    assert f"belongs to swarm {INVITED.swarm_id.hex()[:12]}" in said["dir"]


def test_the_disk_needs_room_for_as_many_members_as_are_there(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    monkeypatch.setattr(check_node, "ask_nodes", lambda *_, **__: Answers(members=41))
    monkeypatch.setattr(check_node, "disk_needed", lambda _, members, __: rooms.append(members) or 1)
    (tmp_path / "n.toml").write_text('[node]\ndir = "d"\nobserve = true\njoin = ["127.0.0.1:1"]\n')
    look(tmp_path / "n.toml", offline=False)
    assert rooms == [42], "and for this one"
