"""Forgetting: what is closed goes from disk, and only that."""

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gossamer.node.phi.archive import Archive
from gossamer.node.phi.merger import Base
from gossamer.node.phi.snapshots import SnapshotShelf
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.effects import Close


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
