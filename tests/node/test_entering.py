"""`gossamer.node.entering`: what is given to the wrong folder changes nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap.owners import invite
from gossamer.node.entering import enter_invited, enter_swarm
from gossamer.node.folders import node_in
from gossamer.node.given import checked_advertise, given_invitation
from gossamer.node.storage.home import Home
from gossamer.protocol.admission import Role
from gossamer.protocol.errors import ConfigError
from tests.protocol import builders
from tests.protocol.builders import OWNER

HERE = builders.manifest(admission=builders.admission(), name="here")
ELSEWHERE = builders.manifest(admission=builders.admission(), name="elsewhere")


def test_an_invitation_to_another_swarm_leaves_the_folders_own(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    home.adopt(HERE)
    here, elsewhere = (
        invite(OWNER, m.swarm_id, home.identity().node_id, role=Role.TRAIN, days=1, contacts=())
        for m in (HERE, ELSEWHERE)
    )
    assert enter_invited(here, (), tmp_path, plaintext=True).invitation() == here
    with pytest.raises(ConfigError, match="belongs to another swarm"):
        enter_invited(elsewhere, (), tmp_path, plaintext=True)
    assert home.invitation() == here


def test_a_founder_brings_the_manifest_along(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    here = invite(OWNER, HERE.swarm_id, home.identity().node_id, role=Role.TRAIN, days=1, contacts=())
    with pytest.raises(ConfigError, match="the manifest describes swarm"):
        enter_invited(here, (), tmp_path, plaintext=True, manifest=ELSEWHERE)
    assert home.manifest() is None and home.invitation() is None
    assert enter_invited(here, (), tmp_path, plaintext=True, manifest=HERE).manifest() == HERE


def test_an_invitation_to_another_swarm_than_is_meant(tmp_path: Path) -> None:
    own = Home(tmp_path)
    own.create()
    here = invite(OWNER, HERE.swarm_id, own.identity().node_id, role=Role.TRAIN, days=1, contacts=())
    with pytest.raises(ConfigError, match=r"the invitation is for swarm .*, not 0123"):
        enter_invited(here, (), tmp_path, plaintext=True, manifest=HERE, swarm_id="0123")
    meant = HERE.swarm_id.hex()[:12].upper()
    assert enter_invited(here, (), tmp_path, plaintext=True, manifest=HERE, swarm_id=meant).manifest() == HERE


def test_what_others_are_told_has_nothing_around_it() -> None:
    assert checked_advertise([" 1.2.3.4:7700", "a.example:1\n"]) == ("1.2.3.4:7700", "a.example:1")
    assert checked_advertise(None) == ()


def test_an_invitation_as_a_mail_has_it() -> None:
    text = invite(OWNER, HERE.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    for pasted in (f"  {text} \n", f"\n> {text[:60]}\n> {text[60:]}\n"):
        assert given_invitation(pasted) == given_invitation(text)


def test_an_invitation_in_a_file_of_ones_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the tilde of ``--invite=~/letter`` alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    text = invite(OWNER, HERE.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    (tmp_path / "letter").write_text(text)
    assert given_invitation("~/letter") == given_invitation(text)


def test_what_is_no_invitation_nor_a_file(tmp_path: Path) -> None:
    for text in ("nowhere", "a\0b", "~nobody-has-this-name/x", str(tmp_path), "x" * 300):
        with pytest.raises(ConfigError, match="--invite takes an invitation or a file with one; "):
            given_invitation(text)


def test_a_folder_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of somebody's own may change the current folder in the trainer's process."""
    monkeypatch.chdir(tmp_path)
    home = Home(Path("d"))
    home.create()
    home.adopt(HERE)
    home.write_peers(["127.0.0.1:7700"])
    assert enter_swarm((), Path("d"), None, plaintext=True).root == tmp_path / "d"


def test_the_node_of_this_machine_is_meant_if_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no node in"):
        node_in(None)
    for name, manifest in (("one", HERE), ("one-bootstrap", HERE)):
        home = Home(tmp_path / name)
        home.create()
        home.adopt(manifest)
    assert node_in(None).root == tmp_path / "one"
    assert node_in(tmp_path / "other").root == tmp_path / "other"
    home = Home(tmp_path / "two")
    home.create()
    home.adopt(ELSEWHERE)
    with pytest.raises(ConfigError, match="which node"):
        node_in(None)


def test_a_tilde_before_an_invitations_file_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "i").write_text("no invitation")
    with pytest.raises(ConfigError, match="^(?!.*No such file)"):
        given_invitation("~/i")
