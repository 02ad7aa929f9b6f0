"""Few bodies at once on a slow line, many on a fast one; who reads nothing holds nobody up. And rations."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.network import chunk_transfer as limits_module
from gossamer.node.daemon.network.chunk_transfer import (
    BUFFERED_BYTES,
    FLOW_S,
    PACE_AT_FIRST,
    PACE_HALF_LIFE_S,
    PIECE_BYTES,
    PLACES_MIN,
    SHARE_BYTES_PER_S,
    STALL_S,
    Upload,
    UploadLimits,
)
from gossamer.node.daemon.network.links import PeerUploads
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import limits
from gossamer.protocol.errors import RefusedError
from gossamer.protocol.limits import (
    CHUNK_BYTES_MAX,
    FETCHES_PER_LINK_MAX,
    RATION_COPIES,
    UPLOAD_SLOT_S,
    UPLOADS_MAX,
    UPLOADS_PER_MEMBER_MAX,
)
from tests.node.trainer_side import until


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is declined because this machine is slow."""
    monkeypatch.setattr(limits_module, "TURN_PATIENCE_S", 3600.0)


class Line:
    """The limits of one line, and their clock."""

    def __init__(self, store: ChunkStore | None = None) -> None:
        self.now = 100.0
        self.limits = UploadLimits(store, clock=lambda: self.now)
        self._entered: list[object] = []

    def begin(self, node_id: bytes, blob: bytes = b"blob") -> ExitStack | None:
        """An upload, until it is closed; None if there is no room for it."""
        upload = ExitStack()
        try:
            upload.enter_context(self.limits.counted(node_id, blob))
        except RefusedError:
            return None
        return upload

    def fill(self) -> list[ExitStack]:
        """As many uploads as there is room for, to any members."""
        begun = [self.begin(bytes([member])) for member in range(2 * UPLOADS_MAX)]
        return [upload for upload in begun if upload is not None]

    async def place(self, peer: PeerUploads | None = None) -> Upload:
        """A place on the line, until `end`."""
        context = self.limits.place(peer or PeerUploads())
        self._entered.append(context)
        return await context.__aenter__()

    def carry(self, uploads: list[Upload], bytes_per_s: float, seconds: float) -> None:
        """Send over all of them at once, so much in all."""
        pieces = int(seconds * bytes_per_s / PIECE_BYTES)
        for number in range(pieces):
            self.now += seconds / pieces
            uploads[number % len(uploads)].sent(PIECE_BYTES)

    async def all_that_may(self, count: int) -> tuple[list[Upload], list[asyncio.Task[Upload]]]:
        """Ask for so many places, a link each: those that are had, and those that wait."""
        tasks = [asyncio.create_task(self.place()) for _ in range(count)]
        for _ in range(3 * count):
            await asyncio.sleep(0)
        return [task.result() for task in tasks if task.done()], [t for t in tasks if not t.done()]


async def test_a_links_rate_is_what_it_carries_and_not_how_fast_its_buffers_fill() -> None:
    """Measured: each connection of a joiner's took a whole chunk at memory speed, on a line of 50 Mbit/s."""
    line = Line()
    upload = await line.place()
    assert upload.rate == PACE_AT_FIRST
    line.carry([upload], 1e9, 0.004)
    assert upload.rate < 1e6
    line.carry([upload], 50e6, 5 * FLOW_S)
    assert upload.rate == pytest.approx(50e6, rel=0.02)
    line.now += 10 * FLOW_S
    assert upload.rate == PACE_AT_FIRST


async def test_a_slow_line_carries_few_at_a_time_in_their_order() -> None:
    line = Line()
    uploads, waiting = await line.all_that_may(12)
    assert len(uploads) == PACE_AT_FIRST // SHARE_BYTES_PER_S
    line.carry(uploads, 60e3, 2 * PACE_HALF_LIFE_S)
    assert line.limits.places == PLACES_MIN
    for upload in uploads[PLACES_MIN - 1 :]:
        upload.end()
        upload.end()
    await until(waiting[0].done)
    assert not any(task.done() for task in waiting[1:])
    waiting[0].result().end()
    await until(waiting[1].done)
    assert not any(task.done() for task in waiting[2:])
    await _cancelled(*waiting)


