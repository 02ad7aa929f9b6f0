"""Snapshots as chunks, and which of them are kept."""

from hashlib import sha256

import numpy as np
import pytest

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.snapshots import FileWriter, SnapshotReader, SnapshotShelf
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.history.average import Sums
from gossamer.protocol.limits import CHUNK_BYTES_MAX, CLAIMS_MAX
from gossamer.protocol.records import Claim
from tests.node.archives import delta
from tests.node.chunkfiles import file_of

NUMEL = CHUNK_BYTES_MAX // 4 * 2 + 100
TOTAL = 4 * NUMEL


@pytest.fixture
def chunks(tmp_path):
    return ChunkStore(tmp_path / "chunks")


def of(root: bytes) -> Claim:
    """A claim of a first model, which has no sums."""
    return Claim(0, 0, bytes(32), root)


def whole(seed: int, chunks: ChunkStore) -> bytes:
    """Store a snapshot with sums of 0."""
    nothing = np.zeros(NUMEL, np.int32)
    return snapshots.store(values(seed), chunks, Sums(nothing, nothing))


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**30), 2**30, NUMEL, dtype=np.int32)


def test_what_is_stored_is_loaded_and_named_by_its_digest(chunks):
    root = snapshots.store(values(1), chunks)
    assert root == snapshots.digest(values(1))
    assert np.array_equal(snapshots.load(of(root), NUMEL, chunks), values(1))
    assert snapshots.missing(of(root), TOTAL, chunks) == ()


