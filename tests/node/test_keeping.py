"""`keeping`: a full disk delays what comes, and loses nothing."""

from __future__ import annotations

import asyncio
import errno
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.network import chunk_transfer as keeping
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import events as ev
from gossamer.protocol import messages as msg
from gossamer.protocol.limits import FETCHES_MAX
from tests.node.full_disk import FullDisk
from tests.node.trainer_side import until
from tests.node.transferring import Line, Setup


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(tmp_path / "chunks")


@pytest.fixture
def setup(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(chunks, Line(monkeypatch))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "No space left on device; fetching pauses until there is space"),
        (errno.ENOENT, "No such file or directory; fetching pauses until the folder can be written to"),
        (errno.EROFS, "Read-only file system; fetching pauses until the folder can be written to"),
    ],
)
async def test_a_disk_that_takes_nothing_pauses_fetching_and_what_came_is_kept_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, said: str
) -> None:
    monkeypatch.setattr(keeping, "DISK_RETRY_S", 0.01)
    monkeypatch.setattr(keeping, "PATIENCE_S", 0.001)
    disk = FullDisk(setup.chunks, 10**6, monkeypatch, code)
    setup.line.answer = b"data"
    await asyncio.gather(*(setup.get(b"data") for _ in range(FETCHES_MAX)))  # all those under way
    assert setup.line.got == FETCHES_MAX
    trying = asyncio.create_task(setup.local.keeping.run())
    for n in range(100):
        await setup.get(b"%d" % n)
        await setup.ask(b"%d" % n)
    assert setup.line.got == FETCHES_MAX and not setup.link.sent, "or it would be thrown away"
    assert {type(event) for event in setup.events} == {ev.ChunkFailed} and len(setup.events) == 216
    await until(lambda: disk.left < 10**6 - FETCHES_MAX - 3)
    assert [record.getMessage() for record in caplog.records] == [f"cannot store a payload: {said}"]
    setup.events.clear()
    disk.left = 0
    blob = sha256(b"data").digest()
    await until(lambda: setup.events == [ev.ChunkArrived(blob)])
    assert setup.line.got == FETCHES_MAX and setup.chunks.get(blob) == b"data"
    setup.line.answer = b"more"
    await setup.get(b"more")
    assert ev.ChunkArrived(sha256(b"more").digest()) in setup.events
    await setup.ask(b"more")
    assert setup.link.sent == [msg.encode(msg.Want(sha256(b"more").digest()))]
    trying.cancel()
    await asyncio.wait([trying])


async def test_what_could_not_be_kept_and_is_of_no_use_any_more_holds_nothing_up(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "DISK_RETRY_S", 0.01)
    FullDisk(setup.chunks, 1, monkeypatch)
    setup.line.answer = b"data"
    await setup.get(b"data")
    assert not setup.local.keeping.works
    setup.wanted_by = ()
    trying = asyncio.create_task(setup.local.keeping.run())
    assert await setup.local.can_keep()
    assert sha256(b"data").digest() not in setup.chunks
    trying.cancel()
    await asyncio.wait([trying])
