"""`home`: nothing readable by others, nothing half-written, one clear line when damaged."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from gossamer.bootstrap.invites import invite
from gossamer.node import files as wholefile
from gossamer.node import home as home_module
from gossamer.node.daemon.network.sockets import Certificate
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home, node_in
from gossamer.protocol.access.acl import Invitation, Role
from gossamer.protocol.errors import ConfigError, DiskFullError, StorageError
from gossamer.protocol.identity import Identity
from tests.node.daemons import release
from tests.node.full_disk import full
from tests.node.synced import Synced
from tests.protocol.builders import OWNER, SMALL, admission, manifest


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_for_its_owner_only(home: Home) -> None:
    home.lock()
    home.identity()
    home.adopt(SMALL)
    home.write_daemon(address="127.0.0.1:1")
    assert mode(home.root) == 0o700
    for path in (home.key_path, home.manifest_path, home.daemon_path, home.root / "lock"):
        assert mode(path) == 0o600, path


def test_the_key_is_made_once_and_read_back(home: Home) -> None:
    first = home.identity()
    assert len(home.key_path.read_bytes()) == 32
    assert Home(home.root).identity().node_id == first.node_id


@pytest.mark.parametrize("content", [b"", b"short", bytes(33), bytes(32)])
def test_a_damaged_key_is_refused_and_left_alone(home: Home, content: bytes) -> None:
    home.key_path.write_bytes(content)
    home.key_path.chmod(0o600)
    with pytest.raises(StorageError, match=r"key is damaged \(.*\); restore it"):
        home.identity()
    assert home.key_path.read_bytes() == content


def test_a_key_that_others_can_read_is_refused(home: Home) -> None:
    home.identity()
    home.key_path.chmod(0o640)
    with pytest.raises(StorageError, match="chmod 600"):
        home.identity()


SEED = bytes(range(32))


@pytest.mark.parametrize("content", [SEED, SEED.hex().encode(), f"{SEED.hex()}\n".encode()])
def test_a_key_is_taken_from_the_environment_or_a_file(
    home: Home, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """As of a Secret, for a folder that is empty at every start."""
    file = home.root / "given"
    file.write_bytes(content)
    monkeypatch.setenv("GOSSAMER_KEY_FILE", str(file))
    own = home.identity().node_id
    assert own == Identity.from_seed(SEED).node_id and mode(home.key_path) == 0o600
    monkeypatch.delenv("GOSSAMER_KEY_FILE")
    monkeypatch.setenv("GOSSAMER_KEY", SEED.hex())
    assert Home(home.root).identity().node_id == own
    monkeypatch.setenv("GOSSAMER_KEY", SEED[::-1].hex())
    with pytest.raises(StorageError, match="is another key than the environment gives"):
        home.identity()
    assert home.key_path.read_bytes() == SEED


@pytest.mark.parametrize("text", ["5" * 63, "x" * 64, "5" * 32, "x" * 32])
def test_a_key_that_is_none_is_refused_and_not_shown(
    home: Home, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("GOSSAMER_KEY", text)
    with pytest.raises(ConfigError, match=r"GOSSAMER_KEY is no key: give 64 hex") as refusal:
        home.identity()
    assert text not in str(refusal.value) and not home.has_key
    monkeypatch.delenv("GOSSAMER_KEY")
    monkeypatch.setenv("GOSSAMER_KEY_FILE", str(home.root / "keys"))
    with pytest.raises(ConfigError, match=r"GOSSAMER_KEY_FILE=.*keys: No such file"):
        home.identity()


def invitation(home: Home) -> Invitation:
    return invite(OWNER, SMALL.swarm_id, home.identity().node_id, role=Role.TRAIN, days=1, contacts=())


def test_an_invitation_for_another_node_is_not_kept(home: Home, tmp_path: Path) -> None:
    another = Home(tmp_path / "another")
    another.create()
    with pytest.raises(ConfigError, match=f"is for node {another.identity().node_id.hex()}"):
        home.keep_invitation(invitation(another))
    assert home.invitation() is None


def test_a_disk_that_is_full_when_a_node_starts_can_be_waited_for(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its last word is that a person has to mend something, and nobody starts it again."""
    here, another = invitation(home), Home(tmp_path / "another")
    another.create()
    monkeypatch.setattr(wholefile, "placed", full)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        for make in (
            Home(tmp_path / "a third").create,
            lambda: ChunkStore(home.chunks_path),
        ):
            with pytest.raises(DiskFullError, match=r"the disk is full; free some space$"):
                make()
    for keep in (
        another.identity,
        lambda: another.identity(home),
        lambda: home.adopt(SMALL),
        lambda: home.keep_invitation(here),
        lambda: home.keep_task("task.py:Mine"),
        lambda: Certificate.of(home.tls_path),
    ):
        with pytest.raises(DiskFullError, match=r"the disk is full; free some space$"):
            keep()
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(DiskFullError, match="lock: the disk is full"):
        home.lock()


