"""`home`: nothing readable by others, nothing half-written, one clear line when damaged."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.bootstrap.invites import invite
from gossamer.node import files as wholefile
from gossamer.node.daemon.network.tls import Certificate
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.protocol.access.acl import Invitation, Role
from gossamer.protocol.errors import ConfigError, DiskFullError, StorageError
from gossamer.protocol.manifest import Manifest
from tests.node.full_disk import full
from tests.node.synced import Synced
from tests.protocol.builders import OWNER, SMALL, manifest, newer, older


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "node")
    home.create()
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_for_its_owner_only(home: Home) -> None:
    home.lock.take()
    home.identity()
    home.adopt(SMALL)
    home.write_daemon(address="127.0.0.1:1")
    assert mode(home.root) == 0o700
    for path in (home.key_path, home.manifest_path, home.daemon_path, home.root / "lock"):
        assert mode(path) == 0o600, path


def test_folders_on_the_way_are_for_their_owner_too(tmp_path: Path) -> None:
    Home(tmp_path / "nodes" / "swarm").create()
    assert (tmp_path / "nodes").stat().st_mode & 0o777 == 0o700


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
    monkeypatch.setattr(wholefile, "open_aside", full)
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
        lambda: another.copy_key(home),
        lambda: home.adopt(SMALL),
        lambda: home.keep_invitation(here),
        lambda: home.keep_task("task.py:Mine"),
        lambda: Certificate.of(home.tls_path),
    ):
        with pytest.raises(DiskFullError, match=r"the disk is full; free some space$"):
            keep()
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(DiskFullError, match="lock: the disk is full"):
        home.lock.take()


def test_a_task_in_a_file_whose_name_is_no_text(home: Home) -> None:
    text = os.fsdecode(b"\xff/task.py:Mine")
    home.keep_task(text)
    assert home.task() == text


def test_what_is_kept_already_needs_no_room(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    here = invitation(home)
    home.adopt(SMALL)
    home.keep_invitation(here)
    home.keep_task("task.py:Mine")
    monkeypatch.setattr(wholefile, "open_aside", full)
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
    with pytest.raises(StorageError, match=f"a link to {disk.key_path}, and nothing is there: is its disk"):
        home.identity()
    assert home.key_path.is_symlink() and list(home.root.iterdir()) == [home.key_path]
    assert disk.identity().node_id == home.identity().node_id


def test_a_folder_in_the_place_of_a_key_is_no_key_that_others_can_read(home: Home) -> None:
    home.key_path.mkdir(mode=0o755)
    with pytest.raises(StorageError, match="key is a folder, where a file should be"):
        home.identity()


def test_who_makes_a_key_at_the_same_time_takes_the_first_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[bytes] = []
    random = os.urandom

    def overtaken(size: int) -> bytes:  # another process makes the key while this one is about to
        monkeypatch.setattr("gossamer.node.home.os.urandom", random)
        names.append(Home(home.root).identity().node_id)
        return random(size)

    monkeypatch.setattr("gossamer.node.home.os.urandom", overtaken)
    names.append(home.identity().node_id)
    names.append(Home(home.root).identity().node_id)
    assert len(names) == 3 and len(set(names)) == 1
    assert list(home.root.iterdir()) == [home.key_path]


def test_a_folder_that_cannot_be_written_to_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.unwritable() is None, "chunks are not there yet"
    home.chunks_path.mkdir()
    assert home.unwritable() is None
    for folder in (home.chunks_path, home.root):  # which are on two disks, it may be
        monkeypatch.setattr(os, "access", lambda path, _, folder=folder: path != folder)
        assert home.unwritable() == folder


@pytest.mark.parametrize("content", [b"", b"junk", b"-5", b"9" * 40, b"9" * 100_000])
def test_a_damaged_count_of_starts_begins_anew(home: Home, content: bytes) -> None:
    """At the clock, so that it is beyond those of earlier starts, which others remember."""
    home.incarnation_path.write_bytes(content)
    now = time.time_ns() // 1_000_000
    first = home.next_incarnation()
    assert now <= first < 2**53, "a message can carry it"
    assert home.next_incarnation() > first


@pytest.mark.parametrize("content", [b"", b"{", b"5", b'{"a": 1}', b"[" * 100_000])
def test_unusable_addresses_are_none_at_all(home: Home, content: bytes) -> None:
    home.peers_path.write_bytes(content)
    assert home.read_peers() == ()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="choose another --dir"):
        Home(tmp_path / "file" / "node").create()


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


@pytest.mark.parametrize(("written", "key"), [(newer, r"outer\.nesterov"), (older, "admission")])
def test_a_manifest_of_another_release_is_not_called_damaged(
    home: Home, written: Callable[[Manifest], bytes], key: str
) -> None:
    home.manifest_path.write_bytes(written(SMALL))
    with pytest.raises(StorageError, match=rf"release cannot use .*{key}: .*: run the release that wrote it"):
        home.manifest()


def test_what_cannot_be_read_is_not_called_damaged(home: Home) -> None:
    """Else somebody would remove another user's manifest."""
    for path, read in ((home.manifest_path, home.manifest), (home.invitation_path, home.invitation)):
        path.mkdir()
        with pytest.raises(StorageError, match=rf"^cannot read .*/{path.name}: Is a directory; does the"):
            read()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_an_unusable_daemon_file_is_none_at_all(home: Home, content: bytes) -> None:
    assert home.read_daemon() is None
    home.daemon_path.write_bytes(content)
    assert home.read_daemon() is None
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


def test_a_folder_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff")
    assert Home(odd).socket_path() == str(odd / "trainer.sock")
    assert Home(odd / ("d" * 120)).socket_path() != Home(tmp_path / ("d" * 120)).socket_path()


def test_no_folder_for_a_socket_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StorageError, match="set TMPDIR"):
        Home(tmp_path / ("d" * 120)).socket_path()


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


def test_a_socket_path_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(StorageError, match="set TMPDIR to a shorter one"):
        Home(deep / "d").socket_path()


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


def test_sockets_of_scripts_that_were_killed_are_removed(home: Home) -> None:
    left = Path(home.socket_path("1234abcd"))
    assert left == home.root / "trainer-1234abcd.sock"
    left.touch()
    home.tidy()
    assert not left.exists()


def test_so_are_those_of_a_folder_whose_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    homes = [Home(tmp_path / (letter * 120)) for letter in "ab"]
    for home in homes:
        home.create()
    sockets = [Path(home.socket_path(mark)) for home in homes for mark in ("", "1234abcd", "5678abcd")]
    assert len(set(sockets)) == 6
    try:
        for path in sockets:
            path.touch()
        homes[0].tidy()
        assert [path.exists() for path in sockets] == [True, False, False, True, True, True]
    finally:
        for path in sockets:
            path.unlink(missing_ok=True)


def test_a_folder_is_tidied_where_there_is_none_for_sockets(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    left = Path(home.socket_path("1234abcd"))
    left.touch()
    monkeypatch.setattr("tempfile.gettempdir", none_usable)
    home.tidy()
    assert not left.exists()