async def _is_done(task: asyncio.Task[Upload]) -> bool:
    """Whether somebody has a place, after all have had time to take it."""
    for _ in range(60):
        await asyncio.sleep(0)
    return task.done()


async def _cancelled(*tasks: asyncio.Task[Upload]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_fast_line_carries_many() -> None:
    line = Line()
    uploads, waiting = await line.all_that_may(40)
    line.carry(uploads, 6.25e6, 8.0)
    assert line.limits.is_fast
    await asyncio.gather(*waiting)  # and nobody was declined


async def test_who_reads_nothing_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "STALL_CHECK_S", 0.01)
    line = Line()
    uploads, waiting = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S + 1)
    line.now += 0.9 * STALL_S
    uploads[0].sent(PIECE_BYTES)
    line.now += 0.2 * STALL_S
    assert [upload.is_stalled() for upload in uploads] == [False] + [True] * (len(uploads) - 1)
    await waiting[0]  # and it was not declined


async def test_a_few_that_read_little_keep_nobody_from_a_line_that_carries_much() -> None:
    line = Line()
    uploads, _ = await line.all_that_may(4)
    line.carry(uploads, 6.25e6, 8.0)
    for upload in uploads:
        upload.end()
    slow, _ = await line.all_that_may(20)
    for _ in range(30):
        line.carry(slow, len(slow) * PIECE_BYTES / STALL_S, 1.1 * STALL_S)
        others, waiting = await line.all_that_may(1)
        assert not waiting
        line.carry(others, 6.25e6, 0.16)
        others[0].end()


async def test_readers_with_slow_lines_are_not_taken_for_a_slow_line_of_ours() -> None:
    line = Line()
    uploads, waiting = await line.all_that_may(12)
    for _ in range(6):
        line.carry(uploads, len(uploads) * 48 * 1024, 2 * FLOW_S)
        uploads += [task.result() for task in waiting if await _is_done(task)]
        waiting = [task for task in waiting if not task.done()]
    assert not waiting


async def test_what_fills_buffers_says_nothing_about_the_line() -> None:
    line = Line()
    for _ in range(9):
        uploads, waiting = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S)
        assert not waiting
        for upload in uploads:
            upload.sent(BUFFERED_BYTES)
            upload.end()
    assert line.limits.places == PACE_AT_FIRST // SHARE_BYTES_PER_S


async def test_an_idle_line_is_thought_of_as_before() -> None:
    line = Line()
    line.now += 10 * PACE_HALF_LIFE_S
    assert line.limits.places == PACE_AT_FIRST // SHARE_BYTES_PER_S
    (upload,), _ = await line.all_that_may(1)
    line.now += 10 * PACE_HALF_LIFE_S
    upload.end()
    assert line.limits.places == PLACES_MIN


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES_MAX, 200 * 1024])
async def test_those_known_to_read_slowly_keep_nobody_else_waiting(chunk_bytes: int) -> None:
    line = Line()
    slow, _ = await line.all_that_may(PLACES_MIN)
    for _ in range(3):
        line.carry(slow, 16 * 1024, chunk_bytes / (8 * 1024))
        for upload in slow:
            upload.end()
        slow = [await line.place(upload.peer) for upload in slow]
    line.now += 10 * PACE_HALF_LIFE_S
    for upload in slow:
        upload.sent(PIECE_BYTES)  # none has stalled
    assert line.limits.places == PLACES_MIN
    third = await line.place()
    third.sent(BUFFERED_BYTES + 1)
    line.now += 60.0
    third.end()
    for upload in slow:
        upload.sent(PIECE_BYTES)
    again = asyncio.create_task(line.place(third.peer))
    assert not await _is_done(again), "it is slow itself"
    others, waiting = await line.all_that_may(PLACES_MIN + 1)
    assert len(others) == PLACES_MIN and not again.done()
    await _cancelled(again, *waiting)
    for _ in range(9):
        others[0].end()
        others[0] = await line.place(others[0].peer)


