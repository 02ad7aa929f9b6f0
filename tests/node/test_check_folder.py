"""`check_folder`: what would go wrong with a node's folder and its invitation."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from gossamer.bootstrap.cli.config_check import check_folder
from gossamer.bootstrap.invites import invite
from gossamer.node.daemon.storage.database import PATH_BYTES_MAX, Database
from gossamer.node.home import Home
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import StorageError
from tests.node.findings import INVITED, found, invited_home, levels
from tests.protocol.builders import OWNER


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return invited_home(tmp_path, monkeypatch)


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert levels(check_folder(Home(tmp_path / "a" / "b"), joins=True)) == {"dir": ["ok"]}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "a disk that is not mounted")
    for path in ("file", "file/d", "link", "link/d"):
        assert levels(check_folder(Home(tmp_path / path), joins=True)) == {"dir": ["error"]}, path


def test_a_folder_whose_path_is_too_long_for_its_databases(tmp_path: Path) -> None:
    """As long as it may be a database opens there; of one byte more the node would end as it starts."""
    longest = tmp_path / "d" / ("e" * 230)
    longest /= "f" * (PATH_BYTES_MAX - len(str(longest / "f" / "chronicle.sqlite")) + 1)
    beyond = longest.with_name(longest.name + "f")
    assert levels(check_folder(Home(longest), joins=True)) == {"dir": ["ok"]}
    for folder in (longest, beyond):
        folder.mkdir(parents=True)
    Database(Home(longest).chronicle_path).close()
    with pytest.raises(StorageError, match="write to it and to its folder, .* longer than 504 bytes"):
        Database(Home(beyond).chronicle_path)
    (said,) = found(check_folder(Home(beyond), joins=True))["dir"]
    assert said[0] == "error" and "over 487 bytes" in said[1]


def test_a_folder_without_a_model_must_join(home: Home) -> None:
    assert levels(check_folder(home, joins=True)) == {"dir": ["ok"], "manifest": ["ok"]}
    assert levels(check_folder(home, joins=False))["join"] == ["error"]
    assert {path.name for path in home.root.iterdir()} == {"manifest"}, "no key was made, no lock"
    home.write_peers(["127.0.0.1:1"])
    assert "join" not in levels(check_folder(home, joins=False)), "it was told of somebody to ask"


def test_whom_a_kept_invitation_is_for_is_not_known_where_the_key_is_damaged(home: Home) -> None:
    own = home.identity().node_id
    home.keep_invitation(invite(OWNER, INVITED.swarm_id, own, role=Role.TRAIN, days=30, contacts=()))
    assert levels(check_folder(home, joins=True)).keys() == {"dir", "key", "manifest", "invite"}
    home.key_path.write_bytes(bytes(32))
    assert levels(check_folder(home, joins=True)) == {"dir": ["ok"], "key": ["error"], "manifest": ["ok"]}


def test_a_running_node_is_seen_by_its_lock(home: Home) -> None:
    assert not home.lock.is_taken()
    with open(home.root / "lock", "w") as lock:
        assert not home.lock.is_taken()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert home.lock.is_taken()
        assert levels(check_folder(home, joins=True))["dir"] == ["warning"]
    home.lock.take()


def test_a_damaged_ledger_is_seen_whoever_is_to_be_joined(home: Home) -> None:
    """The node would end of it as it starts."""
    home.ledger_path.write_bytes(bytes(range(1, 201)) * 15)
    for joins in (True, False):
        said = found(check_folder(home, joins))
        assert said["dir"][1][0] == "error" and "if it is damaged, remove it" in said["dir"][1][1]
    home.ledger_path.write_bytes(b"")
    assert levels(check_folder(home, joins=True)) == {"dir": ["ok"], "manifest": ["ok"]}
    assert {path.name: path.stat().st_size for path in home.root.glob("[!m]*")} == {"ledger.sqlite": 0}


def test_a_damaged_folder(home: Home) -> None:
    home.manifest_path.write_bytes(b"junk")
    home.key_path.write_bytes(bytes([7]) * 32)
    home.key_path.chmod(0o644)
    said = found(check_folder(home, joins=True))
    assert "chmod 600" in said["key"][0][1] and "damaged" in said["dir"][1][1]


@pytest.mark.parametrize(
    ("days", "level", "part"),
    [
        (30, "ok", "train"),
        (0, "ok", "train"),
        (1, "warning", "runs out in 1.0 days"),
        (-1, "error", "has run out"),
    ],
)
def test_an_invitation(home: Home, days: float, level: str, part: str) -> None:
    own = home.identity().node_id
    home.keep_invitation(invite(OWNER, INVITED.swarm_id, own, role=Role.TRAIN, days=days, contacts=()))
    ((found_level, text),) = found(check_folder(home, joins=True))["invite"]
    assert found_level == level and part in text