def test_what_is_kept_already_needs_no_room(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    here = invitation(home)
    home.adopt(SMALL)
    home.keep_invitation(here)
    home.keep_task("task.py:Mine")
    monkeypatch.setattr(wholefile, "placed", full)
    home.adopt(SMALL)
    home.keep_invitation(here)
    home.keep_task("task.py:Mine")
    with pytest.raises(DiskFullError):
        home.keep_task("task.py:Other")
    assert home.task() == "task.py:Mine"


def test_who_we_are_and_where_we_belong_survives_a_power_cut(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Synced(monkeypatch)
    home.adopt(SMALL)
    home.keep_invitation(invitation(home))
    for path in (home.key_path, home.manifest_path, home.invitation_path):
        assert path in synced, path


def test_a_key_that_is_not_mounted_is_missed_and_not_replaced(home: Home, tmp_path: Path) -> None:
    disk = Home(tmp_path / "disk")
    disk.create()
    home.key_path.symlink_to(disk.key_path)
    with pytest.raises(StorageError, match="cannot use .*key: .*is its disk mounted"):
        home.identity()
    assert home.key_path.is_symlink() and list(home.root.iterdir()) == [home.key_path]
    assert disk.identity().node_id == home.identity().node_id


@pytest.mark.parametrize("content", [b"", b"junk", b"-5", b"9" * 100_000])
def test_a_damaged_count_of_starts_begins_anew(home: Home, content: bytes) -> None:
    """At the clock, so that it is beyond those of earlier starts, which others remember."""
    home.incarnation_path.write_bytes(content)
    now = time.time_ns() // 1_000_000
    first = home.next_incarnation()
    assert now <= first < 2**53, "a message can carry it"
    assert home.next_incarnation() > first


def test_a_folder_is_for_one_swarm(home: Home) -> None:
    assert home.manifest() is None
    home.adopt(SMALL)
    home.adopt(SMALL)
    assert home.manifest() == SMALL
    other = manifest(name="other")
    with pytest.raises(ConfigError) as error:
        home.adopt(other)
    assert SMALL.swarm_id.hex()[:12] in str(error.value) and other.swarm_id.hex()[:12] in str(error.value)
    assert home.manifest() == SMALL


@pytest.mark.parametrize("content", [b"", b"junk", SMALL.canonical()[:-1], SMALL.canonical() + b"\x00"])
def test_a_damaged_manifest_is_refused(home: Home, content: bytes) -> None:
    home.manifest_path.write_bytes(content)
    with pytest.raises(StorageError, match="manifest is damaged"):
        home.manifest()
    with pytest.raises(StorageError, match="manifest is damaged"):
        home.adopt(SMALL)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_an_unusable_daemon_file_is_none_at_all(home: Home, content: bytes) -> None:
    assert home.read_daemon() is None
    home.daemon_path.write_bytes(content)
    home.peers_path.write_bytes(content)
    assert home.read_daemon() is None and home.read_peers() == ()
    home.write_daemon(address="a:1", plaintext=True)
    assert home.read_daemon() == {"address": "a:1", "plaintext": True}


def test_socket_paths_fit_the_system_however_deep_the_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    homes = [Home(tmp_path / "x"), Home(deep / "one"), Home(deep / "two")]
    paths = [home.socket_path() for home in homes]
    assert paths[0] == str(tmp_path / "x" / "trainer.sock")
    assert len(set(paths)) == 3
    assert paths[1] == Home(deep / "one").socket_path(), "the trainer finds the same"
    for path in paths[1:]:
        assert mode(Path(path).parent) & 0o077 == 0
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)


def test_a_folder_in_tmp_that_others_can_enter_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it first could put a socket of their own in the trainer's way."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"gossamer-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="TMPDIR"):
        Home(tmp_path / ("d" * 150)).socket_path()


def test_what_a_kill_left_of_a_pretrained_models_files_is_removed(home: Home) -> None:
    """An export would copy what lies among them."""
    aside, kept = home.root / ".pretrained-k3w_x9ab", home.pretrained_path / "config.json"
    torn = home.pretrained_path / "processor" / ".tokenizer.json-k3w_x9ab"
    for file in (aside / "tokenizer.json", kept, torn):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    fresh = home.root / ".pretrained-01234567"  # of one that is being written
    fresh.mkdir()
    for path in (aside, torn):
        os.utime(path, (0, 0))
    home.tidy()
    assert not aside.exists() and not torn.exists()
    assert kept.exists() and fresh.exists()


def test_sockets_of_scripts_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    homes = [Home(tmp_path / name) for name in ("a" * 120, "b" * 120, "c")]
    for home in homes:
        home.create()
    sockets = [Path(home.socket_path(mark)) for home in homes for mark in ("", "1234abcd", "5678abcd")]
    assert len(set(sockets)) == 9
    try:
        for path in sockets:
            path.touch()
        homes[0].tidy()
        homes[2].tidy()
        assert [path.exists() for path in sockets] == [True, False, False, *[True] * 4, False, False]
    finally:
        for path in sockets:
            path.unlink(missing_ok=True)


# -- one daemon a folder


def test_a_folder_has_one_daemon(home: Home) -> None:
    home.lock()
    with pytest.raises(StorageError, match=f"another node is running in {home.root}"):
        Home(home.root).lock()
    release(home)
    Home(home.root).lock()


def test_a_folder_has_one_daemon_also_where_somebody_removes_the_lock(home: Home) -> None:
    """As who is told that another node is running may do, and then one key signs twice."""
    home.lock()
    (home.root / "lock").unlink()
    with pytest.raises(StorageError, match=f"another node is running in {home.root}"):
        Home(home.root).lock()


def test_who_looks_whether_a_folder_is_free_keeps_no_daemon_from_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = os.open(home.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(looks, fcntl.LOCK_SH)
    monkeypatch.setattr(home_module.time, "sleep", lambda _: fcntl.flock(looks, fcntl.LOCK_UN))
    home.lock()
    os.close(looks)
    assert not Home(home.root).is_free()


HERE = manifest(admission=admission(), name="here")
ELSEWHERE = manifest(admission=admission(), name="elsewhere")


def test_the_node_of_this_machine_is_meant_if_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no node in"):
        node_in(None)
    for name, here in (("one", HERE), ("one-bootstrap", HERE)):
        home = Home(tmp_path / name)
        home.create()
        home.adopt(here)
    assert node_in(None).root == tmp_path / "one"
    assert node_in(tmp_path / "other").root == tmp_path / "other"
    home = Home(tmp_path / "two")
    home.create()
    home.adopt(ELSEWHERE)
    with pytest.raises(ConfigError, match="which node"):
        node_in(None)
