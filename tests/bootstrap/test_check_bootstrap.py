"""`check_bootstrap`: what `gossamer bootstrap` would refuse at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.invites import invite, kept, new_secret
from gossamer.node.home import Home, default_folder, own_id
from gossamer.protocol.access.acl import Invitation, Role
from tests.node.findings import INVITED, errors, founding, invited_home, look
from tests.protocol import builders
from tests.protocol.builders import OWNER


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return invited_home(tmp_path, monkeypatch)


def test_a_bootstrap_peers_invitation_is_for_the_key_of_its_own_folder(home: Home, tmp_path: Path) -> None:
    """Not for this machine's, which a node beside it would take."""
    file, own = tmp_path / "b.toml", Home(default_folder(INVITED.swarm_id, "-bootstrap"))
    manifests.write(INVITED, tmp_path / "m.toml")
    machine = own_id(None)
    text = '[bootstrap]\nmanifest = "m.toml"\njoin = ["127.0.0.1:1"]\n'
    file.write_text(text)
    assert f"gossamer id --dir {own.root} prints" in errors(look(file))["invite"]

    def invited(node_id: str) -> Invitation:
        node = bytes.fromhex(node_id)
        return invite(OWNER, INVITED.swarm_id, node, role=Role.OBSERVE, days=0, contacts=())

    file.write_text(f'{text}invite = "{invited(machine).to_text()}"\n')
    assert errors(look(file))["invite"].endswith(f"send an owner what gossamer id --dir {own.root} prints")
    assert not own.root.exists()
    right = invited(own_id(own.root))
    assert right.grant.node_id.hex() != machine
    file.write_text(f'{text}invite = "{right.to_text()}"\n')
    assert errors(look(file)) == {}
    own.keep_invitation(right)
    file.write_text(text)
    assert errors(look(file)) == {}, "it is let in by what it was given before"


def test_a_bootstrap_peer_needs_first_parameters(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\n')
    seeded = founding(tmp_path)
    assert errors(look(file)) == {}
    seeded.write_text(seeded.read_text().replace("seed = 0", "seed = 1"))  # as if made --from other weights
    assert "makes different initial parameters" in errors(look(file))["genesis"]
    manifests.write(builders.manifest(task={"name": "my:Mine"}), tmp_path / "m.toml", replace=True)
    assert "there is no" in errors(look(file))["genesis"]
    manifests.write(builders.manifest(task={"name": "chess"}), tmp_path / "m.toml", replace=True)
    assert "found it with Peer.attach" in errors(look(file))["genesis"]
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\njoin = ["127.0.0.1:1"]\n')
    assert errors(look(file)) == {}, "who joins is given them"
    assert not (tmp_path / "b").exists()


def test_whether_a_bootstrap_peer_has_a_model_is_looked_at_and_nothing_written(
    home: Home, tmp_path: Path
) -> None:
    file = tmp_path / "b.toml"
    file.write_text('[bootstrap]\nmanifest = "m.toml"\ndir = "b"\n')
    founding(tmp_path)
    begun = Home(tmp_path / "b")
    begun.chunks_path.mkdir(parents=True)
    begun.ledger_path.touch()
    assert errors(look(file)) == {}
    assert sorted(path.name for path in begun.root.iterdir()) == ["chunks", "ledger.sqlite"]
    assert begun.ledger_path.stat().st_size == 0


def test_a_bootstrap_peer_of_an_invited_swarm_must_be_let_in(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    text = '[bootstrap]\nmanifest = "m.toml"\ndir = "d"\njoin = ["127.0.0.1:1"]\n'
    file.write_text(text)
    manifests.write(INVITED, tmp_path / "m.toml")
    assert "m.owner" in errors(look(file))["invite"]
    with kept(tmp_path / "m.owner", new_secret()):
        assert "does not belong to an owner" in errors(look(file))["invite"]
    own = invite(OWNER, INVITED.swarm_id, home.identity().node_id, role=Role.OBSERVE, days=0, contacts=())
    file.write_text(f'{text}invite = "{own.to_text()}"\n')
    assert errors(look(file)) == {}
    file.write_text(text)
    home.keep_invitation(own)
    assert errors(look(file)) == {}
