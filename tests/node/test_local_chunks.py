"""`local_chunks`: what cannot be read is fetched, written or looked for again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from gossamer.node.daemon.network import chunk_transfer
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.claims import Claim
from gossamer.protocol.payloads.chunks import Chunk
from tests.node.chunkfiles import file_of
from tests.node.full_disk import FullDisk
from tests.node.transferring import Line, Setup


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


@pytest.fixture
def setup(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(chunks, Line(monkeypatch))


async def test_reading_finds_damage(setup: Setup) -> None:
    blob = sha256(b"data").digest()
    assert await setup.local.read_chunk(blob) is None and setup.damaged == []
    setup.chunks.put(blob, b"data")
    assert await setup.local.read_chunk(blob) == Chunk(b"data", None)
    file_of(setup.chunks, blob).write_bytes(b"damaged")
    assert await setup.local.read_chunk(blob) is None
    assert setup.damaged == [blob]


async def test_a_snapshot_that_somebody_downloads_is_kept(setup: Setup) -> None:
    older, newer = (snapshots.store(np.full(4, value, np.int32), setup.chunks) for value in (1, 2))
    shelf = setup.local._shelf
    shelf.restore([Claim(4, 2, bytes(32), newer), Claim(2, 1, bytes(32), older)])
    newest = Claim(6, 3, bytes(32), bytes(32))
    assert [claim.round for claim in shelf.kept_beside(newest)] == [4]
    assert setup.local.holds(older)
    assert [claim.round for claim in shelf.kept_beside(newest)] == [4, 2]


async def test_what_the_disk_does_not_take_is_dropped_and_nothing_more_is_asked_for(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_transfer, "PATIENCE_S", 0.001)
    setup.line.answer = b"data"
    blob = sha256(b"data").digest()
    with monkeypatch.context() as patch:
        FullDisk(setup.chunks, 10**6, patch)
        for _ in range(3):
            await setup.get(b"data")
        await setup.ask(b"data")
    assert setup.line.got == 1 and not setup.link.sent
    assert {type(event) for event in setup.events} == {ev.ChunkFailed} and len(setup.events) == 4
    setup.disk._open.set()
    await setup.get(b"data")
    assert ev.ChunkArrived(blob) in setup.events and setup.chunks.get(blob) == b"data"
    await setup.ask(b"data")
    assert setup.link.sent == [msg.encode(msg.Want(blob))]
