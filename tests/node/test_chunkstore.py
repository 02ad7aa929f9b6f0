"""`gossamer.node.daemon.storage.chunks`: what is read is what was hashed, or it is not there."""

from __future__ import annotations

import errno
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.errors import StorageError
from gossamer.protocol.payloads.chunks import Chunk, pack_chunk
from tests.node.chunkfiles import file_of
from tests.node.full_disk import full
from tests.node.synced import Synced


def put(store: ChunkStore, data: bytes) -> bytes:
    blob = sha256(data).digest()
    store.put(blob, data)
    return blob


def _fail(path: Path) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


def test_what_is_put_is_got_and_found_again(store: ChunkStore) -> None:
    blob = put(store, b"data")
    other = sha256(b"view").digest()
    store.put(other, memoryview(bytearray(b"view")), durable=True)
    assert (store.get(blob), store.get(other)) == (b"data", b"view")
    assert file_of(store, blob).stat().st_mode & 0o777 == 0o600
    again = ChunkStore(store._root)
    assert blob in again and other in again and len(again) == 2


def test_how_much_is_here_and_has_come(store: ChunkStore, tmp_path: Path) -> None:
    blob, other = put(store, b"data"), put(store, b"others")
    put(store, b"data")
    assert store.stock == Stock(held=10, came=10), "what comes again is nothing new"
    store.drop(blob)
    store.drop(blob)
    assert store.stock == Stock(held=6, came=10)
    assert (store.length(blob), store.length(other)) == (0, 6)
    assert ChunkStore(tmp_path / "chunks").stock == Stock(held=6, came=0)


def test_a_chunk_has_the_size_of_its_bytes_and_no_other(store: ChunkStore) -> None:
    blob = put(store, b"some data")
    assert (store.fits(blob, 9), store.fits(blob, 8), store.fits(bytes(32), 9)) == (True, False, None)
    file_of(store, blob).write_bytes(b"some")
    again = ChunkStore(store._root)
    assert again.fits(blob, 9) is None, "a torn file says nothing of the size that its hash has"
    assert blob not in again
    other = put(store, b"other data")
    again = ChunkStore(store._root)
    file_of(store, other).unlink()
    file_of(store, other).mkdir()  # as any other file that cannot be read
    assert again.fits(other, 4) is None and other in again


