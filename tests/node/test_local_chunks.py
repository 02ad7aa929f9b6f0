"""`local_chunks`: what cannot be read is fetched, written or looked for again."""

from __future__ import annotations

import errno
import logging
import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gossamer.node.daemon.network import chunk_transfer
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.claims import Claim
from gossamer.protocol.limits import PAYLOAD_CHUNK_BYTES_MIN
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
    blob, other = sha256(b"data").digest(), bytes(32)
    delta = SimpleNamespace(
        record_id=b"r", body=SimpleNamespace(chunks=(blob, other), payload_bytes=PAYLOAD_CHUNK_BYTES_MIN + 1)
    )
    setup.core.ledger.append(delta)
    assert await setup.local.read_chunk(blob) is None and setup.events == []
    setup.chunks.put(blob, b"data")
    assert await setup.local.read_chunk(blob) == Chunk(b"data", None)
    file_of(setup.chunks, blob).write_bytes(b"damaged")
    assert await setup.local.read_chunk(blob) is None
    (event,) = setup.events
    assert isinstance(event, ev.Need) and event.key == b"r" and dict(event.chunks).keys() == {blob, other}


async def test_damage_of_a_snapshot_is_the_archives_to_mend(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    root = snapshots.store(np.arange(4, dtype=np.int32), setup.chunks)
    setup.local._shelf.restore([Claim(2, 1, bytes(32), root)])
    lost: list[bytes] = []
    setup.local.on_snapshot_lost = lost.append
    blob = setup.chunks.get(root)
    file_of(setup.chunks, blob).write_bytes(b"damaged")
    assert await setup.local.read_chunk(blob) is None
    assert lost == [blob] and setup.events == []
    assert "fetching it again" not in caplog.text


async def test_a_snapshot_that_somebody_downloads_is_kept(setup: Setup) -> None:
    older, newer = (snapshots.store(np.full(4, value, np.int32), setup.chunks) for value in (1, 2))
    shelf = setup.local._shelf
    shelf.restore([Claim(4, 2, bytes(32), newer), Claim(2, 1, bytes(32), older)])
    newest = Claim(6, 3, bytes(32), bytes(32))
    assert [claim.round for claim in shelf.kept_beside(newest)] == [4]
    assert setup.local.holds(older)
    assert [claim.round for claim in shelf.kept_beside(newest)] == [4, 2]


async def test_a_disk_that_fails_is_said_once_and_not_for_each_chunk(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pieces = [bytes([number]) * 9 for number in range(20)]
    blobs = [sha256(piece).digest() for piece in pieces]
    for blob, piece in zip(blobs, pieces, strict=True):
        setup.chunks.put(blob, piece)
    body = SimpleNamespace(chunks=tuple(blobs), payload_bytes=20 * PAYLOAD_CHUNK_BYTES_MIN)
    setup.core.ledger.append(SimpleNamespace(record_id=b"r", body=body))
    with monkeypatch.context() as failing:

        def fail(_: Path) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        failing.setattr(Path, "read_bytes", fail)
        assert [await setup.local.read_chunk(blob) for blob in blobs] == [None] * 20
    assert sum(isinstance(event, ev.Need) for event in setup.events) == 20
    assert caplog.text.count("was damaged on disk; fetching it again") == 1


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