async def test_who_was_slow_is_not_for_good() -> None:
    line = Line()
    other = PeerUploads()
    for seconds, is_slow in ((60.0, True), (0.1, True), (0.1, True), (0.1, True), (0.1, False)):
        upload = await line.place(other)
        line.carry([upload], CHUNK_BYTES_MAX / seconds, seconds)
        upload.end()
        assert other.is_slow is is_slow


async def test_what_waits_on_a_link_is_declined_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "STALL_CHECK_S", 0.01)
    line = Line()
    other = PeerUploads()
    own = await line.place(other)
    await line.all_that_may(9)
    monkeypatch.setattr(UploadLimits, "places", 0)
    waiting = [asyncio.create_task(line.place(other)) for _ in range(3)]
    line.now += 7200.0
    assert not any([await _is_done(task) for task in waiting]), "not while a body before them crosses"
    monkeypatch.setattr(limits_module, "TURN_PATIENCE_S", 0.05)
    own.end()
    with pytest.raises(RefusedError):
        await waiting[0]
    line.now += 0.05
    monkeypatch.setattr(UploadLimits, "places", 0)
    for task in waiting[1:]:
        with pytest.raises(RefusedError):
            await task
    assert not other.sending.locked()


async def test_a_full_line_is_waited_for_so_long_and_a_link_after_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "TURN_PATIENCE_S", 0.05)
    line = Line()
    uploads, _ = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S)
    other = PeerUploads()
    with pytest.raises(RefusedError):
        await line.place(other)
    assert not other.sending.locked()
    uploads[0].end()
    upload = await line.place(other)
    second = asyncio.create_task(line.place(other))
    uploads[1].end()
    await asyncio.sleep(0)
    assert not second.done(), "there is room, but one chunk after another goes to each"
    upload.end()
    (await second).end()
    assert not other.sending.locked()


async def test_a_fast_line_is_not_idle_until_the_answer_comes() -> None:
    line = Line()
    (upload,), _ = await line.all_that_may(1)
    line.carry([upload], 10e3, 2 * PIECE_BYTES / 10e3)
    upload.all_sent()
    assert line.limits._crossing == {upload}, "what is sent still is in the buffers of a slow line"
    line.carry([upload], 6.25e6, 8.0)
    upload.all_sent()
    assert not line.limits._crossing


# -- how many in all and to each member


def test_no_more_than_there_is_room_for() -> None:
    room = Line()
    slow = room.fill()
    assert len(slow) == UPLOADS_MAX
    slow.pop().close()
    slow += room.fill()
    assert len(slow) == UPLOADS_MAX
    room.now += 1.5 * UPLOAD_SLOT_S
    young = room.fill()
    assert len(young) == UPLOADS_MAX, "those that take long do not count"
    for upload in slow:
        upload.close()
    assert room.fill() == [], "as they end, the younger ones still go out"
    for upload in young:
        upload.close()
    assert len(room.fill()) == UPLOADS_MAX


def test_one_member_has_no_more_than_half_of_the_room() -> None:
    """It could ask for one small chunk all the time, in 7 kB a second, and read it slowly: of what others
    asked for nine tenths were declined."""
    room = Line()
    begun = [upload for _ in range(UPLOADS_MAX) if (upload := room.begin(b"n")) is not None]
    assert len(begun) == UPLOADS_PER_MEMBER_MAX >= 2 * FETCHES_PER_LINK_MAX, "honest ones ask for fewer"
    assert room.begin(b"m") is not None
    begun[0].close()
    assert room.begin(b"n") is not None


def test_who_has_used_up_its_ration_is_declined_until_there_is_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "RATION_BYTES_MIN", 0)
    store = ChunkStore(tmp_path / "chunks")
    blobs = [sha256(data).digest() for data in (b"first", b"other")]
    store.put(blobs[0], b"first")
    room = Line(store)

    def sent(node_id: bytes, blob: bytes) -> bool:
        upload = room.begin(node_id, blob)
        if upload is not None:
            upload.close()
        return upload is not None

    copies = int(RATION_COPIES)
    assert [sent(b"n", blobs[0]) for _ in range(copies + 2)] == [True] * copies + [False] * 2
    assert sent(b"m", blobs[0])
    store.put(blobs[1], b"other")
    assert sent(b"n", blobs[1])