def test_a_chunk_is_read_for_its_size_once(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may state another size for it, in as many records as they like."""
    blob, other = put(store, b"some data"), put(store, b"other data")
    again = ChunkStore(store._root)
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))
    assert [again.fits(blob, 8) for _ in range(3)] == [False] * 3
    assert read == [file_of(store, blob)]
    assert store.fits(other, 8) is False and len(read) == 1, "what was put here is known"


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "longer", "gone"])
def test_a_damaged_file_is_removed_and_can_be_put_again(store: ChunkStore, damage: str) -> None:
    blob = put(store, b"some data")
    path = file_of(store, blob)
    content = {"torn": b"some", "flipped": b"some dat`", "empty": b"", "longer": b"some data!"}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[damage])
    assert blob in store, "found only when read"
    with pytest.raises(MissingChunkError, match="missing or damaged") as error:
        store.get(blob)
    assert error.value.blob == blob
    assert blob not in store and not path.exists()
    put(store, b"some data")
    assert store.get(blob) == b"some data"


# -- packed ones

CODES = bytes([0x88, 0x89, 0x98, 0x88]) * 500
"""As those of `int4`: few different ones."""


def test_a_chunk_lies_as_it_travels(store: ChunkStore) -> None:
    blob = put(store, CODES)
    assert store.get(blob) == CODES
    assert store.read(blob) == Chunk(CODES, pack_chunk(CODES))
    length = file_of(store, blob).stat().st_size
    assert store.stock == Stock(held=length, came=length) and store.length(blob) == length < len(CODES) / 10
    again = ChunkStore(store._root)
    assert (again.fits(blob, len(CODES)), again.fits(blob, length)) == (True, False)
    assert again.stock.held == length and again.get(blob) == CODES
    again.drop(blob)
    assert again.stock.held == 0 and len(ChunkStore(store._root)) == 0


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "longer", "another", "unpacked"])
def test_a_damaged_frame_is_removed_too(store: ChunkStore, damage: str) -> None:
    blob = put(store, CODES)
    path = file_of(store, blob)
    frame = path.read_bytes()
    content = {"torn": frame[:-3], "empty": b"", "longer": frame + b"!", "unpacked": CODES}
    content["flipped"] = frame[:-1] + bytes([frame[-1] ^ 1])
    content["another"] = pack_chunk(CODES[::-1]) or b""
    path.write_bytes(content[damage])
    with pytest.raises(MissingChunkError):
        ChunkStore(store._root).get(blob)
    assert not path.exists()


def unpacked(store: ChunkStore, data: bytes) -> bytes:
    """A chunk as releases before this one stored it."""
    blob = sha256(data).digest()
    path = store._root / blob.hex()[:2] / blob.hex()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return blob


def test_what_an_earlier_release_stored_is_there_once(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = unpacked(store, CODES)
    plain, again = file_of(store, blob), ChunkStore(store._root)
    assert again.read(blob) == Chunk(CODES, None) and again.stock.held == len(CODES)
    with monkeypatch.context() as patch:  # nor is it left where it could not be read for a while
        patch.setattr(Path, "read_bytes", _fail)
        with pytest.raises(MissingChunkError):
            again.get(blob)
    put(again, CODES)
    packed = file_of(store, blob)
    assert packed != plain and [packed] == list(plain.parent.iterdir())
    assert again.get(blob) == CODES and again.stock.held == packed.stat().st_size
    assert again.stock.came >= 0, "what comes packed is no less"


def test_what_an_earlier_release_stored_may_be_put_anew_as_it_is_read(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = unpacked(store, CODES)
    daemon, reader = ChunkStore(store._root), ChunkStore(store._root, read_only=True)
    read_bytes = Path.read_bytes

    def late(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        put(daemon, CODES)
        return path.read_bytes()

    monkeypatch.setattr(Path, "read_bytes", late)
    assert daemon.get(blob) == CODES
    assert blob in daemon and not daemon.has_mislaid
    assert reader.get(blob) == CODES and reader.fits(blob, len(CODES))


def test_the_old_file_may_stay_where_it_cannot_be_removed(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = unpacked(store, CODES)
    again = ChunkStore(store._root)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", refuse)
    put(again, CODES)
    assert again.read(blob).frame == pack_chunk(CODES)


def test_a_frame_that_is_torn_says_nothing_of_the_size(store: ChunkStore) -> None:
    """As a power cut leaves them: found at the start, and not only once somebody wants them."""
    for data in (CODES, CODES[::-1]):
        blob = put(store, data)
        with open(file_of(store, blob), "r+b") as file:
            file.truncate(0 if data == CODES else 9)
        again = ChunkStore(store._root)
        assert again.fits(blob, len(data)) is None and blob not in again


def test_a_frame_under_another_size_is_damaged(store: ChunkStore) -> None:
    blob = put(store, CODES)
    path = file_of(store, blob)
    path.rename(path.with_name(f"{blob.hex()}.7.{path.stat().st_size}"))
    again = ChunkStore(store._root)
    assert again.fits(blob, len(CODES)) is None and blob not in again


def test_a_chunk_that_could_not_be_removed_can_be_later(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = put(store, CODES)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Read-only"):
            store.drop(blob)
    store.drop(blob)
    assert not file_of(store, blob).exists() and store.stock.held == 0


def test_a_reader_finds_what_came_since(store: ChunkStore) -> None:
    put(store, b"data")
    reader = ChunkStore(store._root, read_only=True)
    assert reader.get(put(store, CODES)) == CODES
    assert reader.get(put(store, b"more")) == b"more"
    with pytest.raises(MissingChunkError):
        reader.get(bytes(32))


def test_all_that_is_damaged_of_a_file_is_found_at_once(store: ChunkStore) -> None:
    blobs = [put(store, data) for data in (b"one ", b"two ", b"three")]
    assert store.join(blobs) == b"one two three"
    for blob in blobs[:2]:
        file_of(store, blob).write_bytes(b"zero")
    with pytest.raises(MissingChunkError):
        store.join(blobs)
    assert [blob in store for blob in blobs] == [False, False, True]


def test_nothing_is_stored_in_another_folder_that_comes_in_our_nodes_place(tmp_path: Path) -> None:
    """As below a disk that is unmounted, or where a link is changed: it may be another node's."""
    home, other = tmp_path / "d", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    store = ChunkStore(home / "chunks")
    home.rename(tmp_path / "away")
    home.symlink_to(other)
    with pytest.raises(FileNotFoundError):
        put(store, b"x")
    assert list(other.iterdir()) == []
    home.unlink()
    (tmp_path / "away").rename(home)
    assert store.get(put(store, b"x")) == b"x"


def test_a_folder_that_is_away_for_a_moment_costs_nothing(store: ChunkStore, tmp_path: Path) -> None:
    blob = put(store, b"data")
    away = tmp_path / "away"
    store._root.rename(away)
    with pytest.raises(StorageError, match="cannot read") as error:
        store.get(blob)
    assert not isinstance(error.value, MissingChunkError)
    away.rename(store._root)
    assert blob in store and store.get(blob) == b"data"


def test_what_a_disk_does_not_give_out_is_kept_and_looked_for_again(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was reset, or an NFS server that was away; but it may be damaged, and is fetched again."""
    blob, other = put(store, b"data"), put(store, b"other")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", _fail)
        for lost in (blob, other):
            with pytest.raises(MissingChunkError):
                store.get(lost)
        assert blob not in store and file_of(store, blob).exists()
        assert store.has_mislaid and store.find_again() == []
    put(store, b"other")
    assert store.find_again() == [blob], "the other has come again"
    assert blob in store and not store.has_mislaid
    assert store.stock.held == len(b"data" + b"other")


def test_what_is_looked_for_again_may_be_damaged_or_dropped(store: ChunkStore, tmp_path: Path) -> None:
    """An empty folder in place of the chunks', as where a disk was mounted."""
    kept, damaged, dropped = (put(store, data) for data in (b"kept", b"damaged", b"dropped"))
    store._root.rename(tmp_path / "away")
    store._root.mkdir()
    for blob in (kept, damaged, dropped):
        with pytest.raises(MissingChunkError):
            store.get(blob)
    store._root.rmdir()
    (tmp_path / "away").rename(store._root)
    file_of(store, damaged).write_bytes(b"damage")
    store.drop(dropped)
    assert store.find_again() == [kept]
    assert not store.has_mislaid and len(store) == 1


def test_what_was_dropped_is_not_looked_for_again(store: ChunkStore) -> None:
    dropped, lost = put(store, b"dropped"), put(store, b"lost")
    store.drop(dropped)
    file_of(store, lost).unlink()
    for _ in range(2):
        for blob in (dropped, lost):
            with pytest.raises(MissingChunkError):
                store.get(blob)
        assert store._mislaid.keys() == {lost}
    assert store.stock.held == 0


def test_a_full_disk_leaves_nothing_behind(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        put(store, b"data")
    assert sha256(b"data").digest() not in store
    assert [file for _, _, files in os.walk(store._root) for file in files] == []


def test_chunks_that_somebody_removed_are_made_room_for_again(tmp_path: Path) -> None:
    """In the node's folder; where that is gone (a disk unmounted, say), nothing is made in its place."""
    (tmp_path / "node").mkdir()
    store = ChunkStore(tmp_path / "node" / "chunks")
    lost = put(store, b"lost")
    shutil.rmtree(store._root)
    assert store.get(put(store, b"data")) == b"data"
    with pytest.raises(MissingChunkError):
        store.get(lost)
    shutil.rmtree(tmp_path / "node")
    with pytest.raises(FileNotFoundError):
        put(store, b"more")
    assert not (tmp_path / "node").exists()


def test_foreign_files_do_not_count_and_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "chunks" / "ab").mkdir(parents=True)
    (tmp_path / "chunks" / "stray.txt").write_text("x")
    (tmp_path / "chunks" / "ab" / ("z" * 64)).write_text("x")
    (tmp_path / "chunks" / "ab" / ".half-written").write_text("x")
    assert len(ChunkStore(tmp_path / "chunks")) == 0


def test_only_folders_of_chunks_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of its own has a folder beside them that is not ours to read."""
    root = tmp_path / "chunks"
    blob = put(ChunkStore(root), b"data")
    (root / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(folder: Path | os.DirEntry[str]) -> object:
        if os.fspath(folder).endswith("lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert blob in ChunkStore(root)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("in the way")
    with pytest.raises(StorageError, match="chunks"):
        ChunkStore(tmp_path / "chunks")


def test_all_that_are_here_are_told_and_none_that_was_dropped(store: ChunkStore) -> None:
    blobs = [put(store, bytes([i])) for i in range(3)]
    store.drop(blobs[0])
    store.drop(blobs[0])
    assert store.blobs == ChunkStore(store._root).blobs == {*blobs[1:]}


def test_a_reader_leaves_what_is_damaged_to_the_daemon(store: ChunkStore) -> None:
    blob = put(store, b"data")
    file_of(store, blob).write_bytes(b"date")
    reader = ChunkStore(store._root, read_only=True)
    with pytest.raises(MissingChunkError):
        reader.get(blob)
    assert blob in reader and file_of(store, blob).exists()
    with pytest.raises(StorageError):
        ChunkStore(store._root / "missing", read_only=True)
    assert not (store._root / "missing").exists()


def test_what_cannot_be_read_just_now_is_kept(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many files are open, a file cannot be read and very well be removed."""
    blob = put(store, b"data")

    def refuse(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StorageError, match="Too many open files") as error:
            store.get(blob)
        assert not isinstance(error.value, MissingChunkError)
    assert blob in store and store.get(blob) == b"data"


def test_damage_that_cannot_be_removed_is_missing_too(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that has become read-only, say."""
    blob = put(store, b"data")
    file_of(store, blob).write_bytes(b"dat")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(MissingChunkError):
        store.get(blob)
    assert blob not in store


def test_a_folder_is_opened_while_its_daemon_drops_chunks(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, dropped = put(store, b"kept"), put(store, b"dropped")
    scandir = os.scandir

    def drops_what_was_listed(folder: Path) -> list[os.DirEntry[str]]:
        found = list(scandir(folder))
        if any(entry.name == dropped.hex() for entry in found):
            store.drop(dropped)
        return found

    monkeypatch.setattr(os, "scandir", drops_what_was_listed)
    reader = ChunkStore(store._root, read_only=True)
    assert kept in reader and dropped not in reader and len(reader) == 1


def test_a_durable_chunk_survives_a_power_cut(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    others, ours = put(store, b"of others"), sha256(b"ours").digest()
    store.put(ours, b"ours", durable=True)
    assert file_of(store, ours) in synced
    assert file_of(store, others) not in synced, "it can be fetched again"


def test_a_durable_chunk_is_in_a_folder_that_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("gossamer.node.daemon.storage.chunks.sync_folder", synced.append)
    root = tmp_path / "chunks"
    store = ChunkStore(root)
    assert synced == [tmp_path]
    blob = put(store, b"of others")
    assert synced == [tmp_path], "what can be fetched again need not survive"
    same, other = (bytes([first]) + blob[1:-1] + bytes([blob[-1] ^ 1]) for first in (blob[0], blob[0] ^ 1))
    store.put(same, b"ours", durable=True)
    assert synced[1:] == [root], "though the folder was there already"
    store.put(same, b"ours", durable=True)
    assert synced[2:] == []
    store.put(other, b"ours", durable=True)
    assert synced[2:] == [root]
    ChunkStore(root).put(same, b"ours", durable=True)
    assert synced[3:] == [root], "an earlier run may have ended before it was"


def test_chunks_on_a_disk_that_is_not_mounted_are_missed(tmp_path: Path) -> None:
    root, gone = tmp_path / "chunks", tmp_path / "disk" / "chunks"
    root.symlink_to(gone)
    with pytest.raises(StorageError, match=f"chunks is a link to {gone}, and nothing is there"):
        ChunkStore(root)
