"""`gossamer.node.join`: what is given to the wrong folder changes nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap.invites import invite
from gossamer.node import join as entering
from gossamer.node.daemon.storage.records import GENESIS, RecordStore
from gossamer.node.home import Home
from gossamer.node.join import enter
from gossamer.node.options import NodeOptions
from gossamer.protocol.access.acl import Invitation, Role
from gossamer.protocol.errors import ConfigError, NobodyThereError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.records import Claim
from tests.protocol import builders
from tests.protocol.builders import OWNER


def entered(
    folder: Path | None,
    join: tuple[str, ...] = (),
    invitation: Invitation | None = None,
    manifest: Manifest | None = None,
    swarm_id: str | None = None,
) -> Home:
    invite = invitation.to_text() if invitation else None
    options = NodeOptions.of(
        folder=folder, join=join, invite=invite, swarm_id=swarm_id, plaintext=True, listen="127.0.0.1:0"
    )
    home, joins = enter(options, manifest)
    assert joins == (join or (invitation.contacts if invitation else ()))
    return home


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
    assert entered(tmp_path, ("a:1",), here).invitation() == here
    with pytest.raises(ConfigError, match="belongs to swarm"):
        entered(tmp_path, (), elsewhere)
    assert home.invitation() == here


def test_a_founder_brings_the_manifest_along(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    here = invite(OWNER, HERE.swarm_id, home.identity().node_id, role=Role.TRAIN, days=1, contacts=())
    with pytest.raises(ConfigError, match="the manifest describes swarm"):
        entered(tmp_path, (), here, manifest=ELSEWHERE)
    assert home.manifest() is None and home.invitation() is None
    assert entered(tmp_path, (), here, manifest=HERE).manifest() == HERE


def test_an_invitation_to_another_swarm_than_is_meant(tmp_path: Path) -> None:
    own = Home(tmp_path)
    own.create()
    here = invite(OWNER, HERE.swarm_id, own.identity().node_id, role=Role.TRAIN, days=1, contacts=())
    with pytest.raises(ConfigError, match=r"the invitation is for swarm .*, not 0123"):
        entered(tmp_path, (), here, manifest=HERE, swarm_id="0123")
    meant = HERE.swarm_id.hex()[:12].upper()
    assert entered(tmp_path, (), here, manifest=HERE, swarm_id=meant).manifest() == HERE


def test_who_was_invited_takes_the_manifest_of_that_swarm_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers at the address, and whatever swarm that is of."""
    asked: list[str | None] = []

    def fetch(contacts: object, swarm_id: str | None, **options: object) -> Manifest:
        asked.append(swarm_id)
        return HERE

    monkeypatch.setattr(entering, "fetch_manifest", fetch)
    own = Home(tmp_path)
    own.create()
    here = invite(OWNER, HERE.swarm_id, own.identity().node_id, role=Role.TRAIN, days=1, contacts=())
    with pytest.raises(ConfigError, match="names no address"):
        entered(tmp_path, (), here)
    assert entered(tmp_path, ("a:1",), here).manifest() == HERE
    assert asked == [HERE.swarm_id.hex()]


def test_the_line_that_a_node_was_first_invited_with_does_not_take_back_what_it_got_since(
    tmp_path: Path,
) -> None:
    home = _own_node(tmp_path, HERE)
    first, since = (
        invite(OWNER, HERE.swarm_id, home.identity().node_id, role=role, days=1, contacts=())
        for role in (Role.OBSERVE, Role.TRAIN)
    )
    for given in (first, since, first):
        entered(home.root, (), given)
    assert home.invitation() == since


def test_a_folder_of_another_swarm_than_is_meant(tmp_path: Path) -> None:
    home = _own_node(tmp_path, HERE)
    with pytest.raises(ConfigError, match=r"belongs to swarm .*, not 0123"):
        entered(home.root, (), swarm_id="0123")
    assert entered(home.root, (), swarm_id=HERE.swarm_id.hex()[:12].upper()).root == home.root


def test_a_node_that_never_got_the_model_needs_somebody_to_ask(tmp_path: Path) -> None:
    home = _own_node(tmp_path, HERE, joined=False)
    with pytest.raises(ConfigError, match=r"has no model yet; name another node with --join ADDRESS"):
        entered(home.root, ())
    assert entered(home.root, ("a:1",)).root == home.root
    home.write_peers(["b:2"])
    assert entered(home.root, ()).root == home.root
    assert entered(_own_node(tmp_path, ELSEWHERE).root).root != home.root


def test_a_folder_whose_manifest_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which swarm"):
        entered(tmp_path / "d", ())


def _own_node(root: Path, manifest: Manifest, *peers: str, joined: bool = True, suffix: str = "") -> Home:
    """A node of this machine, in the folder that it has unless told otherwise."""
    home = Home(root / f"{manifest.swarm_id.hex()[:12]}{suffix}")
    home.create()
    home.adopt(manifest)
    home.write_peers(peers)
    if joined:
        store = RecordStore(home.ledger_path, manifest.swarm_id)
        store.add_snapshot(Claim(0, 0, GENESIS.chain, bytes(32)), (), ())
        store.close()
    return home


def test_who_starts_a_node_as_before_goes_on_also_where_the_one_to_join_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any process may die, the one with the address that all were given included."""

    def nobody(*args: object, **options: object) -> Manifest:
        raise NobodyThereError("no Gossamer node answers at a:1; is it running?")

    monkeypatch.setattr(entering, "fetch_manifest", nobody)
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))

    def goes_on(join: str, swarm_id: str | None = None, folder: Path | None = None) -> Path | None:
        try:
            return entered(folder, (join,), swarm_id=swarm_id).root
        except NobodyThereError:
            return None

    here, elsewhere = HERE.swarm_id.hex(), ELSEWHERE.swarm_id.hex()
    (tmp_path / "0123456789ab").mkdir()
    (tmp_path / "0123456789ab" / "manifest").write_bytes(b"damaged")
    own = _own_node(tmp_path, HERE, "no address", f"gossamer://{bytes(32).hex()}@a:1", "b:2")
    _own_node(tmp_path, HERE, "d:4", suffix="-bootstrap")
    assert goes_on("a:1") == own.root and "Continuing with this machine's node in" in caplog.text
    assert goes_on("c:3") is None, "which swarm that leads to is not known"
    assert goes_on("d:4") is None, "a bootstrap peer's folder is another node's"
    assert goes_on("a:1", folder=tmp_path / "new") is None
    assert goes_on("c:3", here[:12].upper()) == own.root
    assert goes_on("a:1", elsewhere) is None
    _own_node(tmp_path, ELSEWHERE, "a:1", joined=False)
    assert goes_on("a:1") == own.root, "the other never got a model"
    assert goes_on("a:1", elsewhere) is None
    _own_node(tmp_path, ELSEWHERE, "a:1")
    assert goes_on("a:1") is None, "either may be meant"
    assert goes_on("a:1", here) == own.root
