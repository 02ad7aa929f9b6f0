"""`gossamer.node.daemon.storage.chunks`: what is read is what was hashed, or it is not there."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.chunks import RECENT_BYTES, ChunkStore, MissingChunkError
from gossamer.protocol.access.rate_limits import Stock
from gossamer.protocol.errors import StorageError
from gossamer.protocol.payloads import Chunk, pack_chunk
from tests.node.chunkfiles import file_of
from tests.node.full_disk import full
from tests.node.synced import Synced

CODES = bytes([0x88, 0x89, 0x98, 0x88]) * 500
"""As those of `int4`: few different ones."""


def put(store: ChunkStore, data: bytes) -> bytes:
    blob = sha256(data).digest()
    store.put(blob, data)
    return blob


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
    assert blob in again and other in again and len(again.blobs) == 2


def test_what_is_read_next_is_read_from_memory_once(store: ChunkStore) -> None:
    chunk = b"x" * (RECENT_BYTES // 2)
    blobs = [sha256(chunk + bytes([number])).digest() for number in range(3)]
    for number, blob in enumerate(blobs):
        store.put(blob, chunk + bytes([number]), is_read_next=True)
        file_of(store, blob).write_bytes(b"damaged")
    assert store.get(blobs[2]) == chunk + b"\2"
    for blob in (blobs[0], blobs[2]):  # no room was left for the first, and the last was read
        with pytest.raises(MissingChunkError):
            store.get(blob)
    store.drop(blobs[1])
    with pytest.raises(MissingChunkError):
        store.get(blobs[1])


def test_how_much_is_here_and_has_come(store: ChunkStore, tmp_path: Path) -> None:
    blob, other = put(store, b"data"), put(store, b"others")
    put(store, b"data")
    assert store.stock == Stock(held=10, came=10), "what comes again is nothing new"
    store.drop(blob)
    store.drop(blob)
    assert store.stock == Stock(held=6, came=10)
    assert (store.length(blob), store.length(other)) == (0, 6)
    assert ChunkStore(tmp_path / "chunks").stock == Stock(held=6, came=0)


@pytest.mark.parametrize("data", [b"some data", CODES], ids=["plain", "packed"])
def test_a_chunk_has_the_size_of_its_bytes_unless_its_file_is_torn(store: ChunkStore, data: bytes) -> None:
    blob = put(store, data)
    size = len(data)
    assert (store.fits(blob, size), store.fits(blob, 8), store.fits(bytes(32), 9)) == (True, False, None)
    with open(file_of(store, blob), "r+b") as file:
        file.truncate(7)
    again = ChunkStore(store._root)
    assert again.fits(blob, size) is None and blob not in again
    assert again.get(put(again, data)) == data


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "longer", "another", "unpacked", "gone"])
@pytest.mark.parametrize("data", [b"some data", CODES], ids=["plain", "packed"])
def test_a_damaged_file_is_removed_and_can_be_put_again(store: ChunkStore, data: bytes, damage: str) -> None:
    blob = put(store, data)
    path = file_of(store, blob)
    kept = path.read_bytes()
    content = {"torn": kept[:-3], "empty": b"", "longer": kept + b"!", "unpacked": CODES}
    content["flipped"] = kept[:-1] + bytes([kept[-1] ^ 1])
    content["another"] = pack_chunk(CODES[::-1]) or b""
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[damage])
    assert blob in store, "found only when read"
    with pytest.raises(MissingChunkError, match="missing or damaged") as error:
        store.get(blob)
    assert error.value.blob == blob
    assert blob not in store and not path.exists()
    put(store, data)
    assert store.get(blob) == data


# -- packed ones


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
    assert again.stock.held == 0 and not ChunkStore(store._root).blobs


def test_a_full_disk_leaves_nothing_behind(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        put(store, b"data")
    assert sha256(b"data").digest() not in store
    assert [file for _, _, files in os.walk(store._root) for file in files] == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_what_a_disk_does_not_give_out_is_missing(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    blob = put(store, b"data")

    def refuse(path: Path) -> bytes:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(MissingChunkError):
            store.get(blob)
    assert blob not in store and store.stock.held == 0
    assert store.get(put(store, b"data")) == b"data"


def test_foreign_files_do_not_count_and_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "chunks" / "ab").mkdir(parents=True)
    (tmp_path / "chunks" / "lost+found").mkdir(mode=0)
    (tmp_path / "chunks" / "stray.txt").write_text("x")
    (tmp_path / "chunks" / "ab" / ("z" * 64)).write_text("x")
    (tmp_path / "chunks" / "ab" / ".half-written").write_text("x")
    assert not ChunkStore(tmp_path / "chunks").blobs


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


def test_a_folder_is_opened_while_its_daemon_drops_chunks(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, dropped = put(store, b"kept"), put(store, b"dropped")
    scandir = os.scandir

    def drops_what_was_listed(folder: Path) -> list[os.DirEntry[str]]:
        found = list(scandir(folder))
        if any(entry.name.startswith(dropped.hex()) for entry in found):
            store.drop(dropped)
        return found

    monkeypatch.setattr(os, "scandir", drops_what_was_listed)
    reader = ChunkStore(store._root, read_only=True)
    assert kept in reader and dropped not in reader and len(reader.blobs) == 1


def test_a_durable_chunk_survives_a_power_cut(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    others, ours = put(store, b"of others"), sha256(b"ours").digest()
    store.put(ours, b"ours", durable=True)
    assert file_of(store, ours) in synced
    assert file_of(store, others) not in synced, "it can be fetched again"
