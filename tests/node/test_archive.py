"""Forgetting: what is closed goes from disk, and only that. Fetching ahead: nothing is adopted by it."""

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gossamer.node.phi import snapshots
from gossamer.node.phi.archive import Archive
from gossamer.node.phi.merger import Base
from gossamer.node.phi.snapshots import SnapshotShelf
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.chunks import HASH_BYTES, chunk_hashes, root_of
from gossamer.protocol.effects import Close, Event, Need
from gossamer.protocol.history import Claim


def delta(*chunks: bytes) -> Any:
    return SimpleNamespace(body=SimpleNamespace(chunks=tuple(sha256(chunk).digest() for chunk in chunks)))


async def test_chunks_that_an_open_round_shares_survive_the_closing_of_another(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    for data in (b"old", b"shared", b"new"):
        chunks.put(sha256(data).digest(), data)
    closed, still_open = delta(b"old", b"shared"), delta(b"shared", b"new")
    noted: list[tuple[Base, int]] = []

    async def close_up_to(floor: int) -> Base:
        return Base(floor, bytes(32), 0)

    archive = Archive(
        SimpleNamespace(ledger=[still_open], own_last=7),  # type: ignore[arg-type]
        SimpleNamespace(close_up_to=close_up_to, on_merged=None),  # type: ignore[arg-type]
        chunks,
        SimpleNamespace(close_up_to=lambda base, own_last: noted.append((base, own_last))),  # type: ignore[arg-type]
        SnapshotShelf(chunks, 0),
        dispatch=lambda event: None,
    )
    archive.close(Close(5, (closed,)))
    await archive._one_thing()
    assert noted == [(Base(5, bytes(32), 0), 7)]
    assert [data for data in (b"old", b"shared", b"new") if sha256(data).digest() in chunks] == [
        b"shared",
        b"new",
    ]


async def test_what_is_fetched_ahead_is_not_adopted(tmp_path: Path) -> None:
    chunks = ChunkStore(tmp_path / "chunks")
    hashes = chunk_hashes(b"\0" * 16)
    wanted, other = (Claim(8, 1, bytes(32), root) for root in (root_of(hashes), bytes(32)))
    asked: list[Event] = []
    archive = Archive(
        SimpleNamespace(layout=SimpleNamespace(snapshot_bytes=16)),  # type: ignore[arg-type]
        SimpleNamespace(on_merged=None),  # type: ignore[arg-type]
        chunks,
        SimpleNamespace(),  # type: ignore[arg-type]
        snapshots.SnapshotShelf(chunks, 16),
        dispatch=asked.append,
    )
    archive.prefetch(wanted)
    await archive._go_on_fetching(wanted)
    assert asked == [Need(wanted.root, ((wanted.root, HASH_BYTES),))]
    chunks.put(wanted.root, b"".join(hashes))
    await archive._go_on_fetching(wanted)
    assert asked[1:] == [Need(wanted.root, ((hashes[0], 16),))]
    chunks.put(hashes[0], b"\0" * 16)
    await archive._go_on_fetching(wanted)
    assert len(asked) == 2, "all of it is here, and only the core's word is missing"
    archive.adopt(other)
    chunks.drop(hashes[0])
    await archive._go_on_fetching(wanted)
    assert len(asked) == 2, "the core has chosen another one since"