@pytest.mark.parametrize("piece", [1 << 10, CHUNK_BYTES_MAX // 4, CHUNK_BYTES_MAX // 3, NUMEL])
def test_what_comes_in_pieces_is_stored_as_a_whole_is(chunks, piece):
    wanted, writer = values(1), FileWriter(chunks)
    for start in range(0, NUMEL, piece):
        writer.add(wanted[start : start + piece])
    root = writer.finish()
    assert root == snapshots.digest(wanted)
    assert np.array_equal(snapshots.load(of(root), NUMEL, chunks), wanted)


def test_what_is_missing_is_named_index_first(chunks, tmp_path):
    root = snapshots.store(values(1), chunks)
    empty = ChunkStore(tmp_path / "other")
    assert snapshots.missing(of(root), TOTAL, empty) == ((root, 3 * 32),)
    empty.put(root, chunks.get(root))
    sizes = [size for _, size in snapshots.missing(of(root), TOTAL, empty)]
    assert sizes == [CHUNK_BYTES_MAX, CHUNK_BYTES_MAX, 400]


def test_what_is_here_is_read_while_the_rest_is_still_to_come(chunks, tmp_path):
    root = snapshots.store(values(1), chunks)
    index = chunks.get(root)
    here = ChunkStore(tmp_path / "other")
    reader = SnapshotReader(of(root), NUMEL, here)
    for blob in (root, index[64:], index[:32]):
        assert reader.read()
        here.put(blob, chunks.get(blob))
    assert reader.read() == ((index[32:64], CHUNK_BYTES_MAX),)
    for blob in (index[64:], index[:32]):
        file_of(here, blob).write_bytes(b"not looked at again")
    here.put(index[32:64], chunks.get(index[32:64]))
    assert reader.read() == ()
    assert reader.phi.dtype == np.int32
    assert np.array_equal(reader.phi, values(1))


def test_a_reader_goes_on_when_what_was_damaged_has_come_again(chunks):
    root = snapshots.store(values(1), chunks)
    blob = chunks.get(root)[32:64]
    sound = chunks.get(blob)
    file_of(chunks, blob).write_bytes(sound[:-1] + b"x")
    reader = SnapshotReader(of(root), NUMEL, chunks)
    with pytest.raises(MissingChunkError):
        reader.read()
    assert reader.read() == ((blob, CHUNK_BYTES_MAX),)
    chunks.put(blob, sound)
    assert reader.read() == ()
    assert np.array_equal(reader.phi, values(1))


def test_an_index_of_another_size_is_refused(chunks):
    root = snapshots.store(values(1), chunks)
    with pytest.raises(PayloadError):
        snapshots.missing(of(root), TOTAL + CHUNK_BYTES_MAX, chunks)


def add(shelf, chunks, round_, seed):
    claim = Claim(round_, round_, bytes([seed]) * 32, whole(seed, chunks))
    keep = shelf.kept_beside(claim)
    shelf.keep((claim, *keep))
    shelf.sweep(chunks.blobs, (), ())
    return claim, keep


def test_the_shelf_keeps_the_newest_two_and_drops_the_rest_from_disk(chunks):
    shelf = SnapshotShelf(chunks, TOTAL)
    claims = [add(shelf, chunks, 16 * n, n)[0] for n in (1, 2, 3)]
    assert shelf.claims == (claims[2], claims[1])
    assert snapshots.missing(claims[1], TOTAL, chunks) == ()
    assert claims[0].root not in chunks
    assert len(chunks.blobs) == len(shelf._owner) == 2 * 4 + 3, "and sums of 0"


def test_a_snapshot_in_use_outlives_its_turn_but_not_for_ever(chunks):
    shelf = SnapshotShelf(chunks, TOTAL)
    first, _ = add(shelf, chunks, 16, 1)
    for n in range(2, 8):
        shelf.touch(first.root)
        add(shelf, chunks, 16 * n, n)
        assert first in shelf.claims
        assert len(shelf.claims) <= CLAIMS_MAX
    shelf._used.clear()
    add(shelf, chunks, 16 * 8, 8)
    assert first not in shelf.claims
    assert first.root not in chunks


def test_a_snapshot_written_anew_replaces_the_one_of_its_round(chunks):
    shelf = SnapshotShelf(chunks, TOTAL)
    older, _ = add(shelf, chunks, 16, 1)
    stale, _ = add(shelf, chunks, 32, 2)
    newer, keep = add(shelf, chunks, 32, 3)
    assert stale not in shelf.claims
    assert shelf.claims[0] == newer
    assert keep == (older,)
    assert shelf.claims == (newer, older)


@pytest.mark.parametrize("damage", ["index", "index gone", "chunk gone"])
def test_a_snapshot_that_is_not_whole_any_more_is_left_out_at_the_start(chunks, damage):
    older, newer = (Claim(16 * n, n, bytes([n]) * 32, whole(n, chunks)) for n in (1, 2))
    index = chunks.get(older.root)
    if damage == "index":
        file_of(chunks, older.root).write_bytes(b"X" + index[1:])
    else:
        chunks.drop(older.root if damage == "index gone" else index[:32])
    shelf = SnapshotShelf(chunks, TOTAL)
    shelf.restore((newer, older))
    assert shelf.claims == (newer,)
    assert len(shelf._owner) == 4 + 3, "what is left of the other is needed no more"


def test_chunks_that_two_snapshots_share_survive_the_older(chunks):
    shelf = SnapshotShelf(chunks, TOTAL)
    for n in (1, 2, 3):
        same_but_last = values(0)
        same_but_last[-1] = n
        claim = Claim(
            16 * n, n, bytes([n]) * 32, snapshots.store(same_but_last, chunks, Sums(same_but_last, values(1)))
        )
        shelf.keep((claim, *shelf.kept_beside(claim)))
        shelf.sweep(chunks.blobs, (), ())
    assert all(snapshots.missing(claim, TOTAL, chunks) == () for claim in shelf.claims)


@pytest.mark.parametrize("size", [0, 399, 401, CHUNK_BYTES_MAX])
def test_an_index_of_chunks_of_other_sizes_is_refused(chunks, size):
    """A liar may list what is here already as part of something else."""
    root = snapshots.store(values(1), chunks)
    other = bytes(size)
    chunks.put(sha256(other).digest(), other)
    index = chunks.get(root)[:64] + sha256(other).digest()
    chunks.put(sha256(index).digest(), index)
    with pytest.raises(PayloadError, match="another size than it has"):
        snapshots.missing(of(sha256(index).digest()), TOTAL, chunks)


def test_an_index_that_lists_one_chunk_with_two_sizes_is_refused(chunks):
    """Nobody can have it, and it would be waited for."""
    root = snapshots.store(values(1), chunks)
    first, second = chunks.get(root)[:32], chunks.get(root)[32:64]
    for blob in (first, second):
        chunks.drop(blob)
    for index in (first + second + first, second + second + second):
        chunks.put(sha256(index).digest(), index)
        with pytest.raises(PayloadError, match="another size than it has"):
            snapshots.missing(of(sha256(index).digest()), TOTAL, chunks)


def test_what_we_publish_survives_the_closing_of_what_is_the_same(chunks):
    """Zeros, say. No record names it yet as those that need it are listed."""
    shelf, closed = SnapshotShelf(chunks, 0), delta(b"zeros", b"old")
    (zeros, old) = closed.body.chunks
    for blob, data in ((zeros, b"zeros"), (old, b"old")):
        chunks.put(blob, data)
    chunks.reserve(zeros)
    shelf.sweep({zeros, old}, (), [])
    assert zeros in chunks and old not in chunks
    shelf.sweep({zeros}, (), [delta(b"zeros")])
    assert zeros in chunks, "the record is here now"
    shelf.sweep({zeros}, (), [])
    assert zeros not in chunks, "and closed"


def test_sums_are_here_once_all_of_them_is_and_never_if_a_liar_listed_them(chunks):
    root = snapshots.store(values(1), chunks)
    assert snapshots.are_here([], TOTAL, chunks) and snapshots.are_here([root, root], TOTAL, chunks)
    lie = sha256(b"short").digest()
    chunks.put(lie, b"short")
    assert not snapshots.are_here([root, lie], TOTAL, chunks)
    chunks.drop(chunks.get(root)[:32])
    assert not snapshots.are_here([root], TOTAL, chunks)
    chunks.drop(root)
    assert not snapshots.are_here([root], TOTAL, chunks)
