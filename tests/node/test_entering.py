"""`gossamer.node.entering`: what is given to the wrong folder changes nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap.owners import invite
from gossamer.node.entering import enter_invited, enter_swarm
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


def test_a_folder_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of somebody's own may change the current folder in the trainer's process."""
    monkeypatch.chdir(tmp_path)
    home = Home(Path("d"))
    home.create()
    home.adopt(HERE)
    home.write_peers(["127.0.0.1:7700"])
    assert enter_swarm((), Path("d"), None, plaintext=True).root == tmp_path / "d"


def test_a_folder_whose_manifest_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"d is not there: .*--join ADDRESS \(or --invite\)"):
        enter_swarm((), tmp_path / "d", None, plaintext=True)
    Home(tmp_path / "d").create()
    with pytest.raises(ConfigError, match=r"d has no manifest: .*--join ADDRESS \(or --invite\)"):
        enter_swarm((), tmp_path / "d", None, plaintext=True)
